"""Patterns of attention against softmax by hand; numbers about mixing tensors where they are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, Rope
from iha_jax.nn import SimplicialAttention
from iha_jax.viz import attention_patterns, mixing_summary

T, N, H, P = 5, 3, 4, 2


def looked_at(make):
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state)
    x = jnp.asarray(rng.normal(size=(1, T, N * H)), jnp.float32)
    patterns = jax.jit(lambda state, x: attention_patterns(nnx.merge(graph, state), x))(state, x)
    return nnx.merge(graph, state), np.asarray(x[0], np.float64), {k: np.asarray(v) for k, v in patterns.items()}


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def heads(x, weight):
    return np.einsum("td,dnh->tnh", x, np.asarray(weight[...], np.float64))


def test_patterns_of_plain_attention():
    layer, x, patterns = looked_at(lambda: MultiHeadAttention(N, N * H, causal=True, rope=None, rngs=nnx.Rngs(0)))
    logits = np.einsum("tnh,snh->nts", heads(x, layer.query_kernel), heads(x, layer.key_kernel)) / H**0.5
    expected = softmax(np.where(np.tri(T, dtype=bool), logits, -np.inf))
    assert set(patterns) == {"effective"}
    np.testing.assert_allclose(patterns["effective"], expected, atol=1e-6)


def test_patterns_of_simplicial_attention():
    layer, x, patterns = looked_at(lambda: SimplicialAttention(N, N * H, causal=False, rngs=nnx.Rngs(0)))
    keys = (heads(x, layer.key_kernel), heads(x, layer.second_key_kernel))
    logits = np.einsum("tnh,inh,jnh->ntij", heads(x, layer.query_kernel), *keys) / H**0.5
    weights = softmax(logits.reshape(N, T, T * T)).reshape(N, T, T, T)
    np.testing.assert_allclose(patterns["effective"], weights.sum(axis=3), atol=1e-6)


@pytest.mark.parametrize("collapse", ["per_head", "across_heads"])
def test_patterns_of_pseudo_heads(collapse):
    layer, x, patterns = looked_at(
        lambda: InterleavedHeadAttention(N, N * H, num_pseudo_heads=P, rope=None, collapse=collapse, rngs=nnx.Rngs(0))
    )
    tensors = {k: np.asarray(getattr(layer.mixing, k), np.float64) for k in ("query", "key", "value", "collapse")}
    query = np.einsum("tmh,mnp->ntph", heads(x, layer.query_kernel), tensors["query"]).reshape(N, T * P, H)
    key = np.einsum("tmh,mnp->ntph", heads(x, layer.key_kernel), tensors["key"]).reshape(N, T * P, H)
    logits = query @ np.swapaxes(key, 1, 2) / H**0.5
    weights = softmax(np.where(np.tri(T * P, dtype=bool), logits, -np.inf))
    np.testing.assert_allclose(patterns["pseudo"], weights, atol=1e-6)
    split = weights.reshape(N, T, P, T, P)
    if collapse == "per_head":
        effective = np.einsum("np,ntpsr,mnr->nts", tensors["collapse"], split, tensors["value"])
    else:
        effective = np.einsum("ngp,gtpsr,mgr->nts", tensors["collapse"], split, tensors["value"])
    np.testing.assert_allclose(patterns["effective"], effective, atol=1e-5)


def test_windows_and_rotations_are_the_layers_own():
    _, _, patterns = looked_at(
        lambda: InterleavedHeadAttention(N, N * H, num_pseudo_heads=P, window=2, rope=Rope(), rngs=nnx.Rngs(0))
    )
    distance = np.arange(T * P)[:, None] - np.arange(T * P)
    seen = (distance >= 0) & (distance < 2 * P)
    assert (patterns["pseudo"][:, ~seen] == 0).all()
    assert (patterns["pseudo"][:, seen] > 0).all()
    np.testing.assert_allclose(patterns["pseudo"].sum(axis=2), 1, atol=1e-6)


def test_one_input_at_a_time():
    layer = nnx.eval_shape(lambda: MultiHeadAttention(N, N * H, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"one input, \[1, tokens, features\], got shape \(2, 5, 12\)"):
        attention_patterns(layer, jnp.zeros((2, T, N * H)))


def test_summaries_of_known_tensors():
    copies = np.broadcast_to(np.eye(4)[:, :, None], (4, 4, 3))
    assert mixing_summary(copies) == pytest.approx((0, 0, 4))
    # All pseudo-heads are multiples of one mixture: 1, 2, 3 times the sum of the heads.
    one = np.ones((4, 4, 1)) * np.array([1.0, 2.0, 3.0])
    found = mixing_summary(one)
    assert found.effective_rank == pytest.approx(1)
    assert found.spread == pytest.approx(np.sqrt(2 / 3))
    assert found.from_copy == pytest.approx(np.sqrt(np.mean((one - copies) ** 2)))
