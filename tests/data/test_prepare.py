"""Rows packed offline: the same rows whatever the workers and interruptions, and errors that say what to do."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import chex
import numpy as np
import pytest

from iha_jax.data import DataConfig, DataPipeline, SourceConfig
from iha_jax.data.documents import is_held_out
from iha_jax.data.packing import document_pairs, stream_rows
from iha_jax.data.prepare import PrepareConfig, divide, main, prepare
from iha_jax.data.rows import Manifest, RowFormat
from iha_jax.data.tokenizers import ByteTokenizer
from tests.privileges import unprivileged


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "corpus"
    path.mkdir()
    lines = [json.dumps({"text": "".join(rng.choice(list("abcdé"), rng.integers(20, 900)))}) for _ in range(120)]
    lines[7] = '{"text": broken'
    (path / "a.jsonl").write_text("\n".join(lines[:70]), encoding="utf-8")
    (path / "b.jsonl").write_text("\n".join(lines[70:]), encoding="utf-8")
    (path / "c.jsonl").write_text("")
    return path


def _config(corpus, output, **options):
    fields = {"sequence_length": 64, "held_out_fraction": 0.1, "shard_megabytes": 0.01, "workers": 1, **options}
    return PrepareConfig(str(output), SourceConfig("files", str(corpus)), **fields)


def _contents(directory):
    return {p.name: p.read_bytes() for p in sorted(pathlib.Path(directory).iterdir()) if p.is_file()}


def test_rows_are_those_of_packing_each_shard_and_the_manifest_counts_them(corpus, tmp_path):
    config = _config(corpus, tmp_path / "rows", shard_megabytes=1000.0)
    manifest = prepare(config)
    texts = [
        json.loads(line)["text"]
        for f in "ab"
        for line in (corpus / f"{f}.jsonl").read_text("utf-8").splitlines()
        if "broken" not in line
    ]
    assert manifest.skipped == {"not JSON": 1}
    data = DataConfig((SourceConfig("packed", config.output),), sequence_length=64, shuffle=False, prefetch=0)
    pipeline = DataPipeline(data)
    for held_out, split in ((False, "train"), (True, "held_out")):
        kept = [t for t in texts if is_held_out(t, 0.1) == held_out]
        pairs = [document_pairs(ByteTokenizer(), t) for t in kept]
        expected = list(stream_rows(pairs, 64))
        entry = manifest.splits[split]
        assert entry["rows"] == len(expected)
        assert entry["documents"] == len(kept)
        assert entry["bytes"] == sum(len(t.encode()) for t in kept)
        assert entry["tokens"] == sum(len(t.encode()) + 1 for t in kept)
        if held_out:
            found = [{k: b[k][0] for k in expected[0]} for b in pipeline.held_out_batches(1)]
        else:
            iterator = pipeline.training_batches(1)
            found = [{k: v[0] for k, v in next(iterator).items() if k in expected[0]} for _ in expected]
            iterator.close()
        chex.assert_trees_all_equal(found, expected)


def test_two_workers_give_the_same_files_as_one(corpus, tmp_path):
    prepare(_config(corpus, tmp_path / "one"))
    prepare(_config(corpus, tmp_path / "two", workers=2))
    one, two = _contents(tmp_path / "one"), _contents(tmp_path / "two")
    assert one == two
    assert sum(name.endswith(".arrayrecord") for name in one) > 8


@pytest.mark.parametrize("damage", ["no receipt", "cut file", "no file"])
def test_running_again_repairs_what_is_missing_and_changes_nothing_else(corpus, tmp_path, damage):
    config = _config(corpus, tmp_path / "rows")
    prepare(config)
    before = _contents(config.output)
    path = next(pathlib.Path(config.output).glob("train-00001-*.arrayrecord"))
    if damage == "no receipt":
        next(pathlib.Path(config.output).glob("receipts/00001-*")).unlink()
    elif damage == "cut file":
        os.truncate(path, 100)
    else:
        path.unlink()
    untouched = next(pathlib.Path(config.output).glob("train-00002-*.arrayrecord")).stat().st_mtime_ns
    prepare(config)
    assert _contents(config.output) == before
    assert next(pathlib.Path(config.output).glob("train-00002-*.arrayrecord")).stat().st_mtime_ns == untouched


def test_a_killed_run_continues_to_identical_shards(corpus, tmp_path):
    reference = _config(corpus, tmp_path / "reference")
    prepare(reference)
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "iha_jax.data.prepare", "--output", str(output), "--source.kind", "files",
               "--source.path", str(corpus), "--sequence-length", "64", "--held-out-fraction", "0.1",
               "--shard-megabytes", "0.01", "--workers", "1"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    deadline = time.monotonic() + 60
    while not list(output.glob("receipts/*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped documents: 1 not JSON" in done.stdout
    ours = {n: d for n, d in _contents(output).items() if not n.endswith(".tmp")}
    theirs = _contents(reference.output)
    # The plan names the source's path, which is the same here.
    assert ours == theirs


def test_another_plan_in_the_same_directory_is_refused(corpus, tmp_path):
    config = _config(corpus, tmp_path / "rows")
    prepare(config)
    with pytest.raises(ValueError, match=r"was begun with sequence_length = 64, now it is 128"):
        prepare(dataclasses.replace(config, sequence_length=128))
    (corpus / "d.jsonl").write_text('{"text": "one more"}')
    with pytest.raises(ValueError, match=r"was begun with documents"):
        prepare(config)


def test_training_on_rows_checks_length_and_tokenizer(corpus, tmp_path):
    config = _config(corpus, tmp_path / "rows")
    prepare(config)
    source = SourceConfig("packed", config.output)
    with pytest.raises(ValueError, match=r"holds rows of 64 tokens, but data.sequence_length is 32"):
        DataPipeline(DataConfig((source,), sequence_length=32))
    manifest = pathlib.Path(config.output) / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace("bytes-258", "another"))
    with pytest.raises(ValueError, match=r"made with the tokenizer 'bytes'.*another vocabulary"):
        DataPipeline(DataConfig((source,), sequence_length=64))
    manifest.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json.*run it again to the end"):
        DataPipeline(DataConfig((source,), sequence_length=64))


def test_errors_are_one_clear_line(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    cases = (
        (["--source.path", str(tmp_path / "nowhere")], "no file at"),
        (["--tokenizer", "nothing.json"], "unknown tokenizer 'nothing.json'"),
        (["--output", str(tmp_path / "file" / "rows")], "Not a directory"),
        (["--sequence-length", "1"], "sequence_length must be at least 2, got 1"),
    )
    for arguments, expected in cases:
        command = [
            "prepare",
            "--source.kind",
            "files",
            "--source.path",
            str(corpus),
            "--output",
            str(tmp_path / "rows"),
            "--workers",
            "1",
            *arguments,
        ]
        monkeypatch.setattr(sys, "argv", command)
        if "length" in expected:
            with pytest.raises(SystemExit):
                main()
            continue
        with pytest.raises(SystemExit, match=f"^error: .*{expected}"):
            main()


@pytest.mark.parametrize("exists", [False, True])
def test_a_read_only_directory_is_one_error(monkeypatch, exists):
    with tempfile.TemporaryDirectory() as folder:  # not pytest's own: only its owner may look inside that one
        os.chmod(folder, 0o755)
        text, output = pathlib.Path(folder, "text.txt"), pathlib.Path(folder, "rows")
        text.write_text("A document.")
        if exists:
            (output / "receipts").mkdir(parents=True)
            os.chmod(output, 0o555)
        os.chmod(folder, 0o555)
        arguments = ["--source.kind", "files", "--source.path", str(text), "--output", str(output), "--workers", "1"]
        monkeypatch.setattr(sys, "argv", ["prepare", *arguments])
        with unprivileged(), pytest.raises(SystemExit, match=rf"^error: .*Permission denied: '{output}"):
            main()
        os.chmod(folder, 0o755)
        if exists:
            os.chmod(output, 0o755)
            assert [p.name for p in output.rglob("*")] == ["receipts"]


def test_a_full_disk_is_one_error_and_no_half_shard_counts(corpus, tmp_path):
    # A limit on file sizes stands for the full disk: the system refuses the write in the same way.
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536 + 4096, resource.RLIM_INFINITY));"
        "from iha_jax.data.prepare import main; main()"
    )
    arguments = ["--output", str(tmp_path / "rows"), "--source.kind", "files", "--source.path", str(corpus),
                 "--sequence-length", "64", "--shard-megabytes", "50", "--workers", "1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=_environment(), check=False
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stderr.splitlines()[-1].startswith("error: "), done.stderr
    assert "disk" in done.stderr or "large" in done.stderr
    assert not (tmp_path / "rows" / "manifest.json").exists()
    assert not list((tmp_path / "rows" / "receipts").glob("*.json"))


def test_shards_divide_the_documents():
    sizes = np.array([5, 1, 1, 1, 30, 1, 1, 10, 0, 3])
    stretches = divide(sizes, 10)
    assert [i for start, stop in stretches for i in range(start, stop)] == list(range(10))
    assert len(stretches) > 2
    assert divide(sizes, 10**9) == [(0, 10)]


@pytest.mark.parametrize(("vocab", "dtype"), [(258, "uint16"), (65536, "uint16"), (128256, "uint32")])
def test_row_format_round_trip(vocab, dtype):
    layout = RowFormat.of(6, vocab)
    assert layout.token_dtype == dtype
    row = {
        "inputs": np.array([0, 1, vocab - 1, 5, 6, 0], np.int32),
        "targets": np.array([1, vocab - 1, 7, 6, 9, 0], np.int32),
        "segment_ids": np.array([1, 1, 1, 2, 2, 0], np.int32),
    }
    record = layout.encode(row)
    assert len(record) == layout.row_bytes
    chex.assert_trees_all_equal(layout.decode(record), {**row, "positions": np.array([0, 1, 2, 0, 1, 0], np.int32)})
    with pytest.raises(ValueError, match=f"must have {layout.row_bytes} bytes"):
        layout.decode(record[:-1])


def test_manifest_round_trip(corpus, tmp_path):
    config = _config(corpus, tmp_path / "rows")
    assert Manifest.read(config.output if prepare(config) else "") == prepare(config)


def _environment():
    root = str(pathlib.Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
