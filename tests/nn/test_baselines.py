"""Talking-heads, differential and 2-simplicial attention against NumPy, option by option; decoding; conventions."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax import MultiHeadAttention, Rope
from iha_jax.nn import DifferentialAttention, SimplicialAttention, TalkingHeadsAttention, dot_product, simplicial
from iha_jax.nn.differential import initial_lambda
from tests.nn import baselines_by_hand

B, T, D, N, K, H = 2, 13, 11, 6, 3, 4
LAYERS = {
    "talking": (TalkingHeadsAttention, baselines_by_hand.talking_heads),
    "differential": (DifferentialAttention, baselines_by_hand.differential),
    "simplicial": (SimplicialAttention, baselines_by_hand.simplicial),
}
OPTIONS = {
    "defaults": {"num_kv_heads": N},
    "window_biases": {"window": 3, "use_bias": True, "use_output_bias": False},
    "qk_norm_cap": {"normalize_qk": True, "logits_soft_cap": 0.7},
    "bidirectional": {"causal": False, "window": 4, "rope": None, "out_features": 7},
}
PACKED = ("window_biases", "qk_norm_cap")


def noise(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def jitted(layer, method="__call__"):
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, *args: getattr(nnx.merge(graph, state), method)(*args))
    return lambda *args: call(state, *args)


def packed_ids():
    """Two documents and padding in the first row, one document in the second."""
    ids = np.ones((B, T), np.int32)
    ids[0, 5:9], ids[0, 9:] = 2, 0
    return jnp.asarray(ids)


def make(kind, **options):
    """A layer with nothing at a special value: mixings, norms and biases are random."""
    options = {"num_kv_heads": K, "head_dim": H, "bias_init": nnx.initializers.normal(0.5), **options}
    if kind == "talking":
        options["talking_init"] = nnx.initializers.normal(0.6)
    elif kind == "differential":
        options["depth"] = 3
    elif kind == "simplicial":
        options = {name: value for name, value in options.items() if name != "rope"}
    layer = LAYERS[kind][0](N, D, rngs=nnx.Rngs(0), **options)
    for name in ("query_norm", "key_norm", "head_norm"):
        norm = getattr(layer, name, None)
        if norm is not None:
            norm.scale[...] = 1 + 0.3 * noise(7, *norm.scale[...].shape)
    return layer


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_layer_equals_numpy(kind, name):
    layer = make(kind, **OPTIONS[name])
    x, packed = noise(1, B, T, D), name in PACKED
    ids = packed_ids() if packed else None
    positions = jnp.arange(T, dtype=jnp.int32)[None] * 2 + jnp.array([[0], [4000]]) if packed else None
    y = jitted(layer)(x, None, positions, ids)
    expected = LAYERS[kind][1](layer, x, positions=positions, segment_ids=ids)
    chex.assert_shape(y, (B, T, layer.out_features))
    chex.assert_trees_all_close(y, expected.astype(np.float32), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_equal_numpys_differences(kind, x64):
    """Every parameter, along a random direction, in float64."""
    layer = make(kind, window=5, param_dtype=jnp.float64, normalize_qk=True)
    x, cotangent = (np.asarray(noise(seed, 1, 7, D), np.float64) for seed in (1, 2))
    graph, state = nnx.split(layer)
    gradient = jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(jnp.asarray(x)) * cotangent)))(state)
    leaves, structure = jax.tree.flatten(state)
    gradients = jax.tree.leaves(gradient)
    for i, (leaf, slope) in enumerate(zip(leaves, gradients, strict=True)):
        if leaf.ndim == 0:  # λ_init is a constant
            assert slope == 0
            continue
        direction = np.asarray(jax.random.normal(jax.random.key(i), leaf.shape), np.float64)

        def value(step, i=i, direction=direction):
            changed = [x + step * direction if j == i else x for j, x in enumerate(leaves)]
            return np.sum(LAYERS[kind][1](nnx.merge(graph, jax.tree.unflatten(structure, changed)), x) * cotangent)

        difference = (value(1e-5) - value(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), difference, rtol=1e-5, atol=1e-7)


QUICK = (("talking", True, 5), ("differential", True, None), ("simplicial", True, None))


@pytest.mark.parametrize(
    ("kind", "causal", "window"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(LAYERS, (True, False), (5, None))
    ],
)
def test_work_in_pieces_changes_nothing(monkeypatch, kind, causal, window):
    """Bands and pieces, forward and backward, are one computation cut differently."""
    outcomes, x = [], noise(1, B, 67, D)
    graph, state = nnx.split(make(kind, causal=causal, window=window))

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        return jnp.sum(jnp.sin(y)), y

    for limit in (2**24, 2**15):
        monkeypatch.setattr(dot_product, "_MAX_LOGITS", limit)
        monkeypatch.setattr(simplicial, "_MAX_LOGITS", 8 * limit)
        (_, y), gradient = jax.jit(jax.value_and_grad(lambda *args: loss(*args), has_aux=True))(state, x)
        outcomes.append((y, nnx.to_pure_dict(gradient)))
    chex.assert_trees_all_close(*outcomes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "window"), [("talking", 3), ("differential", None), ("simplicial", 3)])
def test_decoding_in_any_chunks_equals_the_whole(kind, window):
    layer = make(kind, window=window)
    step, x = jitted(layer, "decode"), noise(1, B, T, D)
    whole = jitted(layer)(x)
    cache, outputs, start = layer.init_cache(B, T), [], 0
    for size in (6, 1, 6):
        y, cache = step(x[:, start : start + size], cache)
        outputs.append(y)
        start += size
    chex.assert_trees_all_close(jnp.concatenate(outputs, axis=1), whole, atol=2e-5)
    # Ragged prompts: right padding of rubbish.
    ids = jnp.asarray(np.arange(6)[None] < np.array([[3], [6]]), jnp.int32)
    y, cache = step(jnp.where(ids[:, :, None] == 1, x[:, :6], jnp.nan), layer.init_cache(B, T), None, ids)
    z, cache = step(jnp.stack([x[0, 3], x[1, 6]])[:, None], cache)
    for row, length in enumerate((3, 6)):
        chex.assert_trees_all_close(y[row, :length], whole[row, :length], atol=2e-5)
        chex.assert_trees_all_close(z[row, 0], whole[row, length], atol=2e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_cross_attention_and_padding(kind):
    layer = make(kind, causal=False, context_features=5, rope=None)
    x, context = noise(1, B, T, D), noise(2, B, 17, 5)
    ids = jnp.asarray(np.arange(17)[None] < np.array([[17], [8]]), jnp.int32)
    call = jitted(layer)
    y = call(x, context, None, None, None, ids)
    chex.assert_trees_all_close(y[1:], call(x[1:], context[1:, :8]), atol=1e-5)
    wild = jnp.where((ids == 0)[:, :, None], jnp.inf, context)
    chex.assert_trees_all_equal(call(x, wild, None, None, None, ids), y)


@pytest.mark.parametrize("kind", LAYERS)
def test_bfloat16(kind):
    layer = make(kind, dtype=jnp.bfloat16, normalize_qk=True)
    x = noise(1, B, T, D)
    y = jitted(layer)(x)
    chex.assert_type(y, jnp.bfloat16)
    expected = LAYERS[kind][1](layer, x)
    assert np.abs(np.asarray(y, np.float64) - expected).max() < 0.05 * np.abs(expected).max()


def test_talking_heads_start_as_multi_head_attention():
    options = {"num_kv_heads": K, "head_dim": H, "window": 3}
    talking = TalkingHeadsAttention(N, D, rngs=nnx.Rngs(0), **options)
    mha = MultiHeadAttention(N, D, rngs=nnx.Rngs(1), **options)
    for name in ("query_kernel", "key_kernel", "value_kernel", "out_kernel"):
        getattr(mha, name)[...] = getattr(talking, name)[...]
    x = noise(1, B, T, D)
    chex.assert_trees_all_close(jitted(talking)(x), jitted(mha)(x), atol=1e-5)
    chex.assert_shape([talking.talking_logits[...], talking.talking_weights[...]], (N, N))


def test_differential_attention_by_its_conventions():
    layer = DifferentialAttention(N, 24, depth=2, rngs=nnx.Rngs(0))
    mha = MultiHeadAttention(N, 24, rngs=nnx.Rngs(0))
    for name in ("query_kernel", "key_kernel", "value_kernel", "out_kernel"):
        chex.assert_equal_shape([getattr(layer, name)[...], getattr(mha, name)[...]])
    chex.assert_shape(layer.lambda_query_1[...], (2,))
    chex.assert_trees_all_equal_shapes(layer.init_cache(B, 5), mha.init_cache(B, 5))
    np.testing.assert_allclose([initial_lambda(0), initial_lambda(2)], [0.2, 0.8 - 0.6 * np.exp(-0.6)], rtol=1e-6)
    np.testing.assert_allclose(layer.lambda_init[...], initial_lambda(2))
    q1, k1, q2, k2 = (
        np.asarray(getattr(layer, f"lambda_{name}")[...]) for name in ("query_1", "key_1", "query_2", "key_2")
    )
    np.testing.assert_allclose(layer.factor, np.exp(q1 @ k1) - np.exp(q2 @ k2) + initial_lambda(2), rtol=1e-6)
    wide = DifferentialAttention(2, 8, head_dim=4000, rope=None, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.std(wide.lambda_key_2[...]), 0.1, rtol=0.1)
    assert DifferentialAttention(N, 24, lambda_init=0.5, rngs=nnx.Rngs(0)).lambda_init[...] == 0.5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TalkingHeadsAttention, {"causal": "token"}, "TalkingHeadsAttention, got 'token'"),
        (DifferentialAttention, {"head_dim": 5, "rope": None}, "head_dim=5 must be a multiple of its 2 maps"),
        (DifferentialAttention, {"head_dim": 6}, "head_dim=6 for 2 maps"),
        (DifferentialAttention, {"lambda_init": 1.0}, "got 1.0"),
        (DifferentialAttention, {"depth": -1}, "got -1"),
        (SimplicialAttention, {"rope": Rope()}, "no rotary"),
        (SimplicialAttention, {"num_kv_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
    ],
)
def test_contradictions_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(N, 24, rngs=nnx.Rngs(0), **options)


def test_simplicial_attention_refuses_ambiguous_lengths():
    q, kv = noise(1, B, 3, 2, H), noise(2, B, 5, 2, 2 * H)
    with pytest.raises(ValueError, match="T=3 and S=5"):
        simplicial.simplicial_attention(q, kv, kv, causal=True)
    with pytest.raises(ValueError, match="query_segment_ids"):
        simplicial.simplicial_attention(q, kv, kv, causal=False, query_segment_ids=jnp.ones((B, 3), jnp.int32))
