"""The Linen counterparts: the same layer, with Linen's parameters."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention
from iha_jax.nn import DifferentialAttention, SimplicialAttention, TalkingHeadsAttention
from iha_jax.nn import linen as iha_linen

LAYERS = [
    ("InterleavedHeadAttention", InterleavedHeadAttention, True),
    ("MultiHeadAttention", MultiHeadAttention, False),
    pytest.param("TalkingHeadsAttention", TalkingHeadsAttention, True, marks=pytest.mark.slow),
    ("DifferentialAttention", DifferentialAttention, True),
    pytest.param("SimplicialAttention", SimplicialAttention, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "nnx_layer", "partitioned"), LAYERS)
def test_a_linen_layer_is_the_nnx_layer(name, nnx_layer, partitioned):
    make = getattr(iha_linen, name)

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x + make(2, 16, window=3, partitioned=partitioned, name="attention")(x)

    x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    variables = Block().init(jax.random.key(0), x)
    own = variables["params"]["attention"]
    if partitioned:
        specs = linen.get_partition_spec(variables)["params"]["attention"]
        assert tuple(specs["query_kernel"]) == ("embed", "heads", "head_dim")
    graph, state = nnx.split(nnx_layer(2, 16, window=3, rngs=nnx.Rngs(5)))
    nnx.replace_by_pure_dict(state, dict(linen.meta.unbox(own)))
    layer = nnx.merge(graph, state)
    expected = layer(x)
    chex.assert_trees_all_close(jax.jit(Block().apply)(variables, x), x + expected, atol=1e-6)

    alone = make(2, 16, window=3)
    cache = alone.apply({"params": own}, 2, 7, nnx_method="init_cache")
    decode = jax.jit(lambda params, x, cache: alone.apply({"params": params}, x, cache, nnx_method="decode"))
    y, cache = decode(own, x[:, :4], cache)
    z, cache = decode(own, x[:, 4:], cache)
    chex.assert_trees_all_close(jnp.concatenate([y, z], axis=1), expected, atol=1e-5)


def test_keys_come_from_linen():
    with pytest.raises(ValueError, match="rngs"):
        iha_linen.InterleavedHeadAttention(2, 12, rngs=nnx.Rngs(0))
