"""The pages build without a warning, and their Python runs."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page):
    names = {"__name__": "page"}
    for block in BLOCKS[page]:
        exec(compile(block, str(page), "exec"), names)


def test_modules_and_files_that_commands_name_exist():
    for page in PAGES:
        text = page.read_text()
        for module in re.findall(r"python -m ((?:iha_jax|tpu)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (page.name, module)
        for name in re.findall(r"\b((?:configs|benchmarks|examples)/\w+\.py)", text):
            assert (ROOT / name).exists(), (page.name, name)


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _anchors(page):
    """What a Markdown page's headings are called in addresses."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "tpu" / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor and found.suffix == ".md":
            assert anchor in _anchors(found), target
