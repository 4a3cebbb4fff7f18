"""A missing package says what needed it and which extra brings it."""

import ast
import json
import os
import pathlib
import re
import sys
import tomllib

import pytest

from iha_jax.data import SourceConfig, load_tokenizer
from iha_jax.data.chat import load_template
from iha_jax.data.sources import open_documents
from iha_jax.extras import EXTRAS, needed
from iha_jax.training import cli
from iha_jax.training.metrics import TensorBoard
from tests.blocked import blocked, run_blocked

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a distribution is imported as, where that is another name.
MODULES = {"orbax-checkpoint": "orbax", "lm-eval": "lm_eval", "math-verify": "math_verify"}


def parts_of(extra):
    """The modules that an extra installs, those of extras that it names included."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        name = re.split(r"[<>=\[]", requirement)[0]
        if name == "iha-jax":
            for other in requirement.partition("[")[2].partition("]")[0].split(","):
                yield from parts_of(other)
        else:
            yield MODULES.get(name, name)


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_the_extra_named_installs_the_package(module, extra):
    # ArrayRecord is a dependency of Grain, which the extra names.
    assert {"array_record": "grain"}.get(module, module) in set(parts_of(extra))


def test_every_package_imported_anywhere_is_of_the_core_or_an_extra():
    core = {re.split(r"[<>=\[]", r)[0] for r in PROJECT["dependencies"]}
    assert core == {"jax", "flax", "jaxtyping"}
    known = core | {"numpy", "iha_jax"} | set(EXTRAS) | set(sys.stdlib_module_names)  # numpy: of jax
    for path in (ROOT / "iha_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in known, f"{path}: {name}"


def test_packages_that_are_imported_at_the_top():
    code = """
    import importlib
    import iha_jax.models
    for package, module in (
        ("grain", "iha_jax.data"), ("optax", "iha_jax.training"), ("orbax", "iha_jax.training.checkpoint"),
        ("rich", "iha_jax.training.display"), ("rich", "iha_jax.data.prepare"),
        ("lm_eval", "iha_jax.evaluation.harness"),
    ):
        block(package)
        for name in list(sys.modules):
            if name.startswith(("iha_jax.data", "iha_jax.training", "iha_jax.convert", "iha_jax.evaluation")):
                del sys.modules[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"{package} {module}: {error}")
    """
    out = run_blocked((), code, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    expected = [
        r"grain iha_jax.data: reading data needs the package 'grain': pip install 'iha-jax\[train\]' \(No module.*\)",
        r"optax iha_jax.training: training needs the package 'optax': pip install 'iha-jax\[train\]' \(.*\)",
        r"orbax iha_jax.training.checkpoint: saving and reading checkpoints needs .*'orbax': .*'iha-jax\[train\]'.*",
        r"rich iha_jax.training.display: showing progress needs the package 'rich': pip install 'iha-jax\[train\]'.*",
        r"rich iha_jax.data.prepare: showing progress needs the package 'rich': pip install 'iha-jax\[train\]'.*",
        r"lm_eval iha_jax.evaluation.harness: the evaluation harness needs .*'lm_eval': .*'iha-jax\[eval\]'.*",
    ]
    found = out.stdout.splitlines()
    assert len(found) == len(expected), out.stdout
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def _tokenizer(path):
    return lambda: load_tokenizer(str(path))


def _documents(kind, path):
    return lambda: open_documents(SourceConfig(kind, str(path)))


def _safetensors(folder):
    from iha_jax.convert import huggingface

    return lambda: huggingface._open(folder / "model.safetensors")


LAZY = {
    "tokenizers": (lambda p: _tokenizer(p / "t.json"), "a tokenizer JSON", "data"),
    "sentencepiece": (lambda p: _tokenizer(p / "t.model"), "a SentencePiece model", "data"),
    "transformers": (lambda p: _tokenizer("someone/tokenizer"), "the tokenizer 'someone/tokenizer'", "data"),
    "pyarrow": (lambda p: _documents("files", p / "t.parquet"), "reading Parquet files", "data"),
    "datasets": (lambda p: _documents("hub", "someone/data"), "a source of kind 'hub'", "data"),
    "jinja2": (lambda p: lambda: load_template(str(p / "t.jinja")), "a chat template in Jinja", "eval"),
    "safetensors": (_safetensors, "converting checkpoints", "convert"),
    "tensorboardX": (lambda p: lambda: TensorBoard(p), "log.tensorboard", "tensorboard"),
}


@pytest.mark.parametrize("package", LAZY)
def test_packages_that_are_imported_when_asked_for(package, tmp_path, monkeypatch):
    make, what, extra = LAZY[package]
    for name in ("t.json", "t.model", "t.parquet", "t.jinja", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    call = make(tmp_path)
    load_tokenizer.cache_clear()
    load_template.cache_clear()
    message = rf"^{re.escape(what)} needs the package '{package}': pip install 'iha-jax\[{extra}\]'"
    with blocked(monkeypatch, package), pytest.raises(ImportError, match=message) as raised:
        call()
    assert raised.value.name == package


def test_without_tyro_the_command_line_is_one_line(monkeypatch, capsys):
    with blocked(monkeypatch, "tyro"), pytest.raises(SystemExit) as ended:
        cli.parse([str(ROOT / "configs/tiny.py")])
    assert ended.value.code == 2
    assert re.match(
        r"error: the command line needs the package 'tyro': pip install 'iha-jax\[train\]'", capsys.readouterr().err
    )


def test_without_math_verify_answers_are_compared_as_written_and_reports_say_so():
    code = """
    from iha_jax.evaluation import math_answers
    print(math_answers.equivalence(), math_answers.same_answer("1/2", "0.50 "), math_answers.same_answer(" 2.0", "2"))
    """
    out = run_blocked(("math_verify",), code, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "exact match of canonical forms False True"


def test_without_libtpu_a_plan_says_how_to_get_it():
    out = run_blocked(
        ("libtpu",),
        """
        from tpu.plan import main
        sys.exit(main(["configs/tiny.py", "--topology", "v5e:2x2"]))
        """,
        cwd=ROOT,
        # libtpu, once imported, leaves its place in the environment.
        env={name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"},
    )
    assert out.returncode == 2
    if "planning needs jax 0.8 or newer" not in out.stderr:  # the floor says that first
        assert re.search(r"error: libtpu has no topology v5e:2x2 .*pip install libtpu", out.stderr, re.DOTALL)


def test_a_package_that_is_there_and_broken_says_what_is_broken():
    said = r"'grain': pip install 'iha-jax\[train\]' \(cannot import name 'nothing'"
    with pytest.raises(ImportError, match=said), needed("grain", "this"):
        from json import nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: F401


def test_the_tool_that_blocks_is_sound():
    out = run_blocked(("rich",), "import importlib.util as u; print(u.find_spec('rich'), u.find_spec('jax') is None)")
    assert out.stdout.split() == ["None", "False"], json.dumps(out.stderr)
