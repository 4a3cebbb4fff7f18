"""Normalisations that state their dtype: statistics in float32, the result in the dtype of the input or as told."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from iha_jax.nn.parameters import parameter, require_positive


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale`` over the last axis.

    `flax.nnx.RMSNorm` returns float32 for bfloat16 input unless told its dtype; this one keeps the input's.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        axis: str = "norm",
    ):
        """Makes the scale, ones ``[num_features]``.

        Args:
          num_features: size of the last axis.
          epsilon: added to the mean square.
          dtype: of the result, default the input's.
          param_dtype: of the scale.
          axis: the scale's logical axis name.
        """
        require_positive("RMSNorm", num_features=num_features)
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = parameter(jnp.ones((num_features,), param_dtype), (axis,))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        compute = jnp.promote_types(x.dtype, jnp.float32)
        y = x.astype(compute)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * _rows(self.scale[...], y)
        return y.astype(x.dtype if self.dtype is None else self.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * scale + bias`` over the last axis."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        axis: str = "norm",
    ):
        """Makes scale (ones) and bias (zeros), ``[num_features]``; arguments as in `RMSNorm`."""
        require_positive("LayerNorm", num_features=num_features)
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = parameter(jnp.ones((num_features,), param_dtype), (axis,))
        self.bias = parameter(jnp.zeros((num_features,), param_dtype), (axis,))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        compute = jnp.promote_types(x.dtype, jnp.float32)
        y = x.astype(compute)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * _rows(self.scale[...], y) + _rows(self.bias[...], y)
        return y.astype(x.dtype if self.dtype is None else self.dtype)


def _rows(vector: Array, like: Array) -> Array:
    """A vector with the rank and dtype of `like`: ranks are promoted by hand, never silently."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)
