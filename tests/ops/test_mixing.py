"""Mixing tensors, mixing, interleaving and collapse, each against loops over its definition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import HeadMixing
from iha_jax.ops.mixing import collapse, interleave, mix
from tests.ops.cases import naming

# Distinct primes: no two axes can be confused.
B, T, N, P, H = 2, 3, 5, 7, 11


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_mix_is_the_sum_over_source_heads():
    x, weights = random(B, T, N, H), random(N, N, P, seed=1)
    expected = np.zeros((B, T, N, P, H))
    for m in range(N):
        for h in range(N):
            for p in range(P):
                expected[:, :, h, p] += np.float64(weights[m, h, p]) * x[:, :, m]
    chex.assert_trees_all_close(np.asarray(mix(x, weights, "highest"), np.float64), expected, atol=1e-5)


def test_mix_serves_more_heads_out_than_in():
    """A tensor-parallel shard mixes all source heads into its own."""
    x, weights = random(T, 2, H), random(2, N, P, seed=1)
    chex.assert_shape(mix(x, weights), (T, N, P, H))
    chex.assert_trees_all_close(mix(x, weights)[:, 3:], mix(x, weights[:, 3:]), atol=1e-6)


def test_mix_accumulates_bfloat16_in_float32():
    """256 + 1 - 256: bfloat16 sums lose the 1, float32 sums keep it."""
    x = jnp.asarray([256.0, 1.0, -256.0], jnp.bfloat16).reshape(1, 3, 1)
    out = mix(x, jnp.ones((3, 3, 1), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(out, jnp.ones((1, 3, 1, 1), jnp.bfloat16))


def test_virtual_index_is_token_times_p_plus_pseudo_head():
    x = random(B, T, N, P, H)
    out = np.asarray(interleave(x))
    chex.assert_shape(out, (B, T * P, N, H))
    for t in range(T):
        for p in range(P):
            np.testing.assert_array_equal(out[:, t * P + p], x[:, t, :, p])


@pytest.mark.parametrize("across_heads", [False, True])
def test_collapse_is_the_sum_over_pseudo_heads(across_heads):
    x = random(B, T, N, P, H)
    weights = random(N, N, P, seed=1) if across_heads else random(N, P, seed=1)
    expected = np.zeros((B, T, N, H))
    for h in range(N):
        for p in range(P):
            if across_heads:
                for g in range(N):
                    expected[:, :, h] += np.float64(weights[h, g, p]) * x[:, :, g, p]
            else:
                expected[:, :, h] += np.float64(weights[h, p]) * x[:, :, h, p]
    out = collapse(interleave(x), weights, "highest")
    chex.assert_trees_all_close(np.asarray(out, np.float64), expected, atol=1e-5)


def test_collapse_keeps_float32_for_bfloat16_values():
    out = collapse(jnp.ones((P, N, H), jnp.bfloat16), jnp.full((N, P), 1 / 3, jnp.float32))
    assert out.dtype == jnp.float32
    chex.assert_trees_all_close(out, jnp.full((1, N, H), P / 3), rtol=1e-6)


@pytest.mark.parametrize("kind", ["per_head", "across_heads"])
@pytest.mark.parametrize("select", ["last", "first", "mean"])
def test_copies_pass_heads_through(kind, select):
    mixing = HeadMixing.copy(6, P, 3, kind, select)
    chex.assert_shape([mixing.query, mixing.key, mixing.value], [(6, 6, P), (3, 3, P), (3, 3, P)])
    chex.assert_shape(mixing.collapse, (6, P) if kind == "per_head" else (6, 6, P))
    assert (mixing.num_heads, mixing.num_kv_heads, mixing.num_pseudo_heads) == (6, 3, P)
    x = random(B, T, 6, H)
    copies = mix(x, mixing.query)
    chex.assert_trees_all_equal(copies, np.broadcast_to(x[:, :, :, None], copies.shape))
    # Weigh each pseudo-head differently to see which one the collapse takes.
    weighed = np.asarray(copies) * np.arange(P, dtype=np.float32)[:, None]
    taken = {"last": P - 1, "first": 0, "mean": (P - 1) / 2}[select]
    chex.assert_trees_all_close(collapse(interleave(weighed), mixing.collapse), x * np.float32(taken), rtol=1e-5)


def test_copy_defaults_and_dtype():
    mixing = HeadMixing.copy(N, P, dtype=jnp.bfloat16)
    chex.assert_tree_all_finite(mixing)
    assert {x.dtype for x in jax.tree.leaves(mixing)} == {jnp.dtype("bfloat16")}
    chex.assert_trees_all_equal(mixing, HeadMixing.copy(N, P, N, "per_head", "last", jnp.bfloat16))


def test_head_mixing_is_a_pytree():
    mixing = HeadMixing.copy(N, P)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mixing)]
    assert names == [".query", ".key", ".value", ".collapse"]
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(mixing)
    assert isinstance(doubled, HeadMixing)
    chex.assert_trees_all_equal(doubled.collapse, 2 * mixing.collapse)
    gradient = jax.grad(lambda m: (m.query**2).sum())(mixing)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, mixing)


@pytest.mark.parametrize(
    ("arguments", "essentials"),
    [
        ((0, 2), ["num_heads", "0"]),
        ((2, 0), ["num_pseudo_heads", "0"]),
        ((6, 2, 4), ["num_kv_heads=4", "num_heads=6"]),
        ((6, 2, 0), ["num_kv_heads", "0"]),
        ((2, 2, None, "per_heads"), ["per_head", "across_heads", "'per_heads'"]),
        ((2, 2, None, "per_head", "middle"), ["last", "first", "mean", "'middle'"]),
    ],
)
def test_wrong_copies_say_what_is_wrong(arguments, essentials):
    with pytest.raises(ValueError, match=naming(*essentials)):
        HeadMixing.copy(*arguments)
