"""Batches: deterministic, resumable, sliced, mixed by weight, and apart from the held-out split."""

import chex
import numpy as np
import pytest

from iha_jax.data import Bigram, ByteTokenizer, DataConfig, DataPipeline, SourceConfig
from iha_jax.data.documents import is_held_out
from iha_jax.data.lanes import deal_pattern, lanes_of
from iha_jax.data.prepare import PrepareConfig, prepare
from iha_jax.data.rows import Manifest


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


def _files(folder, sizes):
    """Documents of other lengths, some of them longer than a row."""
    rng = np.random.default_rng(1)
    (folder / "uneven").mkdir()
    for i, size in enumerate(sizes):
        (folder / "uneven" / f"{i}.txt").write_text("".join(rng.choice(list("abcdefgh"), size)))
    return SourceConfig("files", str(folder / "uneven"))


@pytest.fixture
def packed(folder):
    """Rows prepared beforehand from the digits."""
    prepare(
        PrepareConfig(
            source=SourceConfig("files", str(folder / "digits")),
            output=str(folder / "rows"),
            sequence_length=32,
            held_out_fraction=0.2,
            workers=0,
        )
    )
    return SourceConfig("packed", str(folder / "rows"), weight=2.0)


SPLITS = [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]], [range(6), range(6)]]


def _joined(iterators, owns, count):
    """Batches of several processes put together; where two have a row, they must agree."""
    batches = []
    for _ in range(count):
        rows = {}
        for iterator, own in zip(iterators, owns, strict=True):
            for name, column in next(iterator).items():
                for row, value in zip(own, column, strict=True):
                    chex.assert_trees_all_equal(rows.setdefault((name, row), value), value)
        batches.append(rows)
    return batches


@pytest.mark.parametrize("owns", SPLITS, ids=str)
@pytest.mark.parametrize("packing", ["split", "fit"])
def test_processes_read_one_order_and_continue_for_each_other(folder, packed, packing, owns):
    """Uneven files (three documents for four lanes), a mixture, and a batch that no number of lanes divides."""
    sources = (_files(folder, [900, 40, 333]), SourceConfig("files", str(folder / "letters")), packed)
    config = _config(folder, sources=sources, packing=packing, held_out_fraction=0.2)

    def start(owns):
        return [DataPipeline(config).training_batches(6, own) for own in owns]

    alone = start([range(6)])
    expected = _joined(alone, [range(6)], 30)
    several = start(owns)
    chex.assert_trees_all_equal(_joined(several, owns, 11), expected[:11])
    states = [iterator.get_state() for iterator in several]
    for other in ([range(6)], SPLITS[1]):
        resumed = start(other)
        for iterator in resumed:
            iterator.set_state(*states)
        chex.assert_trees_all_equal(_joined(resumed, other, 19), expected[11:])
        for iterator in resumed:
            iterator.close()
    for iterator in alone + several:
        iterator.close()


def test_a_process_opens_only_the_documents_of_its_lanes(folder):
    config = _config(folder, streams=4, prefetch=0)
    read = []
    for own in ([0, 1], [2, 3]):
        pipeline = DataPipeline(config)
        documents = next(iter(pipeline._documents.values()))
        seen = set()
        original = documents._read
        documents._read = lambda index, seen=seen, original=original: seen.add(index) or original(index)
        iterator = pipeline.training_batches(4, own)
        for _ in range(8):  # less than an epoch
            next(iterator)
        iterator.close()
        read.append(seen)
    assert read[0]
    assert read[1]
    assert not read[0] & read[1]


def test_no_example_is_lost_or_repeated_over_an_epoch_of_packed_rows(folder, packed):
    config = _config(folder, sources=(packed,))
    total = Manifest.read(packed.path).splits["train"]["rows"]
    iterators = [DataPipeline(config).training_batches(2, [i]) for i in range(2)]
    rows = [next(iterators[i % 2])["inputs"].tobytes() for i in range(total)]
    assert len(set(rows)) == total
    for iterator in iterators:
        iterator.close()


def test_states_that_do_not_fit_are_refused(folder):
    iterator = DataPipeline(_config(folder, prefetch=0)).training_batches(4, [0, 1])
    before = iterator.get_state()
    next(iterator)
    with pytest.raises(ValueError, match="saved at different rows of the data: 0, 4"):
        iterator.set_state(before, iterator.get_state())
    other = DataPipeline(_config(folder, prefetch=0)).training_batches(4)
    with pytest.raises(ValueError, match="lacks lane 2 of source 0"):
        other.set_state(before)
    other = DataPipeline(_config(folder, prefetch=0, streams=8)).training_batches(4)
    with pytest.raises(ValueError, match=r"is of 4 streams, and data\.streams has 8 now"):
        other.set_state(before)
    assert lanes_of([0, 1], 0, 4, 8) == {0, 1, 4, 5}
    assert lanes_of([0], 3, 4, 6) == {1, 3, 5}


def test_sources_are_dealt_by_their_shares():
    assert deal_pattern([3, 1]).tolist() == [0, 0, 1, 0]
    pattern = deal_pattern([0.2, 0.5, 0.3])
    assert np.bincount(pattern).tolist() == [2, 5, 3]
    assert np.bincount(deal_pattern([1e-9, 1])).tolist() == [1, 10_000]


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
