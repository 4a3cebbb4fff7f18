"""The decoding kernel, interpreted: against the oracle, and what it visits of a cache."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import HeadMixing, Rope, YarnScaling
from iha_jax.ops import pallas_tpu_decode, pallas_tpu_decode_kernel, pallas_tpu_decode_plan
from iha_jax.ops.arguments import validate
from tests import jaxpr_flops
from tests.ops import cases
from tests.ops.test_oracle import MEAN_TOLERANCE, OUTPUT_TOLERANCE

# Three tokens over three tiles of 32 cached ones, the last of which is partial.
BASE = cases.Spec(
    *(2, 3, 75, 4, 2, 16),
    Hv=8,
    P=4,
    layout="prefix_padding",
    causal="virtual",
    window=None,
    rope=Rope(),
    scale=None,
    logits_soft_cap=None,
    across_heads=False,
    dtype="float32",
)
TOKEN = Rope(theta=1e4, positions="token")


def variant(**changes) -> cases.Spec:
    return dataclasses.replace(BASE, **changes)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in a short cache, and short programs."""
    monkeypatch.setattr(pallas_tpu_decode_plan, "MAX_TILE", 32)
    monkeypatch.setattr(pallas_tpu_decode_plan, "MAX_GROUP", 1)


def slow(**changes):
    return pytest.param(variant(**changes), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "spec",
    [
        variant(),
        variant(T=1, rope=TOKEN, window=9, layout="packed_cross", dtype="bfloat16"),
        slow(N=6, K=2, P=3, across_heads=True, logits_soft_cap=3.0),
        slow(rope=None, causal="token", window=9, P=2, T=1),
        slow(N=2, K=1, P=20, window=9, layout="sparse", H=24),
        slow(causal=None, window=30, rope=Rope(scaling=YarnScaling(4.0)), layout="sparse"),
        slow(causal=None, P=1, rope=None, layout="context_padding", across_heads=True),
        slow(N=4, K=4, H=128, Hv=128, P=8, dtype="bfloat16"),
        slow(H=256, P=8, rope=TOKEN, scale=0.3, logits_soft_cap=9.0),
        slow(T=20, S=30, K=4, layout="packed_cross", causal=None),
    ],
    ids=str,
)
def test_equals_the_oracle(spec, small_tiles):
    arrays, integers = cases.draw(spec, 0)
    expected = cases.expected(spec, arrays, integers)
    # Rubbish in padding must not matter, even where it shares a product with tokens that do.
    for i in (1, 2):
        ids = integers.get("key_segment_ids", np.ones((spec.B, spec.S)))
        arrays[i] = np.where((ids == 0)[:, :, None, None], np.float32(np.nan), arrays[i]).astype(spec.dtype)
    program = jax.jit(lambda *x: cases.call(spec, "pallas", *x), compiler_options=cases.QUICK)
    out = np.asarray(program(arrays, integers), np.float64)
    error = np.abs(out - expected) / np.maximum(1, np.abs(expected))
    assert error.max() <= OUTPUT_TOLERANCE[spec.dtype]
    assert error.mean() <= MEAN_TOLERANCE[spec.dtype]
    assert "iha_decode" in str(jax.make_jaxpr(lambda *x: cases.call(spec, "pallas", *x))(arrays, integers))


@pytest.mark.slow
def test_gradients_are_those_of_blockwise(small_tiles):
    spec = variant()
    arrays, integers = cases.draw(spec, 0)
    cotangent = np.random.default_rng(1).normal(size=(spec.B, spec.T, spec.N, spec.Hv)).astype(np.float32)
    out, gradients = cases.compiled(spec, "pallas")(arrays, integers, cotangent)
    expected, expected_gradients = cases.compiled(spec, "blockwise")(arrays, integers, cotangent)
    chex.assert_trees_all_close(out, expected, atol=2e-5)
    chex.assert_trees_all_close(gradients, expected_gradients, atol=1e-4, rtol=1e-4)


def visited(key_ids, key_positions, query_positions, query_ids=None, **options):
    """How many tiles of 32 tokens every row visits, and which."""
    batch, key_len = key_ids.shape
    query_len = query_positions.shape[1]
    zeros = lambda n: jnp.zeros((batch, n, 2, 8))  # noqa: E731
    args = validate(
        *(zeros(query_len), zeros(key_len), zeros(key_len)),
        HeadMixing.copy(2, 4),
        query_positions=jnp.asarray(query_positions, jnp.int32),
        key_positions=jnp.asarray(key_positions, jnp.int32),
        query_segment_ids=jnp.ones((batch, query_len), jnp.int32) if query_ids is None else jnp.asarray(query_ids),
        key_segment_ids=jnp.asarray(key_ids, jnp.int32),
        **{
            **dict.fromkeys(("window", "rope", "scale", "logits_soft_cap", "precision")),
            "causal": "virtual",
            **options,
        },
    )
    spec = pallas_tpu_decode_plan.decode_plan(args)
    assert spec.tile == 32
    _, at, counts = pallas_tpu_decode.decode_inputs(args, spec)
    return [list(np.unique(row[:count])) for row, count in zip(np.asarray(at), np.asarray(counts), strict=True)]


def test_only_tiles_with_something_visible_are_visited(small_tiles):
    index = np.broadcast_to(np.arange(200)[None], (3, 200))
    lengths = np.array([[1], [70], [200]])
    full, empty = (index < lengths).astype(np.int32), np.zeros_like(index)
    assert visited(full, index, lengths - 1) == [[0], [0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert visited(full, index, lengths - 1, window=8) == [[0], [1, 2], [5, 6]]
    assert visited(full, index, lengths - 1, window=8, causal="token") == [[0], [1, 2], [6]]
    assert visited(empty, index, lengths - 1) == [[], [], []]
    # A ring: positions wrap around, the query's window lies on both sides of the seam.
    ring = np.roll(index[:1] + 300, 50, axis=1)
    assert visited(np.ones((1, 200)), ring, np.array([[500]]), window=60) == [[0, 1, 5, 6]]
    # Documents: only the query's own.
    documents = 1 + index[:1] // 64
    ids = np.array([[2]], np.int32)
    assert visited(documents, index[:1], np.array([[199]]), ids) == [[2, 3]]


def test_what_does_not_fit_takes_blockwise(monkeypatch):
    monkeypatch.setattr(pallas_tpu_decode_plan, "VMEM_BYTES", 2**16)
    arrays, integers = cases.draw(BASE, 0)
    program = jax.make_jaxpr(lambda *x: cases.call(BASE, None, *x))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "pallas_call" not in str(program(arrays, integers))


@pytest.mark.parametrize("rope", [Rope(), TOKEN], ids=["virtual", "token"])
def test_cost_is_what_a_visit_executes(rope, small_tiles):
    spec = variant(H=128, Hv=128, rope=rope)
    arrays, integers = cases.draw(spec, 0)
    query, key, value, *mixing = (jnp.asarray(x) for x in arrays)
    args = validate(query, key, value, HeadMixing(*mixing), precision="highest", **spec.options, **{
        name: integers.get(name) for name in cases.INTEGERS
    })  # fmt: skip
    found = pallas_tpu_decode_plan.decode_plan(args)
    operands = pallas_tpu_decode.decode_inputs(args, found)
    kernel = lambda *x: pallas_tpu_decode_kernel.decode_kernel(found, *x, interpret=True)  # noqa: E731
    counted = jaxpr_flops.kernel_flops(kernel, *operands) * found.batch * found.tiles
    assert pallas_tpu_decode_kernel.decode_cost(found).flops == counted


def test_ids_may_be_negative():
    """Padding is marked by numbers that are nobody's: a padded query sees nothing, and a padded key is not seen."""
    arrays, integers = cases.draw(BASE, 0)
    integers["query_segment_ids"] = np.tile(np.int32([-1, 0, -2]), (BASE.B, 1))
    integers["key_segment_ids"] = np.tile(np.repeat(np.int32([-1, 0, -2]), 25), (BASE.B, 1))
    outs = [cases.call(BASE, implementation, arrays, integers) for implementation in ("pallas", "reference")]
    np.testing.assert_allclose(*outs, atol=2e-5)
    chex.assert_trees_all_equal(outs[0][:, 1], jnp.zeros_like(outs[0][:, 1]))
