"""Imports go one way, and the core stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "iha_jax"
LEAVES = ("sharding", "compat", "json_text", "theory", "data", "viz")
# What each part may import besides itself and the leaves `sharding`, `compat`, `extras` and `json_text`.
ALLOWED = {
    "ops": (),
    "nn": ("ops",),
    "models": ("ops", "nn"),
    "convert": ("ops", "nn", "models", "training"),
    "training": ("ops", "nn", "models", "data"),
    "evaluation": ("ops", "nn", "models", "data", "training", "viz"),
    "experiments": ("ops", "nn", "models", "data", "training", "viz"),
    "generate": ("training", "evaluation"),
    "sharding": (),
    "compat": (),
    "extras": (),
    "json_text": (),
    "theory": (),
    "data": (),
    "viz": ("ops", "nn", "models"),
    "__init__": ("ops", "nn"),
}
# Commands stand at the end of the way, whatever package they are of.
COMMANDS = {"convert/__main__.py": ("data",), "viz/__main__.py": ("data", "training")}


def sources():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def part_of(path):
    return path.parts[0].removesuffix(".py")


def imported_parts(path):
    """Parts of the package that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "iha_jax" and len(pieces) > 1:
                yield pieces[1]


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    allowed = {part, "sharding", "compat", "extras", "json_text", *ALLOWED[part], *COMMANDS.get(path.as_posix(), ())}
    wrong = {name for name in imported_parts(path) if name in ALLOWED} - allowed
    assert not wrong, f"{path} must not import {sorted(wrong)}"


@pytest.mark.parametrize("path", sources(), ids=str)
def test_only_ops_import_pallas_and_ops_import_no_flax(path):
    text = (PACKAGE / path).read_text()
    if part_of(path) == "ops":
        for module in ("flax", "optax"):
            assert f"import {module}" not in text
            assert f"from {module}" not in text
    else:
        assert "jax.experimental.pallas" not in text


@pytest.mark.parametrize("module", ["iha_jax", "iha_jax.nn.linen", "iha_jax.models"])
def test_the_core_pulls_no_training_stack(module):
    heavy = ("optax", "orbax", "grain", "tyro", "chex", "rich", "tensorboardX", "beartype")
    code = (
        f"import sys, flax.nnx, flax.linen; before = set(sys.modules); import {module}; "
        f"print([m for m in {heavy!r} if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"
