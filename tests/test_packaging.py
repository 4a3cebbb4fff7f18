"""What is built and installed: the core alone in a bare environment, from the wheel, outside the checkout."""

import pathlib
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAYER = """
import jax, jax.numpy as jnp
from flax import nnx
import iha_jax, iha_jax.nn.linen, iha_jax.models, iha_jax.theory, iha_jax.sharding
layer = iha_jax.InterleavedHeadAttention(4, 32, num_pseudo_heads=2, window=4, rngs=nnx.Rngs(0))
assert layer(jnp.ones((1, 8, 32))).shape == (1, 8, 32)
try:
    import iha_jax.data  # of the trainer's packages Flax brings optax and orbax, but not grain
except ImportError as error:
    assert "pip install 'iha-jax[train]'" in str(error), error
else:
    raise AssertionError("the core brought the trainer's packages")
print(iha_jax.__file__)
"""


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, made as a release makes them."""
    directory = tmp_path_factory.mktemp("dist")
    tools = directory / "tools"
    venv.create(tools, with_pip=True)
    run(tools / "bin/pip", "install", "-q", "build", cwd=directory)
    run(tools / "bin/python", "-m", "build", "-q", "--outdir", directory / "dist", ROOT, cwd=directory)
    return directory / "dist"


@pytest.mark.slow
def test_the_wheel_has_the_package_and_its_types_and_nothing_else(built):
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"iha_jax"}
    assert "iha_jax/py.typed" in names
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "iha_jax").rglob("*.py")}
    assert files <= set(names)
    assert "iha_jax/viz/page.css" in names


@pytest.mark.slow
def test_the_sdist_has_what_the_tests_need(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in (
        "tests/test_packaging.py",
        "configs/tiny.py",
        "docs/index.md",
        "notebooks/iha_colab.ipynb",
        "tpu/plan.py",
    ):
        assert path in names


@pytest.mark.slow
def test_the_core_runs_in_an_environment_that_has_nothing_else(built, tmp_path):
    [wheel] = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    run(tmp_path / "env/bin/pip", "install", "-q", wheel, cwd=tmp_path)
    where = run(tmp_path / "env/bin/python", "-W", "error::DeprecationWarning:iha_jax", "-c", LAYER, cwd=tmp_path)
    assert "site-packages" in where


def test_typed():
    assert (ROOT / "iha_jax" / "py.typed").exists()
    assert sys.version_info >= (3, 11)
