"""Flax Linen counterparts of the attention layers, through `flax.nnx.bridge`.

    from iha_jax.nn import linen as iha_linen

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + iha_linen.InterleavedHeadAttention(8, 256, window=32, name="attention")(x)

The parameters have the NNX layers' names and shapes. Caches work as there:

    layer = iha_linen.InterleavedHeadAttention(8, 256)
    variables = layer.init(jax.random.key(0), x)
    cache = layer.apply(variables, 2, 128, nnx_method="init_cache")
    y, cache = layer.apply(variables, x, cache, nnx_method="decode")
"""

from typing import Any

from flax import linen, nnx
from jaxtyping import Array

from iha_jax.nn.attention import InterleavedHeadAttention as _InterleavedHeadAttention
from iha_jax.nn.differential import DifferentialAttention as _DifferentialAttention
from iha_jax.nn.multi_head import MultiHeadAttention as _MultiHeadAttention
from iha_jax.nn.simplicial import SimplicialAttention as _SimplicialAttention
from iha_jax.nn.talking_heads import TalkingHeadsAttention as _TalkingHeadsAttention


def InterleavedHeadAttention(
    num_heads: int, in_features: int, *, partitioned: bool = False, name: str | None = None, **options: Any
) -> nnx.bridge.ToLinen:
    """A Linen module of `iha_jax.InterleavedHeadAttention`.

    Args:
      num_heads: N.
      in_features: D.
      partitioned: whether parameters come boxed with their logical axis names, as `flax.linen.LogicallyPartitioned`.
      name: of the Linen module.
      **options: every other option of the NNX layer, but for ``rngs``.
    """
    return _to_linen(_InterleavedHeadAttention, num_heads, in_features, partitioned, name, options)


def MultiHeadAttention(
    num_heads: int, in_features: int, *, partitioned: bool = False, name: str | None = None, **options: Any
) -> nnx.bridge.ToLinen:
    """A Linen module of `iha_jax.MultiHeadAttention`; arguments as in `InterleavedHeadAttention`."""
    return _to_linen(_MultiHeadAttention, num_heads, in_features, partitioned, name, options)


def TalkingHeadsAttention(
    num_heads: int, in_features: int, *, partitioned: bool = False, name: str | None = None, **options: Any
) -> nnx.bridge.ToLinen:
    """A Linen module of `iha_jax.nn.TalkingHeadsAttention`; arguments as in `InterleavedHeadAttention`."""
    return _to_linen(_TalkingHeadsAttention, num_heads, in_features, partitioned, name, options)


def DifferentialAttention(
    num_heads: int, in_features: int, *, partitioned: bool = False, name: str | None = None, **options: Any
) -> nnx.bridge.ToLinen:
    """A Linen module of `iha_jax.nn.DifferentialAttention`; arguments as in `InterleavedHeadAttention`."""
    return _to_linen(_DifferentialAttention, num_heads, in_features, partitioned, name, options)


def SimplicialAttention(
    num_heads: int, in_features: int, *, partitioned: bool = False, name: str | None = None, **options: Any
) -> nnx.bridge.ToLinen:
    """A Linen module of `iha_jax.nn.SimplicialAttention`; arguments as in `InterleavedHeadAttention`."""
    return _to_linen(_SimplicialAttention, num_heads, in_features, partitioned, name, options)


def _to_linen(
    layer: type[nnx.Module], num_heads: int, in_features: int, partitioned: bool, name: str | None, options: dict
) -> nnx.bridge.ToLinen:
    if "rngs" in options:
        raise ValueError("rngs: a Linen module draws its parameters from the keys given to init.")
    return nnx.bridge.to_linen(
        layer, num_heads, in_features, metadata_fn=_boxed if partitioned else _plain, name=name, **options
    )


def _plain(variable: nnx.Variable) -> Array:
    return variable[...]


def _boxed(variable: nnx.Variable) -> linen.LogicallyPartitioned:
    return linen.LogicallyPartitioned(variable[...], names=variable.axes)
