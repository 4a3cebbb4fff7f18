"""The operation under jax's transformations, in float64, and over sharded inputs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from iha_jax import HeadMixing, Rope, YarnScaling, interleaved_head_attention
from tests import oracle
from tests.ops.cases import IMPLEMENTATIONS, QUICK

jit = functools.partial(jax.jit, compiler_options=QUICK)

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

B, T, N, K, H, P = 2, 12, 4, 2, 8, 3


def inputs(seed=0, dtype=np.float32, *, k=K, across_heads=False):
    """Random query, key, value and mixing tensors, as a tuple of arrays."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    collapse = draw(N, N, P) / N**0.5 if across_heads else draw(N, P)
    mixing = draw(N, N, P) / N**0.5, draw(k, k, P) / k**0.5, draw(k, k, P) / k**0.5, collapse
    return draw(B, T, N, H), draw(B, T, k, H), draw(B, T, k, H), *(m.astype(dtype) for m in mixing)


def operation(implementation, **options):
    options = {"window": 4, "rope": Rope(), "precision": "highest", **options}

    def call(query, key, value, *mixing):
        return interleaved_head_attention(
            query, key, value, HeadMixing(*mixing), implementation=implementation, **options
        )

    return call


@pytest.mark.parametrize("causal", ["virtual", None])
@pytest.mark.usefixtures("x64")
def test_float64_is_computed_in_float64(implementation, causal):
    rope = Rope(theta=1e4, scaling=YarnScaling(4.0, 128))
    arrays = inputs(dtype=np.float64)
    out = jit(operation(implementation, causal=causal, rope=rope))(*arrays)
    assert out.dtype == jnp.float64
    # RoPE's phases are kept to 2**-32 of a turn; everything else to float64's rounding.
    expected = oracle.attention(*arrays, causal=causal, window=4, rope=rope)
    chex.assert_trees_all_close(np.asarray(out), expected, atol=1e-7, rtol=0)
    out = jit(operation(implementation, causal=causal, rope=None))(*arrays)
    expected = oracle.attention(*arrays, causal=causal, window=4)
    chex.assert_trees_all_close(np.asarray(out), expected, atol=1e-12, rtol=0)


def test_vmap_is_a_loop(implementation):
    """Over everything, mixing tensors included: an ensemble of layers."""
    call = operation(implementation)
    stacked = [np.stack(pair) for pair in zip(inputs(1), inputs(2), strict=True)]
    looped = jnp.stack([jit(call)(*(x[i] for x in stacked)) for i in range(2)])
    chex.assert_trees_all_close(jit(jax.vmap(call))(*stacked), looped, atol=1e-5)


@pytest.mark.parametrize(
    ("causal", "rope", "across_heads"), [("virtual", Rope(), False), ("token", Rope(positions="token"), True)]
)
@pytest.mark.usefixtures("x64")
def test_forward_reverse_and_second_derivatives_agree(implementation, causal, rope, across_heads):
    """In float64, so that differences of the oracle and of the gradients are sharp witnesses."""
    call = operation(implementation, causal=causal, rope=rope)
    arrays = inputs(3, np.float64, across_heads=across_heads)
    rng = np.random.default_rng(4)
    directions = tuple(rng.normal(size=x.shape) / x.size**0.5 for x in arrays)
    cotangent = rng.normal(size=arrays[0].shape)

    def loss(*arrays):
        return jnp.sum(jnp.sin(call(*arrays)) * cotangent)

    def shifted(by):
        return tuple(x + by * d for x, d in zip(arrays, directions, strict=True))

    def along(gradients):
        return sum(jnp.vdot(g, d) for g, d in zip(gradients, directions, strict=True))

    gradient = jit(jax.grad(loss, argnums=range(7)))
    _, forward = jit(lambda x, d: jax.jvp(loss, x, d))(arrays, directions)
    exact = lambda x: np.sum(np.sin(oracle.attention(*x, causal=causal, window=4, rope=rope)) * cotangent)  # noqa: E731
    step = 1e-5
    # The oracle's phases are exact and the operation's good to 1e-9: first differences agree to that.
    first = (exact(shifted(step)) - exact(shifted(-step))) / (2 * step)
    np.testing.assert_allclose(forward, first, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(along(gradient(*arrays)), forward, rtol=1e-9)

    second = (along(gradient(*shifted(step))) - along(gradient(*shifted(-step)))) / (2 * step)
    assert abs(second) > 1e-3
    forward_over_reverse = jit(lambda x, d: along(jax.jvp(jax.grad(loss, argnums=range(7)), x, d)[1]))
    np.testing.assert_allclose(forward_over_reverse(arrays, directions), second, rtol=1e-6)
    reverse_over_forward = jit(
        jax.grad(
            lambda by: jax.jvp(loss, tuple(x + by * d for x, d in zip(arrays, directions, strict=True)), directions)[1]
        )
    )
    np.testing.assert_allclose(reverse_over_forward(0.0), second, rtol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec("data", None, "model")],
    ids=["batch", "sequence", "batch and heads"],
)
@pytest.mark.parametrize("window", [None, 3])
def test_sharded_inputs_under_an_automatic_mesh_give_the_same_values(implementation, spec, window):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    arrays = inputs(k=N)

    @jit
    def output_and_gradients(*arrays):
        call = operation(implementation, window=window)
        out, pull = jax.vjp(call, *arrays)
        return out, pull(jnp.cos(out))

    plain = output_and_gradients(*arrays)
    places = [NamedSharding(mesh, spec)] * 3 + [NamedSharding(mesh, PartitionSpec())] * 4
    placed = [jax.device_put(x, place) for x, place in zip(arrays, places, strict=True)]
    assert len(placed[0].sharding.device_set) == 8
    sharded = output_and_gradients(*placed)
    assert len(sharded[0].sharding.device_set) == 8
    chex.assert_trees_all_close(jax.device_get(sharded), jax.device_get(plain), atol=2e-5)
