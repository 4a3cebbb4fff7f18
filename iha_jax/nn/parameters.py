"""How parameters are made: with a dtype, a fan-in that is right, and logical axis names."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike

from iha_jax.sharding import LogicalAxes

Initializer = Callable[..., Array]
"""``(key, shape, dtype) -> Array``, as in `jax.nn.initializers`."""

default_kernel_init: Initializer = nnx.initializers.lecun_normal()
default_bias_init: Initializer = nnx.initializers.zeros_init()


def parameter(value: Array, axes: LogicalAxes) -> nnx.Param:
    """A parameter with one logical axis name per array axis, under the metadata key ``axes``.

    The key is our own: flax's ``sharding`` keys changed meaning between the versions we support and want a mesh.

    Raises:
      ValueError: if names and axes differ in number.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"a parameter of shape {value.shape} needs {value.ndim} axis names, got {axes}.")
    return nnx.Param(value, axes=axes)


def kernel(
    key: Array,
    init: Initializer,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: DTypeLike,
) -> nnx.Param:
    """A projection ``[*in_shape, *out_shape]``, initialised as the matrix it is.

    Initialisers read fan-in from the last two axes, which would be wrong for ``[D, N, H]``; so the matrix
    ``[prod(in), prod(out)]`` is drawn and reshaped.
    """
    matrix = init(key, (math.prod(in_shape), math.prod(out_shape)), dtype)
    return parameter(matrix.reshape(*in_shape, *out_shape), axes)


def compute_dtype(dtype: DTypeLike | None, *arrays: Array) -> jnp.dtype:
    """The dtype a layer computes in: the given one, else what inputs and parameters promote to."""
    return jnp.dtype(dtype) if dtype is not None else jnp.result_type(*arrays)


def require_positive(what: str, **sizes: int) -> None:
    """Raises ValueError naming the first size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what} needs a whole number {name} >= 1, got {name}={size!r}.")


def scaled(init: Initializer, factor: float) -> Initializer:
    """The same initialiser times a factor."""

    def scaled_init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return init(key, shape, dtype) * jnp.asarray(factor, dtype)

    return scaled_init


def split_keys(rngs: nnx.Rngs | Array, *names: str) -> dict[str, Array]:
    """One key per name, from the ``params`` stream of `nnx.Rngs`."""
    key = rngs if isinstance(rngs, jax.Array) else rngs.params()
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))
