"""Initialisation: MHA's size, gradients that are there and differ over pseudo-heads, and exact starts."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, Rope
from iha_jax.nn.init import collapse_gain, copy_with_noise

TENSORS = ("mixing_query", "mixing_key", "mixing_value", "collapse")
ROPES = {"virtual": Rope(), "token": Rope(positions="token"), "none": None}
# Every causality with every RoPE and window; P and the collapse take turns, so that each meets each.
GRID = [
    (causal, rope, window, (2, 4, 8)[i % 3], ("per_head", "across_heads")[i % 2])
    for i, (causal, rope, window) in enumerate(itertools.product(("virtual", "token", None), ROPES, (None, 3)))
] + [("virtual", "virtual", 1, 4, "per_head"), ("virtual", "none", 2, 8, "across_heads")]


def pair(options, seed=0, features=32, heads=4):
    """An IHA layer and the MHA layer with the same base weights, causality and window."""
    iha = InterleavedHeadAttention(heads, features, **options, rngs=nnx.Rngs(seed))
    rope = None if iha.rope is None else Rope(theta=iha.rope.theta, positions="token")
    mha = MultiHeadAttention(
        heads,
        features,
        num_kv_heads=iha.num_kv_heads,
        causal=iha.causal is not None,
        window=iha.window,
        rope=rope,
        rngs=nnx.Rngs(9),
    )
    for name in ("query_kernel", "key_kernel", "value_kernel", "out_kernel"):
        setattr(mha, name, getattr(iha, name))
    return iha, mha


def mixing_gradients(layer, x, key=5):
    graph, state = nnx.split(layer)

    def loss(state):
        y = nnx.merge(graph, state)(x)
        return jnp.vdot(y, jax.random.normal(jax.random.key(key), y.shape))

    gradients = nnx.to_pure_dict(jax.grad(loss)(state))
    return {name: np.asarray(gradients[name]) for name in TENSORS}


def spread(gradient):
    """How far the gradients of the pseudo-heads lie from their mean, relative to their size."""
    return np.linalg.norm(gradient - gradient.mean(-1, keepdims=True)) / np.linalg.norm(gradient)


@pytest.mark.parametrize(("causal", "rope", "window", "pseudo", "collapse"), GRID)
def test_the_default_lives_at_mha_s_size(causal, rope, window, pseudo, collapse):
    iha, mha = pair(
        {
            "num_pseudo_heads": pseudo,
            "causal": causal,
            "rope": ROPES[rope],
            "window": window,
            "collapse": collapse,
            # Eager and materialised: 40 cases share the compiled pieces.
            "implementation": "reference",
        }
    )
    x = jax.random.normal(jax.random.key(1), (4, 24, 32))
    rms = [float(jnp.sqrt(jnp.mean(jnp.square(layer(x))))) for layer in (iha, mha)]
    assert 0.9 < rms[0] / rms[1] < 1.1
    gradients = mixing_gradients(iha, x)
    sizes = {name: np.linalg.norm(g.reshape(-1, pseudo), axis=0) for name, g in gradients.items()}
    for name, gradient in gradients.items():
        # Every pseudo-head gets a fair share of the gradient, and no two get the same one.
        assert sizes[name].min() > 0.05 * sizes[name].max(), name
        assert spread(gradient) > 0.01, name
        for a, b in itertools.combinations(range(pseudo), 2):
            assert np.linalg.norm(gradient[..., a] - gradient[..., b]) > 0.005 * sizes[name].max(), name


# (A window of one token, where MHA's weight is always 1, has no gradient for queries to start from.)
EXACT = [
    ("virtual", "token", None, None),
    ("virtual", "token", 3, 2),
    ("virtual", "none", 2, 1),
    ("token", "token", 3, 2),
    ("token", "none", None, 4),
    (None, "token", 3, 2),
]


@pytest.mark.parametrize(("causal", "rope", "window", "kv_heads"), EXACT)
def test_the_exact_start_is_mha_and_comes_alive(causal, rope, window, kv_heads):
    collapse = "across_heads" if window == 3 else "per_head"
    iha, mha = pair(
        {
            "num_pseudo_heads": 3,
            "num_kv_heads": kv_heads,
            "causal": causal,
            "rope": ROPES[rope],
            "window": window,
            "collapse": collapse,
            "mixing_init": "exact",
            "implementation": "reference",
        }
    )
    x = jax.random.normal(jax.random.key(1), (2, 13, 32))
    chex.assert_trees_all_close(iha(x), mha(x), atol=1e-5)
    first = mixing_gradients(iha, x)
    for name in TENSORS:
        assert np.abs(first[name]).max() > 1e-3, name
    assert spread(first["mixing_key"]) > 0.01
    assert spread(first["collapse"]) > 0.01
    for name in TENSORS:
        variable = getattr(iha, name)
        setattr(iha, name, nnx.Param(variable[...] - 0.01 * np.sign(first[name]), axes=variable.axes))
    second = mixing_gradients(iha, x, key=6)
    for name in TENSORS:
        assert np.linalg.norm(second[name].reshape(-1, 3), axis=0).min() > 1e-3, name
        assert spread(second[name]) > 0.003, name


@pytest.mark.parametrize(("causal", "init"), [("token", "live"), ("virtual", "live"), ("token", "exact")])
def test_pseudo_heads_differ_after_fifty_steps(causal, init):
    """Without RoPE and with a per-head collapse plain copies would stay equal for ever."""
    layer = InterleavedHeadAttention(
        2, 16, num_pseudo_heads=3, causal=causal, rope=None, mixing_init=init, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (8, 12, 16))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0)

    def loss(state):
        return jnp.mean(jnp.square(nnx.merge(graph, state)(x) - target))

    optimizer = optax.adam(1e-2)
    before = nnx.to_pure_dict(state)

    @jax.jit
    def train(state):
        def step(carry, _):
            state, moments = carry
            value, gradients = jax.value_and_grad(loss)(state)
            updates, moments = optimizer.update(gradients, moments, state)
            return (optax.apply_updates(state, updates), moments), value

        return jax.lax.scan(step, (state, optimizer.init(state)), length=50)

    (state, _), losses = train(state)
    assert losses[-1] < losses[0]
    after = nnx.to_pure_dict(state)
    for name in TENSORS:
        change = np.asarray(after[name] - before[name])
        assert spread(change) > 0.05, name
        assert spread(np.asarray(after[name])) > 0.02, name


def test_noise_is_centred_and_as_large_as_stated():
    mixing = copy_with_noise(jax.random.key(0), (64, 64, 4), jnp.float32, noise=0.2)
    noise = np.asarray(mixing) - np.eye(64)[:, :, None]
    np.testing.assert_allclose(noise.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(noise, axis=0).mean(), 0.2, rtol=0.03)
    chex.assert_trees_all_equal(copy_with_noise(jax.random.key(0), (3, 3, 1), jnp.float32)[..., 0], jnp.eye(3))


def test_gain_is_one_where_nothing_differs():
    assert collapse_gain(1, 8, "virtual", 1, Rope()) == 1.0
    np.testing.assert_allclose(collapse_gain(4, 8, "token", None, None, noise=1e-6), 1.0, atol=1e-6)


def test_gain_restores_what_a_short_window_blurs():
    """A window of one token: pseudo-query p sees p + 1 copies of its token and 3 - p of the one before; MHA one."""
    own, before = np.exp(np.random.default_rng(0).normal(size=(2, 20_000, 1)))
    p = np.arange(4)
    weight = ((p + 1) * own / ((p + 1) * own + (3 - p) * before)).mean(axis=1)
    rms = np.sqrt(np.mean(weight**2 + (1 - weight) ** 2))
    np.testing.assert_allclose(collapse_gain(4, 8, "virtual", 1, None, noise=1e-6), 1 / rms, rtol=0.08)
