"""Readers and whatever a file may hold: a result, or an error that says which file and why; never another exception."""

import contextlib
import functools
import gzip
import json
import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from iha_jax.convert.configs import from_huggingface, to_huggingface
from iha_jax.convert.huggingface import read_huggingface, write_huggingface
from iha_jax.data import SourceConfig, load_tokenizer
from iha_jax.data.chat import ChatEncoder, conversation_of, load_template
from iha_jax.data.rows import MANIFEST, Manifest, RowFormat
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import ByteTokenizer, train_tokenizer
from iha_jax.evaluation.problems import _FIELDS, load_benchmark
from iha_jax.experiments.snapshot import load_snapshot, save_snapshot
from iha_jax.models import ModelConfig
from iha_jax.ops import tuning
from iha_jax.training.cli import load
from iha_jax.training.config import TrainConfig
from iha_jax.training.metrics import JsonLines, read_json_lines
from iha_jax.training.serialization import from_json, to_json, to_plain
from iha_jax.training.trained import abstract_model

fuzz = settings(
    max_examples=int(os.environ.get("IHA_JAX_FUZZ", "60")),
    deadline=None,
    derandomize=True,  # the same files everywhere: a failure is seen by everyone
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["messages", "role", "user", "assistant", "content", "\ud800", "1e999", "nan"]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(TEXTS, x, max_size=4), max_leaves=8)
DEEP = "[" * 100_000
LONG = "1" * 10_000


def as_json(value):
    return json.dumps(value)  # NaN and Infinity too, as Python writes and reads them


def changed(data, whole):
    """A copy of a JSON value with one place of it changed, dropped or added to."""
    whole = json.loads(json.dumps(whole))
    place, parent = whole, None
    while isinstance(place, (dict, list)) and place and (parent is None or data.draw(st.integers(0, 3))):
        parent = place
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place = place[key]
    if parent is None:
        return data.draw(VALUES)
    what = data.draw(st.sampled_from(["change", "drop", "add"]))
    if what == "drop":
        del parent[key]
    elif what == "add" and isinstance(parent, dict):
        parent[data.draw(TEXTS)] = data.draw(VALUES)
    else:
        parent[key] = data.draw(VALUES)
    return whole


def damaged(data, content):
    """Bytes with some of them overwritten, or cut short."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    return bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)


@contextlib.contextmanager
def refused(*names):
    """Errors for people only, which name what was read."""
    found = ""
    try:
        yield
    except (ValueError, OSError) as error:
        found = str(error) or "an error without a word"
    for name in names if found else ():
        assert name in found
    assert found != "an error without a word"


def in_a_file(name, content):
    """A file of a directory of its own (kept by the caller)."""
    directory = tempfile.TemporaryDirectory()
    path = pathlib.Path(directory.name) / name
    path.write_bytes(content)
    return directory, path


# ------------------------------------------------------------------------------------------------------------- data

LINES = st.lists(st.binary(max_size=40) | VALUES.map(lambda x: as_json(x).encode()) | TEXTS.map(
    lambda x: as_json({"text": x}).encode()), max_size=6).map(b"\n".join)  # fmt: skip


@fuzz
@given(content=LINES, chat=st.booleans(), name=st.sampled_from(["a.jsonl", "a.txt"]))
@example(content=DEEP.encode(), chat=False, name="a.jsonl")
@example(content=LONG.encode(), chat=True, name="a.jsonl")
@example(content=as_json({"messages": [{"role": ["user"], "content": "x"}]}).encode(), chat=True, name="a.jsonl")
@pytest.mark.filterwarnings("ignore")
def test_a_line_or_text_is_read_or_left_out(content, chat, name):
    directory, path = in_a_file(name, content)
    with directory, refused("a."):
        documents = open_documents(SourceConfig(kind="files", path=str(path), format="chat" if chat else "text"))
        found = [documents[i] for i in range(len(documents))]
        left_out = sum(documents.skipped.values())
        assert left_out == sum(text is None for text in found)
        assert all(text is None or isinstance(text, str) for text in found)
        for text in found:
            if text is not None and chat:
                ChatEncoder(ByteTokenizer(), load_template("chatml"), 64)(text)


@functools.cache
def parquet_bytes():
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "a.parquet"
        pq.write_table(pa.table({"text": ["one", "two", None, "three"]}), path, row_group_size=2)
        return path.read_bytes()


@fuzz
@given(data=st.data())
def test_a_damaged_parquet_file_is_named(data):
    directory, path = in_a_file("a.parquet", damaged(data, parquet_bytes()))
    with directory, refused("a.parquet"):
        documents = open_documents(SourceConfig(kind="files", path=str(path)))
        for i in range(len(documents)):
            documents[i]


@fuzz
@given(value=VALUES)
@example(value=[{"role": {}, "content": "x"}])
@example(value={"messages": [{"role": "assistant", "content": [{"type": "text", "text": 1}]}]})
def test_a_record_is_a_conversation_or_not(value):
    with contextlib.suppress(ValueError):
        assert all(set(message) == {"role", "content"} for message in conversation_of(value))


PIECES = ["{{", "}}", "{%", "%}", "for m in messages", "endfor", "if", "endif", "m.content", "messages", "|", "tojson",
          "1/0", "[0]", ".x", "raise_exception('no')", "().__class__", "range(3)", "~", "'a'*99", "\n"]  # fmt: skip


@fuzz
@given(source=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=10).map(" ".join))
@example(source="{{ 1 / 0 }}")
@example(source="{{ messages[7].content }}")
@example(source="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
@example(source="{{ ''.__class__.__mro__[1].__subclasses__() }}")
@example(source="{{" + "(" * 500 + "1" + ")" * 500 + "}}")
def test_a_chat_template_writes_or_refuses(source):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    directory, path = in_a_file("chat.jinja", source.encode("utf-8", "replace"))
    with directory, refused("chat.jinja"):
        parts = load_template(str(path)).parts(messages)
        assert "<class" not in "".join(text for text, _ in parts)


@fuzz
@given(data=st.data())
def test_a_damaged_manifest_is_named(data):
    entry = {
        "files": [{"name": "train-0", "rows": 1, "sha256": "x"}],
        "rows": 1,
        "documents": 1,
        "tokens": 8,
        "bytes": 8,
    }
    whole = json.loads(
        Manifest(RowFormat(8, "uint16"), "bytes", "x", 0.1, {"train": entry, "held_out": entry}, {}).to_json()
    )
    directory, path = in_a_file(MANIFEST, damaged(data, as_json(changed(data, whole)).encode()))
    with directory, refused(MANIFEST):
        manifest = Manifest.read(path.parent)
        for file in manifest.files(path.parent, "train"):
            assert pathlib.Path(file).parent == path.parent
        assert manifest.bytes_per_target("train") >= 0


@fuzz
@given(record=st.binary(max_size=60) | st.binary(min_size=48, max_size=48))
def test_a_row_has_its_size_or_is_refused(record):
    with refused(str(len(record))):
        row = RowFormat(8, "uint16").decode(record)
        assert {name: x.shape for name, x in row.items()} == dict.fromkeys(row, (8,))


@functools.cache
def tokenizer_json():
    pytest.importorskip("tokenizers")
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "t.json"
        train_tokenizer(["to be or not to be " * 20], 262, path)
        return json.loads(path.read_text())


@fuzz
@given(data=st.data(), text=TEXTS)
def test_a_tokenizer_file_loads_or_is_named(data, text):
    directory, path = in_a_file("t.json", as_json(changed(data, tokenizer_json())).encode("utf-8", "replace"))
    with directory, refused("t.json"):
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------- runs and settings

CONFIG = to_plain(load(str(pathlib.Path(__file__).parents[1] / "configs" / "tiny.py")))


@fuzz
@given(data=st.data())
def test_a_configuration_is_read_or_refused(data):
    text = as_json(changed(data, CONFIG))
    with refused():
        found = from_json(TrainConfig, text)
        assert isinstance(found, TrainConfig)
        assert json.loads(to_json(found))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", DEEP, LONG, "{}", '{"model": 3}'])
def test_what_is_no_configuration_is_refused(text):
    with pytest.raises(ValueError, match="TrainConfig"):
        from_json(TrainConfig, text)


@fuzz
@given(
    content=st.binary(max_size=40) | VALUES.map(lambda x: as_json({"version": tuning.VERSION, "devices": x}).encode())
)
@example(content=DEEP.encode())
def test_a_table_of_tile_sizes_is_read_or_named(content):
    directory, path = in_a_file("tuning.json", content)
    with directory, refused("tuning.json"):
        tuning.read(path)


@fuzz
@given(content=LINES)
@example(content=b'{"step": "one"}\n{"step": null}\n{"step": 1}')
@example(content=DEEP.encode())
def test_damaged_metrics_do_not_keep_a_run_from_going_on(content):
    directory, path = in_a_file("metrics.jsonl", content)
    with directory:
        assert all(isinstance(line["step"], (int, float)) for line in read_json_lines(path))
        writer = JsonLines(path, resume_step=3)
        writer.write(4, {"loss": 1.0})
        writer.close()
        assert read_json_lines(path)[-1] == {"step": 4, "loss": 1.0}


@fuzz
@given(data=st.data())
def test_a_damaged_snapshot_is_named(data):
    state = {"a": np.arange(6.0), "b": np.ones((2, 2), np.float32)}
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "state.npz"
        save_snapshot(path, state, {"step": 1})
        path.write_bytes(damaged(data, path.read_bytes()))
        with refused("state.npz"):
            load_snapshot(path, state)


# ---------------------------------------------------------------------------------------------- models and benchmarks

SMALL = ModelConfig(
    vocab_size=32,
    max_length=16,
    num_layers=1,
    model_dim=8,
    num_heads=2,
    pattern=("mha",),
    mlp="swiglu",
    scan_layers=False,
)


@fuzz
@given(data=st.data())
def test_a_huggingface_configuration_is_read_or_named(data):
    whole = {key: value for key, value in to_huggingface(SMALL).items() if not key.startswith("iha")}
    files = {**huggingface_files(), "config.json": as_json(changed(data, whole)).encode()}
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (pathlib.Path(directory) / name).write_bytes(content)
        with refused():
            read_huggingface(directory)


@functools.cache
def huggingface_files():
    pytest.importorskip("safetensors")
    params = {path: np.zeros(x.shape, x.dtype) for path, x in abstract_model(SMALL).params.items()}
    with tempfile.TemporaryDirectory() as directory:
        write_huggingface(pathlib.Path(directory) / "m", SMALL, params)
        return {file.name: file.read_bytes() for file in (pathlib.Path(directory) / "m").iterdir()}


@fuzz
@given(data=st.data())
def test_damaged_weights_are_refused(data):
    files = huggingface_files()
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (pathlib.Path(directory) / name).write_bytes(
                damaged(data, content) if name.endswith(".safetensors") else content
            )
        with refused():
            _, params = read_huggingface(directory)
            assert all(isinstance(x, np.ndarray) for x in params.values())


ROWS = {
    "gsm8k": {"question": "1 + 1?", "answer": "#### 2"},
    "math500": {"problem": "1 + 1", "solution": "2", "answer": "2"},
    "mbpp": {"task_id": 11, "text": "Add.", "code": "def f(): pass", "test_list": ["assert f() is None"]},
    "humaneval": {"task_id": "h/1", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "x", "test": "t"},
}


@fuzz
@given(data=st.data(), name=st.sampled_from(sorted(ROWS)), packed=st.booleans())
def test_a_benchmark_is_read_or_its_line_named(data, name, packed):
    content = damaged(data, "\n".join(as_json(changed(data, ROWS[name])) for _ in range(2)).encode())
    if packed:
        content = damaged(data, gzip.compress(content))
    directory, path = in_a_file("b.jsonl.gz" if packed else "b.jsonl", content)
    with directory, refused("b.jsonl"):
        benchmark = load_benchmark(name, path)
        for problem in benchmark.problems:
            assert isinstance(problem.prompt, str)


def test_every_benchmark_has_a_row_here():
    assert {name: set(row) for name, row in ROWS.items()} == {name: set(fields) for name, fields in _FIELDS.items()}


def test_a_number_of_layers_that_no_machine_holds_is_refused_at_once():
    whole = {**to_huggingface(SMALL), "num_hidden_layers": 10**15}
    with pytest.raises(ValueError, match=re.escape("num_hidden_layers must be from 1 to")):
        from_huggingface(whole, "float32")
