"""Plain multi-head attention with the same options: the baseline, and the global layers of the paper's model."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax.nn.between_heads import BetweenHeads
from iha_jax.nn.dot_product import dot_product_attention
from iha_jax.nn.parameters import Initializer, default_bias_init, default_kernel_init
from iha_jax.nn.projections import AttentionProjections
from iha_jax.ops.rope import Rope, apply_rope, rope_tables


class MultiHeadAttention(AttentionProjections):
    """Multi-head attention with grouped queries, RoPE, windows, packing, cross attention and a cache.

    The options are those of `InterleavedHeadAttention` as far as they apply, and so are the calls. Rotary positions
    are tokens: with one pseudo-head, ``Rope.positions`` makes no difference.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        context_features: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rope: Rope | None = Rope(positions="token"),
        normalize_qk: bool = False,
        use_bias: bool = False,
        use_output_bias: bool | None = None,
        logits_soft_cap: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs | Array,
    ):
        """Makes the parameters; see `InterleavedHeadAttention` for the arguments.

        Args:
          num_heads: N.
          in_features: D.
          num_kv_heads: K, default N; must divide N.
          head_dim: H, default ``D / N``.
          out_features: default D.
          context_features: default D.
          causal: whether a token sees only itself and earlier ones.
          window: W in tokens: distances below W are seen, or None.
          rope: rotary embedding on token positions, or None.
          normalize_qk: root-mean-square normalisation of queries and keys, before RoPE.
          use_bias: of query, key and value projections.
          use_output_bias: default as `use_bias`.
          logits_soft_cap: c in ``c * tanh(logits / c)``, or None.
          dtype: of the computation, default what input and parameters promote to.
          param_dtype: of the parameters.
          precision: of every contraction.
          kernel_init: of the projections.
          out_kernel_init: of the output projection, default `kernel_init`.
          bias_init: of the biases.
          rngs: a ``params`` stream, or a key.

        Raises:
          ValueError: for options that contradict each other; both values are named.
        """
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False for {type(self).__name__}, got {causal!r}.")
        super().__init__(
            num_heads,
            in_features,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            out_features=out_features,
            context_features=context_features,
            causal=causal,
            window=window,
            rope=rope,
            normalize_qk=normalize_qk,
            use_bias=use_bias,
            use_output_bias=use_output_bias,
            logits_soft_cap=logits_soft_cap,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )

    def _rotate(self, x: Float[Array, "B T M H"], positions: Int[Array, "#B T"] | None) -> Float[Array, "B T M H"]:
        if self.rope is None:
            return x
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        compute = jnp.promote_types(x.dtype, jnp.float32)
        tables = rope_tables(positions[:, :, None], self.rope, self.head_dim // self.num_maps, dtype=compute)
        return self._each_map(lambda x: apply_rope(x, *tables), x)

    def _to_cache(self, key: Float[Array, "B t K H"], positions: Int[Array, "B t"]) -> Float[Array, "B t K H"]:
        # A key's rotation depends on its own position only: rotated once, it need not be again at every step.
        return self._rotate(key, positions)

    def _between(self) -> BetweenHeads | None:
        """What becomes of attention maps between the heads: nothing, here."""
        return None

    def _attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        *,
        query_positions: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B S"] | None,
        query_segment_ids: Int[Array, "B T"] | None,
        key_segment_ids: Int[Array, "B S"] | None,
        cached: bool = False,
    ) -> Float[Array, "B T N H"]:
        query = self._rotate(query, query_positions)
        if not cached:
            key = self._rotate(key, query_positions if key_positions is None else key_positions)
        return dot_product_attention(
            query,
            key,
            value,
            causal=bool(self.causal),
            window=self.window,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
            logits_soft_cap=self.logits_soft_cap,
            precision=self.precision,
            between=self._between(),
        )
