"""Differential attention (arXiv 2410.05258): the difference of two softmax maps, so that common noise cancels."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax.nn.between_heads import MapDifference
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.norms import RMSNorm
from iha_jax.nn.parameters import parameter, split_keys

_LAMBDAS = ("lambda_query_1", "lambda_key_1", "lambda_query_2", "lambda_key_2")


def initial_lambda(depth: int | Int[Array, ""]) -> Float[Array, ""]:
    """The paper's λ_init of a layer: ``0.8 - 0.6 exp(-0.3 depth)``, 0.2 in the first, towards 0.8.

    Args:
      depth: of the layer, counted from 0 (the paper counts from 1 and writes ``depth - 1``).
    """
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(depth, jnp.float32))


class DifferentialAttention(MultiHeadAttention):
    """Attention whose every head subtracts a second map from its first.

    The query and key of a head are two vectors side by side, d = ``head_dim // 2`` each; its value is whole:

        λ      = exp(lambda_query_1 · lambda_key_1) - exp(lambda_query_2 · lambda_key_2) + λ_init
        o[h]   = (softmax(q1 k1ᵀ / √d) - λ softmax(q2 k2ᵀ / √d)) v
        out    = (1 - λ_init) · RMSNorm(o[h]) for every head, then the output projection

    With the same arguments it has `MultiHeadAttention`'s projections, FLOPs and cache. The paper halves the number of
    heads instead: for a Transformer of N heads of H it takes ``num_heads=N // 2, head_dim=2 * H`` (d = H), and so do
    the decoder's layers of kind ``"differential"``.

    Conventions, where they could differ: λ is one number a layer, learned through four vectors [d] drawn with
    standard deviation 0.1; the norm has epsilon 1e-5 and one scale [2d] for all heads; RoPE and the norms of
    `normalize_qk` act on each of the two vectors; map i of a query head reads map i of its key/value head, also where
    several query heads share one.

    ``lambda_init`` is stored among the parameters, so that each of several scanned layers can have its own; no
    gradient reaches it.
    """

    num_maps = 2

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        depth: int | Int[Array, ""] = 0,
        lambda_init: float | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | Array,
        **options: Any,
    ):
        """Makes the parameters.

        Args:
          num_heads: N, heads of two maps each.
          in_features: D.
          depth: number of the layer, from 0; sets λ_init.
          lambda_init: λ_init itself, in [0, 1), instead.
          param_dtype: of the parameters.
          rngs: a ``params`` stream, or a key.
          **options: every other option of `MultiHeadAttention`; ``head_dim``, default ``D / N``, must be even, and a
            multiple of 4 with RoPE.

        Raises:
          ValueError: for options that contradict each other; both values are named.
        """
        if lambda_init is not None and not 0.0 <= lambda_init < 1.0:
            raise ValueError(f"DifferentialAttention: lambda_init must be in [0, 1) or None, got {lambda_init}.")
        if isinstance(depth, int) and depth < 0:
            raise ValueError(f"DifferentialAttention: depth must be >= 0, got {depth}.")
        keys = split_keys(rngs, "attention", *_LAMBDAS)
        super().__init__(num_heads, in_features, param_dtype=param_dtype, rngs=keys["attention"], **options)
        normal = nnx.initializers.normal(0.1)

        def vector(name: str) -> nnx.Param:
            return parameter(normal(keys[name], (self.head_dim // 2,), param_dtype), ("head_dim",))

        self.lambda_query_1, self.lambda_key_1, self.lambda_query_2, self.lambda_key_2 = map(vector, _LAMBDAS)
        start = initial_lambda(depth) if lambda_init is None else jnp.asarray(lambda_init)
        self.lambda_init = parameter(start.astype(param_dtype), ())
        self.head_norm = RMSNorm(self.head_dim, epsilon=1e-5, param_dtype=param_dtype, axis="head_dim")

    @property
    def factor(self) -> Float[Array, ""]:
        """λ, float32."""
        vectors = (getattr(self, name)[...].astype(jnp.float32) for name in _LAMBDAS)
        query_1, key_1, query_2, key_2 = vectors
        return jnp.exp(jnp.sum(query_1 * key_1)) - jnp.exp(jnp.sum(query_2 * key_2)) + self._start()

    def _start(self) -> Float[Array, ""]:
        return jax.lax.stop_gradient(self.lambda_init[...]).astype(jnp.float32)

    def _between(self) -> MapDifference:
        return MapDifference(self.factor)

    def _output(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T Do"]:
        return super()._output(self.head_norm(heads) * (1 - self._start()).astype(heads.dtype))
