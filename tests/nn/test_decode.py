"""Decoding: however a sequence is cut, the results are those of one call."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, Rope

B, T, D, N, K, H, P = 2, 11, 5, 4, 2, 6, 3

CASES = {
    "iha_virtual_global": (InterleavedHeadAttention, {"normalize_qk": True}),
    "iha_virtual_window": (InterleavedHeadAttention, {"window": 3}),
    "iha_virtual_window_one": (InterleavedHeadAttention, {"window": 1, "use_bias": True}),
    "iha_token_window": (InterleavedHeadAttention, {"window": 4, "causal": "token", "rope": Rope(positions="token")}),
    "mha_global": (MultiHeadAttention, {"normalize_qk": True}),
    "mha_window": (MultiHeadAttention, {"window": 3}),
}


def make(name):
    cls, options = CASES[name]
    pseudo = {"num_pseudo_heads": P} if cls is InterleavedHeadAttention else {}
    return cls(N, D, num_kv_heads=K, head_dim=H, **pseudo, **options, rngs=nnx.Rngs(0))


def jitted(layer):
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, *args: nnx.merge(graph, state).decode(*args))
    return lambda *args: step(state, *args)


def inputs():
    return jax.random.normal(jax.random.key(1), (B, T, D))


@pytest.mark.parametrize("name", CASES)
def test_any_chunking_equals_the_whole(name):
    layer = make(name)
    x, step = inputs(), jitted(layer)
    whole = layer(x)
    for sizes in ([T], [1] * T, [4, 1, 1, 4, 1]):
        cache, outputs, start = layer.init_cache(B, T), [], 0
        for size in sizes:
            y, cache = step(x[:, start : start + size], cache)
            outputs.append(y)
            start += size
        chex.assert_trees_all_close(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)
        chex.assert_trees_all_equal(cache.lengths, jnp.full((B,), T, jnp.int32))


@pytest.mark.parametrize("name", ["iha_virtual_global", "iha_virtual_window", "mha_global", "mha_window"])
def test_ragged_prompts(name):
    """Rows of 3 and 7 tokens, padded on the right with rubbish, then continued: each as if it were alone."""
    layer = make(name)
    x, lengths, prompt = inputs(), (3, 7), 7
    step = jitted(layer)
    ids = jnp.asarray(np.arange(prompt)[None] < np.array(lengths)[:, None], jnp.int32)
    padded = jnp.where(ids[:, :, None] == 1, x[:, :prompt], jnp.nan)
    y, cache = step(padded, layer.init_cache(B, T), None, ids)
    tails = []
    for i in range(4):
        token = jnp.stack([x[row, lengths[row] + i] for row in range(B)])[:, None]
        z, cache = step(token, cache)
        tails.append(z)
    whole, tails = layer(x), jnp.concatenate(tails, axis=1)
    for row, length in enumerate(lengths):
        chex.assert_trees_all_close(y[row, :length], whole[row, :length], atol=1e-5)
        chex.assert_trees_all_close(tails[row], whole[row, length : length + 4], atol=1e-5)
    chex.assert_trees_all_equal(cache.lengths, jnp.array([7, 11], jnp.int32))


@pytest.mark.parametrize("name", ["iha_virtual_window", "mha_global"])
def test_packed_documents_and_own_positions(name):
    layer = make(name)
    x, step = inputs(), jitted(layer)
    ids = jnp.broadcast_to(jnp.where(jnp.arange(T) < 6, 4, 9)[None], (B, T)).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.where(jnp.arange(T) < 6, jnp.arange(T) + 50, jnp.arange(T) * 2)[None], (B, T))
    whole = layer(x, positions=positions, segment_ids=ids)
    cache, outputs = layer.init_cache(B, T), []
    for start, stop in ((0, 4), (4, 8), (8, 9), (9, 10)):
        part = slice(start, stop)
        y, cache = step(x[:, part], cache, positions[:, part], ids[:, part])
        outputs.append(y)
    # Without ids a row goes on in the document it is in.
    y, cache = step(x[:, 10:], cache, positions[:, 10:])
    chex.assert_trees_all_close(jnp.concatenate([*outputs, y], axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_the_cache_has_exactly_mha_s_bytes(window):
    options = {"num_kv_heads": K, "head_dim": H, "window": window, "rngs": nnx.Rngs(0)}
    caches = [cls(N, D, **options).init_cache(B, 17) for cls in (InterleavedHeadAttention, MultiHeadAttention)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*caches)
    slots = 17 if window is None else window
    assert caches[0].key.nbytes + caches[0].value.nbytes == 2 * B * slots * K * H * 4
    chex.assert_type(MultiHeadAttention(N, D, **options).init_cache(B, 17, jnp.bfloat16).value, jnp.bfloat16)


@pytest.mark.parametrize("name", ["iha_virtual_window", "mha_global"])
def test_overflow_is_loud(name):
    layer = make(name)
    x = inputs()
    ids = jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1]], jnp.int32)
    _, cache = layer.decode(x[:, :4], layer.init_cache(B, 5), None, ids)
    with pytest.raises(ValueError, match=r"max_length=5.*row 1 has 4 and was given 2"):
        layer.decode(x[:, 4:6], cache)
    y, after = jitted(layer)(x[:, 4:6], cache)
    assert bool(jnp.isfinite(y[0]).all())
    assert bool(jnp.isnan(y[1]).all())
    chex.assert_trees_all_equal(after.lengths, jnp.array([4, 4], jnp.int32))
    row = lambda cache: jax.tree.map(lambda leaf: leaf[1], cache)  # noqa: E731
    chex.assert_trees_all_equal(row(after), row(cache))


def test_wrong_use_is_named():
    layer = make("mha_global")
    x = inputs()
    with pytest.raises(ValueError, match="init_cache"):
        layer.decode(x, make("mha_window").init_cache(B, T))
    bidirectional = MultiHeadAttention(N, D, head_dim=H, causal=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="causal=False"):
        bidirectional.decode(x, bidirectional.init_cache(B, T))
    with pytest.raises(ValueError, match="segment_ids"):
        layer.decode(x, layer.init_cache(B, T), None, jnp.ones((B, 3), jnp.int32))
