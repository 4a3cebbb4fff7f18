"""The fused TPU kernels beyond the shared suite: long sequences, parts of heads, races."""

import dataclasses
import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from iha_jax.ops import (
    pallas_tpu,
    pallas_tpu_base,
    pallas_tpu_cost,
    pallas_tpu_memory,
    pallas_tpu_plan,
    pallas_tpu_strips,
    pallas_tpu_tile,
    tuning,
)
from iha_jax.ops import pallas_tpu_prepare as prepare
from iha_jax.ops.block_sizes import Sizes
from iha_jax.ops.pallas_tpu_backward import backward
from iha_jax.ops.pallas_tpu_forward import forward
from tests.ops import cases
from tests.ops.tpu_cases import arguments, variant


def assert_equals_blockwise(spec: cases.Spec):
    """Values and all seven gradients; blockwise has met the oracle on its own."""
    arrays, integers = cases.draw(spec, 0)
    cotangent = np.random.default_rng(1).normal(size=(spec.B, spec.T, spec.N, spec.Hv)).astype(np.float32)
    cotangent /= np.linalg.norm(cotangent)
    out, gradients = cases.compiled(spec, "pallas")(arrays, integers, cotangent)
    expected, expected_gradients = cases.compiled(spec, "blockwise")(arrays, integers, cotangent)
    chex.assert_trees_all_close(out, expected, atol=2e-5)
    chex.assert_trees_all_close(gradients, expected_gradients, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "kind", "atleast"),
    [
        # The kept tiles wrap around the buffer several times, and a tile is seen by the two after it.
        (variant(T=104, S=104, N=2, P=20, window=20), "local", {"lag": 2, "query_tiles": 7}),
        # Queries wait for keys on their right.
        pytest.param(variant(T=90, S=90, P=8, causal=None, window=17), "local", {"delay": 1}, marks=pytest.mark.slow),
        # Several chunks, of which causality skips some.
        pytest.param(variant(T=600, S=600, N=2, P=2, layout="packed"), "global", {"chunks": 3}, marks=pytest.mark.slow),
        # Chunks that are visible to all of a tile's queries are not masked.
        pytest.param(variant(T=300, S=300), "global", {"chunks": 3}, marks=pytest.mark.slow),
        pytest.param(variant(T=300, S=290, causal=None, rope=None), "global", {"chunks": 3}, marks=pytest.mark.slow),
    ],
    ids=["window", "bidirectional window", "causal", "causal without masks", "bidirectional"],
)
def test_long_sequences(spec, kind, atleast):
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == kind
    for name, size in atleast.items():
        assert getattr(found, name) >= size, f"{name}={getattr(found, name)}: the case misses its point"
    assert_equals_blockwise(spec)


@pytest.mark.parametrize(
    ("changes", "mixes"),
    [
        ({"N": 2, "P": 20, "window": 3}, False),
        pytest.param({"N": 4, "P": 3, "window": 4, "T": 50, "S": 50, "B": 2}, False, marks=pytest.mark.slow),
        pytest.param({"N": 4, "P": 2, "window": 9, "T": 50, "S": 50, "causal": None}, False, marks=pytest.mark.slow),
        pytest.param({"N": 2, "P": 20, "window": 3}, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_with_and_without_pseudo_values(monkeypatch, changes, mixes):
    spec = variant(**{"T": 40, "S": 40, **changes})
    monkeypatch.setattr(pallas_tpu_plan, "_mixes_values", lambda spec: mixes)
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == "local"
    assert found.mixes_values == mixes
    assert_equals_blockwise(spec)


@pytest.mark.parametrize(("pseudo", "heads"), [(20, 20), (4, 16), (8, 8)])
def test_pieces_and_rows_by_token_are_undone(pseudo, heads):
    """Inner products agree with those of the transposes, and every row of a unit has its token's own sum."""
    spec = variant(T=64, S=64, N=heads, K=heads, P=pseudo, window=pseudo)
    found = pallas_tpu.spec_of(arguments(spec))
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(found.tile, 128)).astype(np.float32)
    units = rng.normal(size=(found.spans * found.unit, 128)).astype(np.float32)
    g = found.span
    by_hand = units.reshape(found.spans, found.unit // g, g, 128).sum(1).reshape(found.tile, 128)
    repeated = np.repeat(tokens.reshape(found.spans, 1, g, 128), found.unit // g, axis=1)

    def both(x, y):
        return pallas_tpu_base.per_token(found, x), pallas_tpu_base.per_unit_row(found, y)

    summed, spread = jax.jit(both)(units, tokens)
    np.testing.assert_allclose(summed, by_hand, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(spread, repeated.reshape(units.shape))


@pytest.mark.parametrize(("pseudo", "window"), [(20, 10), (8, 64), (4, 120)])
def test_strips_and_parts_hold_the_same(pseudo, window):
    """What goes from parts to strips and back, or to the whole chunk, is there once, and elsewhere are zeros."""
    spec = variant(T=2048, S=2048, N=20, K=20, P=pseudo, window=window)
    found = pallas_tpu.spec_of(arguments(spec))
    whole = np.random.default_rng(0).normal(size=(found.rows, found.chunk)).astype(np.float32)
    parts = [whole[part.rows, part.columns] for part in found.parts]
    assert len(parts) > 1
    seen = np.zeros_like(whole)
    for part in found.parts:
        seen[part.rows, part.columns] = whole[part.rows, part.columns]
    strips = pallas_tpu_strips.to_strips(found, [jnp.asarray(x) for x in parts])
    for strip, (rows, columns) in zip(strips, found.strips, strict=True):
        np.testing.assert_array_equal(strip, seen[rows, columns])
    back = pallas_tpu_strips.from_strips(found, strips)
    for x, y in zip(back, parts, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(pallas_tpu_strips.to_whole(found, parts), seen)


@pytest.mark.slow
@pytest.mark.parametrize("causal", ["virtual", "token", None])
def test_wide_windows_skip_chunks_on_both_sides(monkeypatch, causal):
    monkeypatch.setattr(pallas_tpu_plan, "LOCAL_CHUNK", 0)
    spec = variant(T=150, S=150, window=30, causal=causal)
    with tuning.force(Sizes(global_chunk=128, global_rows=64)):
        found = pallas_tpu.spec_of(arguments(spec))
        assert found.kind == "global"
        assert pallas_tpu_cost.chunk_visits(found) < found.query_tiles * found.chunks * 0.75
        assert_equals_blockwise(spec)


@pytest.mark.slow
@pytest.mark.parametrize("across_heads", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_heads_in_parts(monkeypatch, across_heads, window):
    spec = variant(T=40, S=40, across_heads=across_heads, window=window)
    whole = pallas_tpu.spec_of(arguments(spec))
    assert whole.groups == 1
    smallest = dataclasses.replace(whole, slots=max(whole.lag, 1))
    monkeypatch.setattr(pallas_tpu_plan, "PIPELINED", 1)  # no smaller tiles in place of parts
    monkeypatch.setattr(pallas_tpu_plan, "VMEM_BYTES", pallas_tpu_memory.vmem_bytes(smallest, backward=True) - 1)
    assert pallas_tpu.spec_of(arguments(spec)).groups == 2
    assert_equals_blockwise(spec)


def test_what_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(pallas_tpu_plan, "VMEM_BYTES", 2**18)
    with pytest.raises(NotImplementedError, match=cases.naming("S=64", "P=4", "MiB", "blockwise")):
        cases.call(variant(), "pallas", *cases.draw(variant(), 0))


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, None], ids=["local", "global"])
def test_no_races(window):
    """The interpreter that tracks every access to memory sees no two of them unordered."""
    spec = variant(T=24, S=24, N=2, P=20, window=window)
    args = arguments(spec)
    found = pallas_tpu.spec_of(args)
    assert found.kind == ("global" if window is None else "local")
    operands = prepare.tokens(args, found), prepare.weights(args, found)
    interpret = pltpu.InterpretParams(detect_races=True)
    races = _race_detector()
    out = forward(found, *operands, interpret=interpret)
    jax.block_until_ready(out)
    assert races() is False
    chex.assert_trees_all_close(out, forward(found, *operands, interpret=True), atol=1e-6)
    jax.block_until_ready(backward(found, *operands, out, interpret=interpret))
    assert races() is False


def _race_detector():
    for name in ("interpret.interpret_pallas_call", "interpret"):
        try:
            module = importlib.import_module(f"jax._src.pallas.mosaic.{name}")
        except ModuleNotFoundError:
            continue
        return lambda: module.races.races_found
    raise AssertionError("this version of jax keeps its race detector elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_corners_of_wide_windows_are_skipped(causal, layout):
    spec = variant(T=230, S=230, N=2, K=1, window=68, causal=causal, layout=layout)
    with tuning.force(Sizes(local_rows=256)):
        found = pallas_tpu.spec_of(arguments(spec))
        assert found.kind == "local"
        assert len(found.parts) > 1
        assert found.query_tiles > 3
        assert_equals_blockwise(spec)


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize("most", [0, 4, 7, 20])
def test_pipeline_runs_every_stage_once_and_in_order(stages, count, most):
    """Every stage of every head once, in order, and no slot written before it is read."""
    counts = np.zeros((stages, count), np.int64)
    held = np.full((stages, 2), -1)

    def stage(number, head, slot):
        assert slot == head % 2
        counts[number, head] += 1
        if number > 0:
            assert held[number - 1, slot] == head
        if 1 < number < stages - 1:
            assert held[number - 2, slot] == head
        held[number, slot] = head

    def eager(start, stop, body, carry):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu_tile.lax, "fori_loop", eager)
        pallas_tpu_tile.pipeline(count, most, *(functools.partial(stage, i) for i in range(stages)))
    assert (counts == 1).all()


@pytest.mark.parametrize("window", [5, None])
def test_ids_may_be_negative(window):
    """Padding is marked by numbers that are nobody's."""
    spec = variant(T=24, S=24, N=2, P=2, H=16, Hv=16, window=window)
    arrays, _ = cases.draw(spec, 0)
    ids = np.repeat(np.int32([[-1, 0, -2]]), 8, axis=1)
    integers = {"query_segment_ids": np.broadcast_to(ids, (spec.B, 24))}
    outs = [cases.call(spec, implementation, arrays, integers) for implementation in ("pallas", "reference")]
    np.testing.assert_allclose(*outs, atol=2e-5)
