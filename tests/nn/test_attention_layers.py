"""Both attention layers against NumPy, option by option. No two axes have the same size."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, Rope
from tests.nn import by_hand

B, T, S, D, N, K, H, P = 2, 13, 17, 11, 6, 3, 4, 5
SIZES = {"num_heads": N, "in_features": D, "num_kv_heads": K, "head_dim": H}


def noise(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def packed_ids():
    """Two documents and padding in the first row, one document in the second."""
    ids = np.ones((B, T), np.int32)
    ids[0, 5:9], ids[0, 9:] = 2, 0
    return jnp.asarray(ids)


IHA_CASES = {
    "defaults": {"num_kv_heads": None},
    "virtual_window_biases": {"window": 3, "use_bias": True},
    "token_across_heads_qk_norm": {"causal": "token", "collapse": "across_heads", "normalize_qk": True, "window": 2},
    "token_rope_cap": {"rope": Rope(positions="token"), "logits_soft_cap": 1.5, "use_output_bias": True},
    "bidirectional": {"causal": None, "window": 4, "rope": None, "out_features": 7},
}
MHA_CASES = {
    "defaults": {"num_kv_heads": None},
    "window_biases": {"window": 3, "use_bias": True, "use_output_bias": False},
    "qk_norm_cap": {"normalize_qk": True, "logits_soft_cap": 1.5},
    "bidirectional": {"causal": False, "window": 2, "rope": None, "out_features": 7},
    "precision": {"precision": "highest", "rope": Rope(theta=100.0)},
}


def make(kind, options, seed=0):
    cls, extra = (InterleavedHeadAttention, {"num_pseudo_heads": P}) if kind == "iha" else (MultiHeadAttention, {})
    bias = {"bias_init": nnx.initializers.normal(0.5)}
    return cls(**{**SIZES, **extra, **bias, **options}, rngs=nnx.Rngs(seed))


ALL_CASES = [("iha", name) for name in IHA_CASES] + [("mha", name) for name in MHA_CASES]


@pytest.mark.parametrize(("kind", "name"), ALL_CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_layer_equals_numpy(kind, name, packed):
    layer = make(kind, (IHA_CASES if kind == "iha" else MHA_CASES)[name])
    x = noise(1, B, T, D)
    ids = packed_ids() if packed else None
    positions = jnp.arange(T, dtype=jnp.int32)[None] * 2 + jnp.array([[0], [40_000]]) if packed else None
    y = layer(x, positions=positions, segment_ids=ids)
    chex.assert_shape(y, (B, T, layer.out_features))
    chex.assert_trees_all_close(
        y, by_hand.attention_layer(layer, x, positions=positions, segment_ids=ids).astype(np.float32), atol=2e-5
    )


@pytest.mark.parametrize("kind", ["iha", "mha"])
def test_cross_attention(kind):
    causal = None if kind == "iha" else False
    layer = make(kind, {"causal": causal, "context_features": 5, "rope": None})
    x, context = noise(1, B, T, D), noise(2, B, S, 5)
    ids = jnp.asarray(np.arange(S)[None] < np.array([[S], [8]]), jnp.int32)
    y = layer(x, context, context_segment_ids=ids)
    expected = by_hand.attention_layer(layer, x, context, context_segment_ids=ids)
    chex.assert_trees_all_close(y, expected.astype(np.float32), atol=2e-5)
    with pytest.raises(ValueError, match="context_features=5"):
        layer(x)
    with pytest.raises(ValueError, match="context_segment_ids"):
        layer(x, context, segment_ids=jnp.ones((B, T), jnp.int32))


def test_a_context_needs_a_layer_without_causality():
    layer = make("iha", {})
    with pytest.raises(ValueError, match="causal='virtual'"):
        layer(noise(1, B, T, D), noise(2, B, S, D))


@pytest.mark.parametrize("kind", ["iha", "mha"])
def test_padding_contents_change_nothing(kind):
    layer = make(kind, {"window": 3})
    ids = packed_ids()
    x = noise(1, B, T, D)
    wild = jnp.where((ids == 0)[:, :, None], jnp.inf, x)
    y, z = (layer(inputs, segment_ids=ids) for inputs in (x, wild))
    real = np.asarray(ids != 0)
    chex.assert_trees_all_equal(np.asarray(y)[real], np.asarray(z)[real])


@pytest.mark.parametrize("kind", ["iha", "mha"])
def test_bfloat16_flows_through(kind):
    layer = make(kind, {"dtype": jnp.bfloat16, "normalize_qk": True})
    x = noise(1, B, T, D)
    y = layer(x)
    chex.assert_type(y, jnp.bfloat16)
    chex.assert_trees_all_close(
        np.asarray(y, np.float32), by_hand.attention_layer(layer, x).astype(np.float32), atol=0.06
    )
    for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)):
        chex.assert_type(leaf, jnp.float32)
    chex.assert_type(layer.init_cache(B, T).key, jnp.bfloat16)


def test_parameters_have_the_contracts_shapes_and_names():
    layer = make("iha", {"use_bias": True, "normalize_qk": True, "collapse": "across_heads"})
    shapes = {
        "mixing_query": (N, N, P),
        "mixing_key": (K, K, P),
        "mixing_value": (K, K, P),
        "collapse": (N, N, P),
        "query_kernel": (D, N, H),
        "key_kernel": (D, K, H),
        "value_kernel": (D, K, H),
        "out_kernel": (N, H, D),
    }
    for name, shape in shapes.items():
        chex.assert_shape(getattr(layer, name)[...], shape)
    assert layer.mixing_query.axes == ("source_heads", "heads", "pseudo")
    assert layer.query_kernel.axes == ("embed", "heads", "head_dim")
    variables = jax.tree.leaves(nnx.state(layer), is_leaf=lambda v: isinstance(v, nnx.Variable))
    assert len(variables) == 14
    for variable in variables:
        assert len(variable.axes) == variable[...].ndim


def test_kernels_start_at_their_fan_in():
    layer = InterleavedHeadAttention(8, 256, rngs=nnx.Rngs(0))
    for name in ("query_kernel", "key_kernel", "value_kernel", "out_kernel"):
        np.testing.assert_allclose(np.std(getattr(layer, name)[...]), 256**-0.5, rtol=0.03)


def test_own_initialisers_are_used():
    constant = nnx.initializers.constant
    layer = make("iha", {"mixing_init": constant(0.25), "collapse_init": constant(0.5)})
    chex.assert_trees_all_equal(layer.mixing_key[...], jnp.full((K, K, P), 0.25))
    chex.assert_trees_all_equal(layer.collapse[...], jnp.full((N, P), 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
        ({"head_dim": None}, "in_features=11 is no multiple of num_heads=6"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"window": 0}, "window=0"),
        ({"num_pseudo_heads": 0}, "num_pseudo_heads=0"),
        ({"causal": True}, "got True"),
        ({"collapse": "both"}, "'both'"),
        ({"logits_soft_cap": -1.0}, "-1.0"),
        ({"rope": 10_000.0}, "float"),
        ({"mixing_init": "copy"}, "'copy'"),
        ({"mixing_init": "exact"}, "token positions"),
    ],
)
def test_contradictions_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make("iha", options)
