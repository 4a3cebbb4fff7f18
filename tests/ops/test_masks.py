"""Visibility, cell by cell, against the oracle's rule."""

import chex
import numpy as np
import pytest

from iha_jax.ops import masks
from tests import oracle

T, S, P = 5, 7, 3


@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize("window", [None, 1, 3, 2**40])
def test_visibility_is_the_oracles(causal, window):
    rng = np.random.default_rng(0)
    # Far from 0, so that multiplying a position by P instead of a distance would overflow int32.
    position = [(2**31 - 100 + rng.permutation(9)[:n]).astype(np.int32) for n in (T, S)]
    ids = [rng.integers(0, 3, n).astype(np.int32) for n in (T, S)]
    rows, columns = (slice(None), slice(None), None, None), (None, None, slice(None), slice(None))
    tokens = [np.repeat(x[:, None], P, 1) for x in (*position, *ids)]
    pseudo = [np.broadcast_to(np.arange(P, dtype=np.int32), (n, P)) for n in (T, S)]
    seen = np.asarray(masks.same_segment(tokens[2][rows], tokens[3][columns]))
    by_position = masks.visible(
        tokens[0][rows],
        pseudo[0][rows],
        tokens[1][columns],
        pseudo[1][columns],
        num_pseudo_heads=P,
        causal=causal,
        window=window,
    )
    assert (by_position is None) == (causal is None and window is None)
    if by_position is not None:
        seen = seen & np.asarray(by_position)
    expected = oracle.visible(*position, *ids, P, causal, window)
    assert expected.any()
    chex.assert_trees_all_equal(seen.reshape(T * P, S * P), expected)
