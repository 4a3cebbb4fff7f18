"""The baseline's attention in all its paths: dense, banded, in pieces; values and gradients against one mask."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import compat
from iha_jax.nn import dot_product
from tests import oracle

B, N, K, H = 2, 4, 2, 6


def inputs(tokens, packed):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (B, tokens, m, H)) for key, m in zip(keys, (N, K, K), strict=True))
    ids = None
    if packed:
        ids = np.ones((B, tokens), np.int32)
        ids[0, tokens // 3 :], ids[0, -5:], ids[1, 2:] = 2, 0, 7
        ids = jnp.asarray(ids)
    return q, k, v, ids


ONE, PIECES = 2**24, 2**12


@pytest.mark.parametrize(
    ("tokens", "causal", "window", "packed", "max_logits"),
    [
        (67, True, 5, False, ONE),
        (67, True, 5, False, PIECES),
        (67, True, 40, True, ONE),
        (67, False, 3, True, PIECES),
        (67, False, 18, False, ONE),
        (67, True, None, False, ONE),
        (67, True, None, True, PIECES),
        (67, False, None, False, PIECES),
    ],
)
def test_every_path_equals_numpy(monkeypatch, tokens, causal, window, packed, max_logits):
    monkeypatch.setattr(dot_product, "_MAX_LOGITS", max_logits)
    q, k, v, ids = inputs(tokens, packed)

    def attend(q, k, v):
        return dot_product.dot_product_attention(q, k, v, causal=causal, window=window, query_segment_ids=ids)

    one, kv = np.eye(N)[:, :, None], np.eye(K)[:, :, None]
    expected = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        one,
        kv,
        kv,
        np.ones((N, 1)),
        causal="token" if causal else None,
        window=window,
        query_segment_ids=ids,
    )
    chex.assert_trees_all_close(jax.jit(attend)(q, k, v), expected.astype(np.float32), atol=1e-5)
    # Gradients: against a dense mask through jax's own attention.
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    seen = distance >= 0 if causal else np.ones_like(distance, bool)
    if window is not None:
        seen = seen & (abs(distance) < window)
    seen = np.broadcast_to(seen, (B, 1, tokens, tokens))
    if packed:
        seen = seen & np.asarray((ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None])[:, None]
    weight = jax.random.normal(jax.random.key(9), q.shape) * (1 if ids is None else (ids != 0)[:, :, None, None])

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen))

    gradients = [
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args) * weight), argnums=(0, 1, 2)))(q, k, v)
        for f in (attend, plain)
    ]
    chex.assert_trees_all_close(*gradients, atol=2e-5)


def test_a_window_costs_tokens_times_window():
    def flops(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32)
        attend = lambda q, k, v: dot_product.dot_product_attention(q, k, v, causal=True, window=32)  # noqa: E731
        return jax.jit(attend).lower(x, x, x).compile().cost_analysis()["flops"]

    assert flops(2048) < 2.2 * flops(1024)


def test_memory_grows_linearly_with_length(monkeypatch):
    monkeypatch.setattr(dot_product, "_MAX_LOGITS", 2**15)

    def temporaries(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 4, 8), jnp.float32)
        loss = lambda q, k, v: dot_product.dot_product_attention(q, k, v, causal=False).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(1024) < 2.2 * temporaries(512)


def test_ambiguous_lengths_are_refused():
    q, k, v, _ = inputs(9, False)
    with pytest.raises(ValueError, match="T=4 and S=9"):
        dot_product.dot_product_attention(q[:, :4], k, v, causal=True)
    with pytest.raises(ValueError, match="segment_ids"):
        dot_product.dot_product_attention(q[:, :4], k, v, causal=False, query_segment_ids=jnp.ones((B, 4), jnp.int32))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mesh", [{"context": 4, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_on_a_mesh_equals_one_device(mesh, window):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 32, n, 8)).astype(np.float32) for n in (4, 2, 2))
    ids = np.sort(rng.integers(0, 3, (2, 32)), axis=1).astype(np.int32)

    def loss(query, key, value):
        out = dot_product.dot_product_attention(query, key, value, causal=True, window=window, query_segment_ids=ids)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    expected = run(query, key, value)
    with jax.set_mesh(compat.make_mesh(tuple(mesh.values()), tuple(mesh))):
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=2e-6, rtol=1e-5)


def test_values_may_have_a_width_of_their_own():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 9, n, h)).astype(np.float32) for n, h in ((4, 8), (2, 8), (2, 3)))
    logits = np.einsum("bqkxh,bskh->bkxqs", query.reshape(1, 9, 2, 2, 8), key) / 8**0.5
    weights = np.exp(np.where(np.tri(9, dtype=bool), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bkxqs,bskd->bqkxd", weights, value).reshape(1, 9, 4, 3)
    out = dot_product.dot_product_attention(query, key, value, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
