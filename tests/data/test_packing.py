"""Packing: every token predicted once, in its own document, whatever the row length."""

from functools import partial

import chex
import grain
import numpy as np
import pytest

from iha_jax.data.packing import bytes_per_target, document_pairs, packed_rows, restarting_positions, stream_rows
from iha_jax.data.tokenizers import ByteTokenizer, document_ids

LENGTHS = (3, 17, 1, 40, 8, 0, 5)
TEXTS = ["abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH"[:n] for n in LENGTHS]


def _pairs():
    return [document_pairs(ByteTokenizer(), text) for text in TEXTS]


def _grain_rows(length, packing):
    dataset = packed_rows(grain.MapDataset.source(_pairs()).to_iter_dataset(), length, packing)
    iterator = iter(dataset)
    rows = list(iterator)
    iterator.close()
    return rows


def _pieces(rows):
    """(input ids, target ids) of every segment, by scanning: independent of how rows were made."""
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            where = np.flatnonzero(row["segment_ids"] == segment)
            assert (np.diff(where) == 1).all(), "a segment is one run"
            yield (
                row["inputs"][where],
                row["targets"][where],
                row.get("positions", restarting_positions(row["segment_ids"]))[where],
            )


@pytest.mark.parametrize("packing", ["split", "fit"])
def test_every_pair_appears_exactly_once_and_positions_restart(packing):
    expected = sorted(
        (int(a), int(b)) for pair in _pairs() for a, b in zip(pair["inputs"], pair["targets"], strict=True)
    )
    rows = _grain_rows(13, packing)
    found = []
    for inputs, targets, positions in _pieces(rows):
        found += [(int(a), int(b)) for a, b in zip(inputs, targets, strict=True)]
        np.testing.assert_array_equal(positions, np.arange(len(positions)))
        # Inside a piece the target of one place is the input of the next: nothing crosses documents.
        np.testing.assert_array_equal(targets[:-1], inputs[1:])
    assert sorted(found) == expected
    for row in rows:
        chex.assert_shape(list(row.values()), (13,))
        chex.assert_type(list(row.values()), np.int32)


def test_split_packing_has_no_padding_before_the_last_row():
    rows = _grain_rows(13, "split")
    total = sum(len(text) + 1 for text in TEXTS)
    assert len(rows) == -(-total // 13)
    assert all((row["segment_ids"] > 0).all() for row in rows[:-1])


def test_fit_packing_keeps_documents_whole_where_they_fit():
    rows = _grain_rows(20, "fit")
    lengths = sorted(len(inputs) for inputs, _, _ in _pieces(rows))
    assert lengths == sorted([1, 2, 4, 6, 9, 18, 20, 20, 1])  # 41 pairs are cut into 20, 20 and 1


def test_the_stream_for_packing_offline_gives_the_same_rows_as_grain():
    ours, theirs = list(stream_rows(_pairs(), 13)), _grain_rows(13, "split")
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        chex.assert_trees_all_equal({**mine, "positions": restarting_positions(mine["segment_ids"])}, other)


def test_restarting_positions():
    ids = np.array([1, 1, 1, 2, 3, 3, 0, 0], np.int32)
    np.testing.assert_array_equal(restarting_positions(ids), [0, 1, 2, 0, 0, 1, 0, 0])


def test_bytes_per_target_counts_bytes_of_text_and_predicted_tokens():
    texts = ["aé", "xyz"]  # 3 bytes in 4 predictions (the end is one), 3 bytes in 4
    assert bytes_per_target(texts, partial(document_pairs, ByteTokenizer()), 0.0, False, 100) == 6 / 8


def test_document_ids_wrap_the_text():
    np.testing.assert_array_equal(document_ids(ByteTokenizer(), "a\n"), [256, 97, 10, 257])
