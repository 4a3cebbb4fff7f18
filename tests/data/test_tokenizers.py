"""Tokenizers behind one protocol."""

import json
import pickle

import numpy as np
import pytest

from iha_jax.data import ByteTokenizer, DataConfig, DataPipeline, SourceConfig, load_tokenizer
from iha_jax.data.documents import is_held_out
from iha_jax.data.prepare import PrepareConfig, prepare
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import FastTokenizer, HubTokenizer, document_ids, train_tokenizer


@pytest.mark.parametrize("text", ["", "plain", "é€𝄞\n\t\x00", "日本語"])
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    np.testing.assert_array_equal(ids, list(text.encode()))
    assert tokenizer.decode([256, *ids, 257]) == text
    assert max([*ids, tokenizer.bos_id, tokenizer.eos_id]) < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["missing.json", "missing.model", "/no/such/dir/tokenizer.json"])
def test_unknown_tokenizers_say_what_was_expected(name):
    with pytest.raises(ValueError, match=r"unknown tokenizer .*expected 'bytes'"):
        load_tokenizer(name)


TEXTS = [f"The quick brown fox number {i} jumps over {i * 7} lazy dogs; naïve café {i}.\n" for i in range(200)]


def _check(tokenizer, text="The quick café number 12 jumps."):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ids.min() >= 0
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids.tolist()).strip() == text
    again = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(again.encode(text), ids)
    assert again.fingerprint == tokenizer.fingerprint
    wrapped = document_ids(tokenizer, text)
    assert (wrapped[0], wrapped[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert len(wrapped) == len(ids) + 2


def test_a_trained_tokenizer_reads_and_writes_any_text(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 400, path)
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.vocab_size == 400
    _check(tokenizer)
    text = "unseen: 日本語 𝄞 \x00\t"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    train_tokenizer(TEXTS, 400, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="at least 258 tokens"):
        train_tokenizer(TEXTS, 100, path)


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path / "model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=120, byte_fallback=False, minloglevel=2
    )
    tokenizer = load_tokenizer(prefix + ".model")
    assert tokenizer.vocab_size == 120
    _check(tokenizer)


def test_prepare_trains_a_tokenizer_and_training_uses_it(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i:03}.txt").write_text(text, encoding="utf-8")
    source = SourceConfig("files", str(tmp_path / "text"))
    config = PrepareConfig(str(tmp_path / "rows"), source, 16, train_tokenizer=300, held_out_fraction=0.1, workers=1)
    manifest = prepare(config)
    assert prepare(config) == manifest
    assert manifest.tokenizer == "tokenizer.json"
    data = DataConfig((SourceConfig("packed", config.output),), str(tmp_path / "rows" / "tokenizer.json"), 16)
    pipeline = DataPipeline(data)
    batch = next(pipeline.held_out_batches(4))
    assert "The quick brown fox" in pipeline.tokenizer.decode(batch["inputs"][0].tolist())
    held = [t for t in TEXTS if is_held_out(t, 0.1)]
    size = sum(len(t.encode()) for t in held)
    tokens = sum(len(document_ids(pipeline.tokenizer, t)) - 1 for t in held)
    assert pipeline.bytes_per_target() == pytest.approx(size / tokens)


def test_parquet_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one", "", None, "four", "five"], "n": [1, 2, 3, 4, 5]})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    documents = open_documents(SourceConfig("files", str(tmp_path), text_field="body"))
    assert [documents[i] for i in (4, 0, 3, 1, 2)] == ["five", "one", "four", None, None]
    assert documents.skipped == {"empty": 2}
    assert len(documents.sizes()) == 5
    assert pickle.loads(pickle.dumps(documents.select(3, 5)))[0] == "four"
    with pytest.raises(ValueError, match=r"no column 'text', only \['body', 'n'\]"):
        open_documents(SourceConfig("files", str(tmp_path)))


def test_a_hugging_face_tokenizer_from_its_directory(tmp_path):
    pytest.importorskip("transformers")
    train_tokenizer(TEXTS, 400, tmp_path / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
                "eos_token": "<|end_of_text|>", "clean_up_tokenization_spaces": False}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, HubTokenizer)
    assert tokenizer.vocab_size == 400
    _check(tokenizer)
    same = FastTokenizer(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(document_ids(tokenizer, TEXTS[3]), document_ids(same, TEXTS[3]))


def test_a_tokenizer_that_brings_code_is_refused_and_runs_nothing(tmp_path):
    pytest.importorskip("transformers")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match="contains custom code"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
