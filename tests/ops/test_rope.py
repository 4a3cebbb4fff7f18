"""Rotary embedding: exact phases, scaling rules, rotation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import LinearScaling, Llama3Scaling, Rope, YarnScaling
from iha_jax.ops.rope import apply_rope, rope_tables
from tests import oracle
from tests.ops.cases import naming

SCALINGS = [
    LinearScaling(4.0),
    Llama3Scaling(),
    Llama3Scaling(32.0, 1.0, 4.0, original_max_position=64),
    Llama3Scaling(4.0, 2.0, 3.0, original_max_position=1000),
    YarnScaling(4.0),
    YarnScaling(40.0, original_max_position=4096, beta_fast=16.0, beta_slow=2.0),
    YarnScaling(2.0, original_max_position=100, attention_factor=1.3),
]


def phase_errors(indices, theta, head_dim, dtype=np.float32):
    """Distance on the unit circle between the table's and the exact phases."""
    cos, sin = jax.jit(lambda i: rope_tables(i, Rope(theta=theta), head_dim, dtype=dtype))(np.int32(indices))
    chex.assert_shape([cos, sin], (len(indices), head_dim // 2))
    chex.assert_type([cos, sin], dtype)
    exact = np.array([[oracle.exact_phase(i, theta, pair, head_dim) for pair in range(head_dim // 2)] for i in indices])
    return np.hypot(np.asarray(cos, np.float64) - np.cos(exact), np.asarray(sin, np.float64) - np.sin(exact))


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 16), (500_000.0, 128)])
@pytest.mark.parametrize(("limit", "bound"), [(2**16, 1e-6), (2**24, 1e-5), (2**31, 1e-5)])
def test_phase_errors_are_within_the_contract(theta, head_dim, limit, bound):
    rng = np.random.default_rng(limit)
    indices = [0, 1, 17_999, limit - 1, *rng.integers(0, limit, 12).tolist(), -1, -limit]
    assert phase_errors(indices, theta, head_dim).max() <= bound


@pytest.mark.usefixtures("x64")
def test_float64_phases_are_good_to_a_billionth():
    assert phase_errors([0, 1, 2**16 - 1, 2**24 - 1, 20_000_019, -5], 500_000.0, 16, np.float64).max() <= 2e-9


def test_index_zero_is_exactly_no_rotation():
    cos, sin = rope_tables(np.zeros(1, np.int32), Rope(), 8)
    chex.assert_trees_all_equal((cos, sin), (np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("positions", ["virtual", "token"])
def test_scaled_frequencies_match_the_oracles(scaling, positions):
    rope, pseudo = Rope(theta=10_000.0, positions=positions, scaling=scaling), 5
    frequencies, factor = rope.frequencies(64, pseudo)
    expected, expected_factor = oracle.rope_frequencies(rope, 64, pseudo)
    np.testing.assert_allclose(frequencies, expected.astype(np.float64), rtol=1e-13)
    assert factor == pytest.approx(expected_factor, rel=1e-15)
    # And the tables are made from them.
    index = np.array([0, 3, 12_345], np.int32)
    cos, sin = rope_tables(index, rope, 64, pseudo)
    angle = (index[:, None] * expected).astype(np.float64)
    chex.assert_trees_all_close((cos, sin), (np.cos(angle) * factor, np.sin(angle) * factor), atol=2e-6)


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0), YarnScaling(8.0)])
def test_scaling_keeps_fast_pairs_and_stretches_slow_ones(scaling):
    plain, _ = Rope().frequencies(128, 4)
    scaled, _ = Rope(scaling=scaling).frequencies(128, 4)
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
    ratio = scaled / plain
    assert (np.diff(ratio) <= 1e-15).all(), "the stretch must grow from pair to pair"
    assert ((ratio > 0.126) & (ratio < 0.999)).any(), "some pairs lie between"


@pytest.mark.parametrize("kind", [Llama3Scaling, YarnScaling])
def test_scaling_lengths_count_tokens(kind):
    """Over L tokens virtual positions run through L*P indices."""
    virtual, _ = Rope(scaling=kind(8.0, original_max_position=100)).frequencies(32, 7)
    token, _ = Rope(positions="token", scaling=kind(8.0, original_max_position=700)).frequencies(32, 7)
    np.testing.assert_array_equal(virtual, token)


def test_yarns_attention_factor_can_be_left_out_of_the_tables():
    rope, index = Rope(scaling=YarnScaling(8.0)), np.array([11], np.int32)
    with_factor = rope_tables(index, rope, 16)
    without = rope_tables(index, rope, 16, with_factor=False)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x * np.float32(0.1 * np.log(8.0) + 1), without), with_factor)
    np.testing.assert_allclose(without[0] ** 2 + without[1] ** 2, 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_turns_pairs_half_a_head_apart(dtype):
    x = np.random.default_rng(0).normal(size=(3, 5, 6)).astype(dtype)
    angle = np.random.default_rng(1).uniform(-3, 3, (3, 1, 3))
    out = apply_rope(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle))
    assert out.dtype == x.dtype
    exact = x.astype(np.float64)
    turned = (exact[..., :3] + 1j * exact[..., 3:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], -1)
    # bfloat16 is rounded once, at the end: half a unit in the last of its 8 bits.
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "essentials"),
    [
        (lambda: Rope(theta=1.0), ["theta > 1", "1.0"]),
        (lambda: Rope(positions="tokens"), ["virtual", "token", "'tokens'"]),
        (lambda: Rope().frequencies(7, 1), ["even", "H=7"]),
        (lambda: rope_tables(np.zeros(1, np.int32), Rope(), 7), ["even", "H=7"]),
        (lambda: LinearScaling(0.0), ["factor > 0", "0.0"]),
        (lambda: Llama3Scaling(original_max_position=0), ["original_max_position > 0", "0"]),
        (lambda: Llama3Scaling(low_freq_factor=4.0, high_freq_factor=4.0), ["high_freq_factor=4.0", "low_freq_factor"]),
        (lambda: YarnScaling(2.0, beta_fast=1.0, beta_slow=2.0), ["beta_fast=1.0", "beta_slow=2.0"]),
        (lambda: YarnScaling(-1.0), ["factor > 0", "-1.0"]),
    ],
)
def test_wrong_parameters_say_what_is_wrong(make, essentials):
    with pytest.raises(ValueError, match=naming(*essentials)):
        make()
