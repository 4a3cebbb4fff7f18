"""Logical axes: rules, collisions, and layers laid out on meshes of either kind, or on none."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from iha_jax import compat, sharding
from iha_jax.nn import MLP, Embedding
from iha_jax.sharding import Rules

MESH_AXES = ("data", "fsdp", "tensor")


def test_rules_resolve_names_to_mesh_axes():
    rules = Rules()
    assert rules.resolve(("embed", "heads", "head_dim"), MESH_AXES) == PartitionSpec("fsdp", "tensor", None)
    assert rules.resolve(("batch", "sequence", None), MESH_AXES) == PartitionSpec(("data", "fsdp"), None, None)
    assert rules.resolve(("embed", "mlp"), ("data",)) == PartitionSpec(None, None)


def test_rules_refuse_collisions_and_unknown_names():
    with pytest.raises(ValueError, match=r"'mlp' and 'vocab'.*'tensor'"):
        Rules().resolve(("mlp", "vocab"), MESH_AXES)
    with pytest.raises(ValueError, match="'model'"):
        Rules().resolve(("model",), MESH_AXES)
    assert Rules(vocab=()).resolve(("mlp", "vocab"), MESH_AXES) == PartitionSpec("tensor", None)


def test_no_mesh_no_effect():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, ("batch", None)) is x


@pytest.mark.parametrize(("explicit", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
def test_layers_keep_their_values_and_state_their_layout(explicit, dtype):
    mesh = compat.make_mesh((2, 2, 2), MESH_AXES, explicit=explicit)
    embedding = Embedding(16, 8, dtype=dtype, rngs=nnx.Rngs(0))
    mlp = MLP(8, 12, kind="swiglu", dtype=dtype, rngs=nnx.Rngs(1))
    tokens = jnp.arange(12).reshape(4, 3)

    def run(states, tokens):
        e, m = (nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True))
        return e.logits(m(e(tokens)))

    graphs, states = zip(*(nnx.split(layer) for layer in (embedding, mlp)), strict=True)
    expected = run(states, tokens)

    def place(variable):
        spec = Rules().resolve(variable.axes, MESH_AXES)
        return jax.device_put(variable[...], jax.sharding.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        placed = tuple(
            jax.tree.map(
                lambda v: nnx.Param(place(v), axes=v.axes), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
            )
            for state in states
        )
        batch = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None)))
        logits = jax.jit(run)(placed, batch)
    # Rows of the embedding are split over `tensor`, so the logits' last axis is.
    assert logits.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
    chex.assert_trees_all_close(
        jax.device_get(logits), jax.device_get(expected), atol=1e-5 if dtype == jnp.float32 else 0.02
    )
