"""Packages beside the core, and which extra brings them. A leaf module.

with needed("optax", "training"):
    import optax
"""

import contextlib
from collections.abc import Iterator

EXTRAS = {
    "optax": "train",
    "orbax": "train",
    "grain": "train",
    "array_record": "train",
    "tyro": "train",
    "rich": "train",
    "tokenizers": "data",
    "sentencepiece": "data",
    "pyarrow": "data",
    "datasets": "data",
    "transformers": "data",
    "safetensors": "convert",
    "jinja2": "eval",
    "lm_eval": "eval",
    "math_verify": "eval",
    "tensorboardX": "tensorboard",
}
"""Top-level module → the extra of this package that installs it."""


@contextlib.contextmanager
def needed(module: str, what: str) -> Iterator[None]:
    """Within it, an import that fails says what needed it and how it is installed.

    Args:
      module: that is imported, one of `EXTRAS` or below it.
      what: needs it, for the message.

    Raises:
      ImportError: in place of the one that came, whose reason is kept: the package may be there and broken.
    """
    try:
        yield
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs the package {package!r}: pip install 'iha-jax[{EXTRAS[package]}]' ({error})", name=package
        ) from error
