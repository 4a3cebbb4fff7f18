"""The documentation site: ``sphinx-build -W docs build/site``."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "iha_jax"
author = "The iha_jax authors"
project_copyright = "The iha_jax authors"
html_title = "iha_jax"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}

# Headings get the anchors that GitHub gives them, so that one link works in both places.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The pages are about names; where they are defined is what the map of modules in architecture.md is for.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Shapes are in the text; an annotation such as "*mixing heads" would be read as markup.
napoleon_attr_annotations = False
# A name in single backquotes is code, as in Markdown.
default_role = "code"

html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_copy_source = False
html_show_sourcelink = False
