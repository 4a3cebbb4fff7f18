"""Where benchmark files are, if they are: they belong to others and aren't part of the project."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = pathlib.Path(os.environ.get("IHA_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))


def data_file(name):
    """The path of a file, or a skipped test."""
    path = DIRECTORY / name
    if not path.is_file():
        pytest.skip(f"no {name} in {DIRECTORY}: set IHA_JAX_TEST_DATA")
    return path
