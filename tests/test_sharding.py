"""Logical axes: rules, collisions, and layers laid out on meshes of either kind, or on none."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from iha_jax import InterleavedHeadAttention, Rope, compat, sharding
from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer
from iha_jax.nn import (
    MLP,
    DifferentialAttention,
    Embedding,
    MultiHeadAttention,
    SimplicialAttention,
    TalkingHeadsAttention,
)
from iha_jax.sharding import Rules, use_rules
from tests.ops.cases import QUICK

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


def test_sizes_that_do_not_divide_are_named_with_their_axis():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert Rules().lay_out((8, 6), ("batch", "heads"), sizes, "x") == PartitionSpec(("data", "fsdp"), "tensor")
    with pytest.raises(ValueError, match=r"x: its batch axis of 6 must be divisible by the 4 devices along.*fsdp'\)"):
        Rules().lay_out((6, 6), ("batch", "heads"), sizes, "x")
    x, weight = jnp.ones((4, 3, 8)), jnp.ones((8, 5))
    for explicit in (True, False):
        with jax.set_mesh(compat.make_mesh((2, 2, 2), MESH_AXES, explicit=explicit)):
            with pytest.raises(
                ValueError, match=r"shape \[4, 3, 5\]: its mlp axis of 5 must be divisible by the 2 dev"
            ):
                sharding.einsum("btd,df->btf", x, weight, axes=("batch", "sequence", "mlp"))
            with pytest.raises(ValueError, match=r"its heads axis of 3 must be"):
                sharding.constrain(x, (None, "heads", None))
            with pytest.raises(ValueError, match=r"shape \[6, 8\]: its batch axis of 6 must be .* 4 devices"):
                sharding.take(jnp.ones((16, 8)), jnp.zeros(6, jnp.int32), ("batch", None))


def test_no_mesh_no_effect():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, ("batch", None)) is x


def place(state, mesh, rules=Rules()):
    """Parameters laid out by their axes."""

    def lay_out(variable):
        spec = rules.resolve(variable.axes, mesh.axis_names)
        value = jax.device_put(variable[...], jax.sharding.NamedSharding(mesh, spec))
        return nnx.Param(value, axes=variable.axes)

    return jax.tree.map(lay_out, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


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

    with jax.set_mesh(mesh):
        placed = tuple(place(state, mesh) for state in states)
        batch = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None)))
        logits = jax.jit(run)(placed, batch)
    # Rows of the embedding are split over `tensor`, so the logits' last axis is.
    assert logits.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
    chex.assert_trees_all_close(
        jax.device_get(logits), jax.device_get(expected), atol=1e-5 if dtype == jnp.float32 else 0.02
    )


@pytest.mark.parametrize("equation", ["btd,dnh->btnh", "btnh,nhd->btd", "btd,vd->btv", "btd,df->btf", "btd,fd->bft"])
def test_einsum_is_einsum_values_and_gradients(equation):
    sizes = {"b": 2, "t": 3, "d": 5, "n": 7, "h": 11, "f": 13, "v": 17}
    shapes = [tuple(sizes[axis] for axis in term) for term in equation.split("->")[0].split(",")]
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def through(einsum):
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(einsum(x, w))), argnums=(0, 1))(x, w)

    ours = through(lambda x, w: sharding.einsum(equation, x, w, axes=(None,) * len(equation.split("->")[1])))
    chex.assert_trees_all_close(ours, through(lambda x, w: jnp.einsum(equation, x, w)), rtol=1e-5, atol=1e-5)


WITH_CONTEXT = ("data", "context", "tensor")


@pytest.mark.parametrize(
    ("kind", "names", "explicit", "options"),
    [
        (InterleavedHeadAttention, WITH_CONTEXT, True, {"window": 4, "num_pseudo_heads": 3}),
        (InterleavedHeadAttention, MESH_AXES, False, {"collapse": "across_heads", "num_pseudo_heads": 2}),
        (MultiHeadAttention, WITH_CONTEXT, True, {}),
        (MultiHeadAttention, WITH_CONTEXT, True, {"window": 4, "num_kv_heads": 1}),
        (MultiHeadAttention, WITH_CONTEXT, False, {"window": 11, "causal": False}),
        (MultiHeadAttention, MESH_AXES, True, {}),
        (TalkingHeadsAttention, WITH_CONTEXT, True, {"window": 4, "talking_init": nnx.initializers.normal(0.5)}),
        (DifferentialAttention, WITH_CONTEXT, True, {}),
        pytest.param(
            TalkingHeadsAttention,
            MESH_AXES,
            False,
            {"talking_init": nnx.initializers.normal(0.5)},
            marks=pytest.mark.slow,
        ),
        pytest.param(DifferentialAttention, MESH_AXES, False, {"window": 4}, marks=pytest.mark.slow),
        pytest.param(SimplicialAttention, WITH_CONTEXT, True, {"window": 4, "rope": None}, marks=pytest.mark.slow),
    ],
)
def test_an_attention_layer_on_a_mesh(kind, names, explicit, options):
    mesh = compat.make_mesh((2, 2, 2), names, explicit=explicit)
    layer = kind(4, 16, **{"num_kv_heads": 2, "rope": Rope(), **options}, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)
    ids = np.sort(np.random.default_rng(1).integers(0, 3, (4, 16)), axis=1).astype(np.int32)
    cotangent = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)

    @jax.jit
    def run(state, x):
        y = nnx.merge(graph, state)(x, segment_ids=ids)
        if kind in (InterleavedHeadAttention, MultiHeadAttention):  # theirs are tested where they are cheaper
            return y, {}
        return y, jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x, segment_ids=ids) * cotangent))(state)

    expected, slopes = run(state, x)
    # One key/value head can't be split: it is kept whole.
    rules = Rules() if layer.num_kv_heads > 1 else Rules(kv_heads=())
    spec = rules.resolve(("batch", "sequence", None), names)
    with jax.set_mesh(mesh), use_rules(rules):
        out, gradient = run(place(state, mesh, rules), jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))
    assert out.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), 3)
    chex.assert_trees_all_close(jax.device_get(out), jax.device_get(expected), atol=1e-5)
    gradient, slopes = (jax.tree.leaves(jax.device_get(tree)) for tree in (gradient, slopes))
    chex.assert_trees_all_close(gradient, slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "chunks", "scan"),
    [
        ({"data": 2, "context": 2, "tensor": 2}, (7, 1), False),
        # Chunks that divide, with a ring of 3 before them that does not; in scanned layers.
        pytest.param({"context": 4, "tensor": 2}, (8, 1, 4), True, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_any_length_are_decoded_where_tokens_are_split(sizes, chunks, scan):
    """A prompt, then a token: the logits of one device, with a ring and a cache that do not divide either."""
    config = ModelConfig(
        vocab_size=32,
        max_length=16,
        num_layers=2,
        model_dim=16,
        num_heads=4,
        mlp_dim=24,
        pattern=("iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=2, window=3),
        mha=MHAConfig(),
        scan_layers=scan,
    )
    graph, state = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 32, (4, sum(chunks))).astype(np.int32)
    ids = np.ones_like(tokens)
    ids[1, 4 : chunks[0]] = 0  # a shorter prompt

    def run(state, tokens):
        model = nnx.merge(graph, state)
        cache, outputs, start = model.init_cache(4, sum(chunks) + 1 + scan), [], 0
        for length in chunks:
            piece = slice(start, start + length)
            logits, cache = model.decode(tokens[:, piece], cache, segment_ids=ids[:, piece])
            outputs.append(logits)
            start += length
        return jnp.concatenate(outputs, axis=1), cache.lengths

    expected, lengths = jax.jit(run, compiler_options=QUICK)(state, tokens)
    assert lengths.tolist() == [sum(chunks), sum(chunks) - chunks[0] + 4, sum(chunks), sum(chunks)]
    mesh = compat.make_mesh(tuple(sizes.values()), tuple(sizes), explicit=False)
    with jax.set_mesh(mesh):
        found, found_lengths = jax.jit(run, compiler_options=QUICK)(place(state, mesh), tokens)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=1e-5)
    assert found_lengths.tolist() == lengths.tolist()


def test_tokens_are_whole_only_where_uneven():
    axes = ("batch", "sequence")
    with jax.set_mesh(compat.make_mesh((2, 4), ("data", "context"), explicit=False)):
        with sharding.tokens_whole_if_uneven(8, 12):
            assert sharding.current_spec(axes, (2, 8))[0] == PartitionSpec("data", "context")
        with sharding.tokens_whole_if_uneven(8, 13):
            assert sharding.current_spec(axes, (2, 8))[0] == PartitionSpec("data", None)
        with pytest.raises(ValueError, match="sequence axis of 13"):  # elsewhere it is still an error
            sharding.current_spec(axes, (2, 13))
    with sharding.tokens_whole_if_uneven(13):
        assert sharding.mesh_axes("sequence") == ()
