"""The decoder: two forms of one model, causality, packing, decoding, counts, dtypes, dropout."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer, stack_parameters, unstack_parameters

# Five layers of a pattern of two: two whole cycles and a remainder.
CONFIG = ModelConfig(
    vocab_size=37,
    max_length=32,
    num_layers=5,
    model_dim=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=14,
    mlp="swiglu",
    normalize_qk=True,
    pattern=("iha", "mha"),
    iha=IHAConfig(num_pseudo_heads=3, window=2),
)
B, T = 2, 11


def tokens():
    return jax.random.randint(jax.random.key(1), (B, T), 0, CONFIG.vocab_size)


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def functional(model, method="__call__"):
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, *args, **kwargs: getattr(nnx.merge(graph, state), method)(*args, **kwargs))
    return lambda *args, **kwargs: call(state, *args, **kwargs)


@pytest.fixture(scope="module")
def unrolled():
    return Transformer(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def logits(unrolled):
    return functional(unrolled)(tokens())


def test_scanned_and_unrolled_are_one_model(unrolled, logits):
    config = dataclasses.replace(CONFIG, scan_layers=True, remat="dots")
    scanned = Transformer(config, rngs=nnx.Rngs(0))
    chex.assert_trees_all_close(stack_parameters(parameters(unrolled), config), parameters(scanned), atol=1e-6)
    chex.assert_trees_all_close(unstack_parameters(parameters(scanned), config), parameters(unrolled), atol=1e-6)
    chex.assert_trees_all_close(functional(scanned)(tokens()), logits, atol=1e-6)

    def gradients(model):
        graph, state = nnx.split(model)

        def loss(state):
            return jnp.mean(jnp.square(nnx.merge(graph, state)(tokens())))

        return nnx.to_pure_dict(jax.jit(jax.grad(loss))(state))

    chex.assert_trees_all_close(stack_parameters(gradients(unrolled), config), gradients(scanned), atol=2e-6, rtol=1e-5)


def test_a_decoder_of_baselines():
    """Scanned or not it is one model, each layer with the λ of its own depth; it decodes, and sees no future."""
    config = dataclasses.replace(CONFIG, pattern=("differential", "talking_heads", "simplicial"), num_layers=7)
    model, scanned = (
        Transformer(dataclasses.replace(config, scan_layers=scan), rngs=nnx.Rngs(0)) for scan in (False, True)
    )
    chex.assert_trees_all_close(stack_parameters(parameters(model), config), parameters(scanned), atol=1e-6)
    for layer in (0, 3, 6):
        expected = 0.8 - 0.6 * np.exp(-0.3 * layer)
        np.testing.assert_allclose(model.layers[layer].attention.lambda_init[...], expected, rtol=1e-6)
    logits = functional(scanned)(tokens())
    chex.assert_trees_all_close(functional(model)(tokens()), logits, atol=5e-6)
    changed = functional(scanned)(tokens().at[:, 6].add(1) % CONFIG.vocab_size)
    chex.assert_trees_all_equal(changed[:, :6], logits[:, :6])
    step, cache = functional(scanned, "decode"), scanned.init_cache(B, T)
    y, cache = step(tokens()[:, :10], cache)
    z, cache = step(tokens()[:, 10:], cache)
    chex.assert_trees_all_close(jnp.concatenate([y, z], axis=1), logits, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_decoding_in_chunks_equals_the_call(unrolled, logits, scan):
    model = Transformer(dataclasses.replace(CONFIG, scan_layers=scan), rngs=nnx.Rngs(0)) if scan else unrolled
    step, cache = functional(model, "decode"), model.init_cache(B, T)
    outputs, start = [], 0
    for size in (4, 1, 1, 4, 1):
        y, cache = step(tokens()[:, start : start + size], cache)
        outputs.append(y)
        start += size
    chex.assert_trees_all_close(jnp.concatenate(outputs, axis=1), logits, atol=1e-5)
    chex.assert_trees_all_equal(cache.lengths, jnp.full((B,), T, jnp.int32))
    with pytest.raises(ValueError, match="max_length=11"):
        model.decode(tokens()[:, :1], cache)
    y, after = step(tokens()[:, :1], cache)
    assert bool(jnp.isnan(y).all())
    chex.assert_trees_all_equal(after, cache)


def test_ragged_prompts_decode_as_if_alone(unrolled, logits):
    step = functional(unrolled, "decode")
    lengths = np.array([3, 4])
    ids = jnp.asarray(np.arange(4)[None] < lengths[:, None], jnp.int32)
    y, cache = step(tokens()[:, :4], unrolled.init_cache(B, T), None, ids)
    z, cache = step(jnp.stack([tokens()[row, n] for row, n in enumerate(lengths)])[:, None], cache)
    for row, n in enumerate(lengths):
        chex.assert_trees_all_close(y[row, :n], logits[row, :n], atol=1e-5)
        chex.assert_trees_all_close(z[row, 0], logits[row, n], atol=1e-5)


def test_the_future_is_not_seen(unrolled, logits):
    changed = tokens().at[:, 6].add(1) % CONFIG.vocab_size
    other = functional(unrolled)(changed)
    chex.assert_trees_all_equal(other[:, :6], logits[:, :6])
    assert bool((other[:, 6:] != logits[:, 6:]).any())


def test_packed_documents_equal_the_same_documents_alone(unrolled, logits):
    ids = jnp.asarray([[3] * 5 + [8] * 4 + [0] * 2, [1] * 7 + [2] * 4], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(4), 0, 0], [*range(7), *range(4)]], jnp.int32)
    call = functional(unrolled)
    packed = call(tokens(), positions, ids)
    shifted = jnp.zeros_like(tokens()).at[0, :4].set(tokens()[0, 5:9]).at[1, :4].set(tokens()[1, 7:])
    alone = call(shifted)
    chex.assert_trees_all_close(packed[0, :5], logits[0, :5], atol=1e-5)
    chex.assert_trees_all_close(packed[0, 5:9], alone[0, :4], atol=1e-5)
    chex.assert_trees_all_close(packed[1, 7:], alone[1, :4], atol=1e-5)


def test_every_parameter_names_its_axes(unrolled):
    scanned = jax.eval_shape(
        lambda key: nnx.state(Transformer(dataclasses.replace(CONFIG, scan_layers=True), rngs=key)), jax.random.key(0)
    )
    for state in (nnx.state(unrolled), scanned):
        for variable in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable)):
            (leaf,) = jax.tree.leaves(variable)
            assert len(variable.axes) == len(leaf.shape)


def count(config):
    state = jax.eval_shape(lambda key: nnx.state(Transformer(config, rngs=key)), jax.random.key(0))
    return sum(np.prod(leaf.shape, dtype=np.int64) for leaf in jax.tree.leaves(state))


def test_parameters_counted_by_hand():
    d, n, k, h, f, p, v = 10, 4, 2, 6, 14, 3, 37
    attention = d * n * h * 2 + d * k * h * 2 + 2 * h  # qkvo and the two norms of heads
    mixing = n * n * p + 2 * k * k * p + n * p
    assert count(CONFIG) == v * d + 5 * (attention + 3 * d * f + 2 * d) + 3 * mixing + d
    untied = dataclasses.replace(CONFIG, tied_embeddings=False, mlp="gelu", norm="layer", use_bias=True)
    biases = n * h + 2 * k * h + d + f + d
    assert count(untied) == 2 * v * d + 5 * (attention + 2 * d * f + 4 * d + biases) + 3 * mixing + 2 * d


def test_the_paper_s_model_has_2_37_billion_parameters():
    config = ModelConfig(
        vocab_size=128_256, max_length=8192, num_layers=26, model_dim=2560, num_heads=20, scan_layers=True
    )
    assert config.layer_kinds.count("iha") == 21
    assert config.layer_kinds[-1] == "iha"
    assert (config.iha_window, config.dim_per_head, config.hidden_dim) == (10, 128, 10_240)
    assert round(count(config) / 1e9, 2) == 2.37


def test_bfloat16_computes_in_bfloat16_and_answers_in_float32(logits):
    model = Transformer(dataclasses.replace(CONFIG, dtype="bfloat16"), rngs=nnx.Rngs(0))
    y = functional(model)(tokens())
    chex.assert_type(y, jnp.float32)
    chex.assert_trees_all_close(y, logits, atol=0.15)
    block = model.layers[0]
    chex.assert_type(block.attention_norm(jnp.ones((1, 1, 10), jnp.bfloat16)), jnp.bfloat16)
    chex.assert_type(model.init_cache(B, 3).layers[0].key, jnp.bfloat16)
    for leaf in jax.tree.leaves(parameters(model)):
        chex.assert_type(leaf, jnp.float32)


def test_dropout_needs_a_key_and_repeats_with_it(logits):
    model = Transformer(dataclasses.replace(CONFIG, dropout=0.5), rngs=nnx.Rngs(0))
    call = functional(model)
    chex.assert_trees_all_close(call(tokens()), logits, atol=1e-6)
    key = jax.random.key(7)
    dropped = call(tokens(), dropout_key=key)
    chex.assert_trees_all_equal(dropped, call(tokens(), dropout_key=key))
    assert bool((jnp.abs(dropped - call(tokens(), dropout_key=jax.random.key(8))) > 1e-3).any())


def test_logits_start_near_unit_variance_and_foreign_tokens_are_loud(unrolled):
    model = Transformer(
        ModelConfig(vocab_size=97, num_layers=2, model_dim=64, pattern=("mha",), mha=MHAConfig(window=4)),
        rngs=nnx.Rngs(0),
    )
    y = functional(model)(jnp.arange(97)[None])
    assert 0.8 < float(y.std()) < 1.25
    y = functional(unrolled)(tokens().at[1, 4].set(CONFIG.vocab_size))
    assert bool(jnp.isnan(y[1, 4]).all())
    assert bool(jnp.isfinite(y[0]).all())
