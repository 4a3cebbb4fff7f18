"""The one-layer encoder: the paper's size, its arithmetic by hand, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.models import Encoder, EncoderConfig
from tests import oracle

SMALL = {"max_length": 9, "model_dim": 12, "num_heads": 3, "mlp_dim": 20, "num_pseudo_heads": 2}


def parameters(config):
    model = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_the_papers_ternary_model_has_its_206849_parameters():
    assert parameters(EncoderConfig()) == 206_849
    assert parameters(EncoderConfig(attention="iha", num_pseudo_heads=4)) == 206_849 + 3 * 8 * 8 * 4 + 8 * 4
    assert parameters(EncoderConfig(attention="simplicial")) == 206_849 + 2 * (128 * 128 + 128)


def norm(x, layer):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * value(layer.scale) + value(layer.bias)


def value(parameter):
    return np.asarray(parameter[...], np.float64)


def randomised(config):
    """Nothing may be hidden by starting at zero or one. The model, and its compiled call."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 0.5, x.shape), x.dtype), state)
    call = jax.jit(lambda state, *args: nnx.merge(graph, state)(*args))
    return nnx.merge(graph, state), lambda *args: call(state, *args)


@pytest.mark.parametrize("attention", ["mha", "iha"])
def test_logits_by_hand(attention):
    config = EncoderConfig(attention=attention, mlp="relu", **SMALL)
    model, call = randomised(config)
    tokens = np.random.default_rng(0).integers(0, 2, (2, 7))
    x = value(model.embedding.table)[tokens] + value(model.positions.table)[:7]
    layer = model.attention
    heads = [
        np.einsum("btd,dnh->btnh", x, value(weight)) + value(bias)
        for weight, bias in (
            (layer.query_kernel, layer.query_bias),
            (layer.key_kernel, layer.key_bias),
            (layer.value_kernel, layer.value_bias),
        )
    ]
    if attention == "iha":
        mixing = [value(t) for t in (layer.mixing_query, layer.mixing_key, layer.mixing_value, layer.collapse)]
    else:
        mixing = [np.eye(3)[:, :, None]] * 3 + [np.ones((3, 1))]
    out = oracle.attention(*heads, *mixing, causal=None)
    x = norm(x + np.einsum("btnh,nhd->btd", out, value(layer.out_kernel)) + value(layer.out_bias), model.attention_norm)
    hidden = np.maximum(x @ value(model.mlp.up_kernel) + value(model.mlp.up_bias), 0)
    x = norm(x + hidden @ value(model.mlp.down_kernel) + value(model.mlp.down_bias), model.mlp_norm)
    expected = x @ value(model.logit_kernel)[:, 0] + value(model.logit_bias)
    logits = call(jnp.asarray(tokens))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("attention", ["mha", "iha", "simplicial"])
def test_padding_changes_nothing(attention):
    _, call = randomised(EncoderConfig(attention=attention, **SMALL))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 9)))
    ids = jnp.asarray(np.arange(9) < 5, jnp.int32)[None].repeat(2, axis=0)
    np.testing.assert_allclose(call(tokens, ids)[:, :5], call(tokens[:, :5]), atol=1e-5)


def test_wrong_encoders():
    with pytest.raises(ValueError, match="attention must be one of"):
        EncoderConfig(attention="linear")
    with pytest.raises(ValueError, match="at most max_length=9 tokens, got shape"):
        nnx.eval_shape(lambda: Encoder(EncoderConfig(**SMALL), rngs=nnx.Rngs(0))(jnp.zeros((1, 10), jnp.int32)))
