"""Documents from disk: indices are stable, and what can't be read is counted, not lost and not fatal."""

import json
import os
import pickle

import numpy as np
import pytest

from iha_jax.data.config import SourceConfig
from iha_jax.data.documents import is_held_out
from iha_jax.data.sources import open_documents, stdlib_paths
from iha_jax.data.text_files import JsonLines, TextFiles


def _read(documents):
    return [documents[i] for i in range(len(documents))]


def test_text_files_are_sorted_and_bad_ones_are_counted(tmp_path):
    (tmp_path / "b.txt").write_text("zwei\n")
    (tmp_path / "a.txt").write_text("eins é\n", encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"ok\xff\xfe")
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_text("not read")
    documents = open_documents(SourceConfig("files", str(tmp_path)))
    assert _read(documents) == ["eins é\n", "zwei\n", None, None]
    assert _read(documents)[:2] == ["eins é\n", "zwei\n"]  # reading again doesn't count again
    assert documents.skipped == {"empty": 1, "not UTF-8": 1}


@pytest.mark.parametrize("text", ["line one\nline two is longer\nx\n" * 9, "é€𝄞" * 40, "no line end " * 20])
def test_a_large_text_file_is_cut_into_documents_that_add_up_to_it(tmp_path, text):
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    pieces = _read(TextFiles([str(path)], max_document_bytes=50))
    assert None not in pieces
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(len(piece.encode()) for piece in pieces) <= 50


def test_json_lines_skip_what_is_wrong_and_keep_the_rest(tmp_path):
    lines = [
        json.dumps({"text": "first"}),
        "{broken",
        json.dumps({"body": "no text here"}),
        json.dumps({"text": 7}),
        "",
        json.dumps({"text": "x" * 200}),
        json.dumps({"text": "last"}),
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes("\n".join(lines).encode() + b"\n" + b'{"text": "\xff"}')
    documents = JsonLines([str(path)], "text", max_document_bytes=100)
    assert [t for t in _read(documents) if t] == ["first", "last"]
    assert documents.skipped == {
        "'text' isn't text": 1,
        "a line above 100 bytes": 1,
        "empty": 1,
        "no field 'text'": 1,
        "not JSON": 1,
        "not UTF-8": 1,
    }


def test_a_selection_is_small_to_pickle_and_reads_the_same(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}")
    documents = open_documents(SourceConfig("files", str(tmp_path / "*.txt")))
    part = pickle.loads(pickle.dumps(documents.select(10, 13)))
    assert _read(part) == [f"document {i}" for i in (10, 11, 12)]
    np.testing.assert_array_equal(part.sizes(), documents.sizes()[10:13])
    assert len(pickle.dumps(documents.select(10, 13))) < len(pickle.dumps(documents)) / 2


def test_missing_paths_and_empty_sources_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file at .*nowhere"):
        open_documents(SourceConfig("files", str(tmp_path / "nowhere")))
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no document"):
        open_documents(SourceConfig("files", str(tmp_path / "e.jsonl")))
    with pytest.raises(ValueError, match=r"'files' needs a path"):
        SourceConfig("files")


def test_the_standard_library_is_there_without_tests_and_packages():
    paths = stdlib_paths()
    assert paths == sorted(paths)
    assert any(path.endswith(os.sep + "argparse.py") for path in paths)
    assert not any("site-packages" in path or f"{os.sep}test{os.sep}" in path for path in paths)


def test_the_held_out_split_is_a_share_of_the_documents_and_keeps_copies_together():
    texts = [f"document number {i}" for i in range(4000)]
    held = [is_held_out(text, 0.1) for text in texts]
    assert 320 < sum(held) < 480  # 400 expected, standard deviation 19
    assert held == [is_held_out(str(text), 0.1) for text in texts]
    # A larger fraction only adds documents.
    assert all(is_held_out(text, 0.2) for text, h in zip(texts, held, strict=True) if h)
    assert not any(is_held_out(text, 0.0) for text in texts)
