"""Examples run, stay short, and learn."""

import importlib.util
import pathlib

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("*.py"))
STEPS = {"plain_jax": 60, "linen_model": 120, "encoder_decoder": 400, "vision_transformer": 400}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 150


@pytest.mark.parametrize(
    "name",
    ["plain_jax"] + [pytest.param(p.stem, marks=pytest.mark.slow) for p in EXAMPLES if p.stem != "plain_jax"],
)
def test_an_example_learns(name, capsys):
    [path] = [path for path in EXAMPLES if path.stem == name]
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.main(STEPS[name])
    assert f"step {STEPS[name] - 1}: loss" in capsys.readouterr().out
    assert losses[-1] < 0.3 * losses[0]
