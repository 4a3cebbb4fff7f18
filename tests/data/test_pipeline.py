"""Batches: deterministic, resumable, sliced, mixed by weight, and apart from the held-out split."""

import chex
import numpy as np
import pytest

from iha_jax.data import Bigram, ByteTokenizer, DataConfig, DataPipeline, Slice, SourceConfig
from iha_jax.data.documents import is_held_out


@pytest.fixture
def folder(tmp_path):
    """Thirty documents of letters and thirty of digits, told apart by their bytes."""
    rng = np.random.default_rng(0)
    for kind, alphabet in (("letters", "abcdefgh"), ("digits", "01234567")):
        (tmp_path / kind).mkdir()
        for i in range(30):
            text = "".join(rng.choice(list(alphabet), rng.integers(40, 400)))
            (tmp_path / kind / f"{i:02}.txt").write_text(text)
    return tmp_path


def _config(folder, **options):
    sources = (SourceConfig("files", str(folder / "letters")),)
    return DataConfig(**{"sources": sources, "sequence_length": 32, "held_out_fraction": 0.2, "streams": 4, **options})


def _take(pipeline, rows, count):
    iterator = pipeline.training_batches(rows)
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def test_batches_are_the_same_every_time_and_differ_by_seed(folder):
    first, second = (_take(DataPipeline(_config(folder)), 3, 20) for _ in range(2))
    chex.assert_trees_all_equal(first, second)
    other = _take(DataPipeline(_config(folder, seed=1)), 3, 20)
    assert any((a["inputs"] != b["inputs"]).any() for a, b in zip(first, other, strict=True))
    for batch in first:
        chex.assert_shape(list(batch.values()), (3, 32))
        assert set(batch) == {"inputs", "targets", "segment_ids", "positions", "weights"}


@pytest.mark.parametrize("packing", ["split", "fit"])
@pytest.mark.parametrize(("prefetch", "streams"), [(0, 1), (2, 4)])
@pytest.mark.parametrize("taken", [0, 1, 3, 17])
def test_resuming_continues_exactly(folder, packing, prefetch, streams, taken):
    config = _config(folder, packing=packing, prefetch=prefetch, streams=streams)
    iterator = DataPipeline(config).training_batches(3)
    for _ in range(taken):
        next(iterator)
    state = iterator.get_state()
    expected = [next(iterator) for _ in range(60)]  # more than an epoch
    iterator.close()
    resumed = DataPipeline(config).training_batches(3)
    resumed.set_state(state)
    assert resumed.get_state() == state
    chex.assert_trees_all_equal([next(resumed) for _ in range(60)], expected)
    resumed.close()


def test_training_never_sees_the_held_out_documents(folder):
    pipeline = DataPipeline(_config(folder))
    texts = [p.read_text() for p in sorted((folder / "letters").iterdir())]
    held = [t for t in texts if is_held_out(t, 0.2)]
    assert 0 < len(held) < len(texts)
    tokenizer = ByteTokenizer()
    starts = {t[:12] for t in held}
    for batch in _take(pipeline, 4, 100):
        for row, ids in zip(batch["inputs"], batch["segment_ids"], strict=True):
            for segment in range(1, ids.max() + 1):
                assert tokenizer.decode(row[ids == segment])[:12] not in starts
    total = sum(int(batch["weights"].sum()) for batch in pipeline.held_out_batches(4))
    assert total == sum(len(t) + 1 for t in held)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_held_out_rows_do_not_depend_on_the_batch_size(folder, rows):
    def flat(rows, limit):
        batches = list(DataPipeline(_config(folder)).held_out_batches(rows, limit))
        stacked = np.concatenate([b["targets"] for b in batches]), np.concatenate([b["weights"] for b in batches])
        kept = stacked[1].sum(axis=1) > 0
        return stacked[0][kept], stacked[1][kept]

    chex.assert_trees_all_equal(flat(rows, 10), flat(2, 10))


def test_a_mixture_has_the_weights_shares(folder):
    sources = (
        SourceConfig("files", str(folder / "letters"), weight=3.0),
        SourceConfig("files", str(folder / "digits"), weight=1.0),
    )
    batches = _take(DataPipeline(_config(folder, sources=sources)), 4, 100)
    rows = np.concatenate([b["inputs"] for b in batches])
    letters = ((rows >= 97) & (rows < 256)).any(axis=1)
    digits = ((rows >= 48) & (rows < 58)).any(axis=1)
    assert not (letters & digits).any(), "a row comes from one source"
    assert letters.sum() == 300


def test_processes_read_different_documents_that_together_are_all(folder):
    def documents(process):
        config = _config(folder, shuffle=False, streams=1)
        rows = np.concatenate([b["inputs"] for b in _take(DataPipeline(config, process), 1, 150)])
        text = ByteTokenizer().decode(rows.reshape(-1))
        paths = sorted((folder / "letters").iterdir())
        training = [p.read_text() for p in paths if not is_held_out(p.read_text(), 0.2)]
        return {t for t in training if t[:30] in text}, set(training)

    (first, training), (second, _) = documents(Slice(0, 2)), documents(Slice(1, 2))
    assert first | second == training
    assert not first & second
    with pytest.raises(ValueError, match=r"\[0, 2\), got 2"):
        Slice(2, 2)


def test_the_bigram_is_the_counts(folder):
    pairs = [{"inputs": np.array([0, 1, 0]), "targets": np.array([1, 0, 1])}]
    bigram = Bigram.fit(pairs, 2)
    # After 0 came 1 twice, after 1 came 0 once; 0.01 is added to each count.
    np.testing.assert_allclose(
        np.exp(bigram.log_probabilities), [[0.01 / 2.02, 2.01 / 2.02], [1.01 / 1.02, 0.01 / 1.02]]
    )
    batch = {"inputs": np.array([[0, 1]]), "targets": np.array([[1, 1]]), "weights": np.array([[1.0, 0.0]])}
    assert bigram.nats_per_token([batch]) == pytest.approx(-np.log(2.01 / 2.02))
    # Uniform letters: no table can know more than the 8 letters' 3 bits.
    pipeline = DataPipeline(_config(folder))
    bits = pipeline.fit_bigram().nats_per_token(pipeline.held_out_batches(4)) / np.log(2)
    assert 2.9 < bits < 3.2
