"""Norms, feed-forward networks and embeddings against NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.nn import MLP, Embedding, LayerNorm, RMSNorm

B, T, D, F, V = 2, 3, 5, 7, 11


def x(dtype=jnp.float32):
    return (3 * jax.random.normal(jax.random.key(0), (B, T, D)) + 1).astype(dtype)


def test_norms():
    values = np.asarray(x(), np.float64)
    scale, bias = jnp.arange(1.0, D + 1), jnp.linspace(-1, 1, D)
    rms, layer = RMSNorm(D), LayerNorm(D)
    rms.scale[...] = layer.scale[...] = scale
    layer.bias[...] = bias
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True)) * np.asarray(scale)
    chex.assert_trees_all_close(rms(x()), expected.astype(np.float32), rtol=1e-5)
    centred = values - values.mean(-1, keepdims=True)
    expected = centred / centred.std(-1, keepdims=True) * np.asarray(scale) + np.asarray(bias)
    chex.assert_trees_all_close(layer(x()), expected.astype(np.float32), rtol=1e-4, atol=1e-5)
    for norm in (rms, layer):
        chex.assert_type(norm(x(jnp.bfloat16)), jnp.bfloat16)
    chex.assert_type(RMSNorm(D, dtype=jnp.float32)(x(jnp.bfloat16)), jnp.float32)


ACTIVATIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "relu2": lambda z: np.maximum(z, 0) ** 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


@pytest.mark.parametrize("kind", [*ACTIVATIONS, *GATES])
def test_mlp(kind):
    mlp = MLP(D, F, kind=kind, use_bias=True, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
    weights = {name: np.asarray(v, np.float64) for name, v in nnx.to_pure_dict(nnx.state(mlp)).items()}
    values = np.asarray(x(), np.float64)
    hidden = values @ weights["up_kernel"] + weights["up_bias"]
    if kind in GATES:
        gate = values @ weights["gate_kernel"] + weights["gate_bias"]
        hidden = ACTIVATIONS[GATES[kind]](gate) * hidden
    else:
        assert "gate_kernel" not in weights
        hidden = ACTIVATIONS[kind](hidden)
    expected = hidden @ weights["down_kernel"] + weights["down_bias"]
    chex.assert_trees_all_close(mlp(x()), expected.astype(np.float32), rtol=1e-4, atol=1e-4)


def test_unknown_kind_of_mlp():
    with pytest.raises(ValueError, match="'tanh'"):
        MLP(D, F, kind="tanh", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_logits(tied):
    embedding = Embedding(V, D, tied=tied, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens = jnp.array([[0, 3, V - 1], [1, -1, V]])
    y = embedding(tokens)
    chex.assert_shape(y, (B, T, D))
    chex.assert_type(y, jnp.bfloat16)
    chex.assert_trees_all_equal(y[0], embedding.table[...].astype(jnp.bfloat16)[tokens[0]])
    assert bool(jnp.isnan(y[1, 1:]).all())
    logits = embedding.logits(x())
    chex.assert_shape(logits, (B, T, V))
    chex.assert_type(logits, jnp.float32)
    head = embedding.table[...].T if tied else embedding.head_kernel[...]
    assert (embedding.head_kernel is None) == tied
    chex.assert_trees_all_close(logits, x() @ head, atol=0.1)
    with pytest.raises(ValueError, match="float32"):
        embedding(x()[..., 0])
