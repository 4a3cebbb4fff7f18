"""Interleaved Head Attention as a Flax NNX layer."""

from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax.nn.init import MixingScheme, initial_mixing
from iha_jax.nn.parameters import (
    Initializer,
    default_bias_init,
    default_kernel_init,
    parameter,
    require_positive,
    split_keys,
)
from iha_jax.nn.projections import AttentionProjections
from iha_jax.ops.api import interleaved_head_attention
from iha_jax.ops.mixing import Collapse, HeadMixing
from iha_jax.ops.rope import Rope
from iha_jax.ops.types import Causal, Implementation


class InterleavedHeadAttention(AttentionProjections):
    """Interleaved Head Attention (arXiv 2602.21371, Algorithm 1 and Definition 3).

    Like multi-head attention, except that each head attends with P pseudo-queries, -keys and -values per token, each
    a learned mixture of all heads. Beside MHA's parameters it has ``mixing_query`` [N, N, P], ``mixing_key`` and
    ``mixing_value`` [K, K, P] and ``collapse`` [N, P] or [N, N, P].

        layer = InterleavedHeadAttention(8, 256, num_pseudo_heads=4, window=32, rngs=nnx.Rngs(0))
        y = layer(x)                                   # [B, T, 256] -> [B, T, 256]
        cache = layer.init_cache(batch_size, 1024)     # exactly MHA's bytes
        y, cache = layer.decode(x, cache)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_pseudo_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        context_features: int | None = None,
        causal: Causal = "virtual",
        window: int | None = None,
        rope: Rope | None = Rope(),
        collapse: Collapse = "per_head",
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
        mixing_init: MixingScheme | Initializer = "live",
        collapse_init: Initializer | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs | Array,
    ):
        """Makes the parameters.

        Args:
          num_heads: N, query heads.
          in_features: D, size of the input's last axis.
          num_pseudo_heads: P, default N.
          num_kv_heads: K, key/value heads, default N; must divide N.
          head_dim: H, default ``D / N``.
          out_features: size of the output's last axis, default D.
          context_features: size of a context's last axis, default D.
          causal: ``"virtual"`` (the paper), ``"token"`` or None; see `interleaved_head_attention`.
          window: W in tokens, or None.
          rope: rotary embedding, or None.
          collapse: ``"per_head"`` (Algorithm 1) or ``"across_heads"`` (Definition 3).
          normalize_qk: root-mean-square normalisation of base queries and keys, before RoPE and mixing.
          use_bias: whether query, key and value projections have biases.
          use_output_bias: whether the output projection has one, default as `use_bias`.
          logits_soft_cap: c in ``c * tanh(logits / c)``, or None.
          dtype: of the computation, default what input and parameters promote to.
          param_dtype: of the parameters.
          precision: of every contraction.
          kernel_init: of the projections, drawn as matrices ``[fan_in, fan_out]``.
          out_kernel_init: of the output projection, default `kernel_init`.
          bias_init: of the biases.
          mixing_init: ``"live"`` (default) keeps MHA's output size and gives every pseudo-head a gradient of its
            own; ``"exact"`` starts exactly at MHA (RoPE on token positions or none); see `iha_jax.nn.init`. An
            initialiser is applied to each mixing tensor, the collapse being the live one.
          collapse_init: initialiser of the collapse, default what `mixing_init` says.
          implementation: of the attention, see `interleaved_head_attention`.
          rngs: a ``params`` stream, or a key.

        Raises:
          ValueError: for options that contradict each other; both values are named.
        """
        if causal not in ("virtual", "token", None):
            raise ValueError(f'causal must be "virtual", "token" or None, got {causal!r}.')
        if collapse not in get_args(Collapse):
            raise ValueError(f"collapse must be one of {get_args(Collapse)}, got {collapse!r}.")
        keys = split_keys(rngs, "projections", "mixing", "query", "key", "value", "collapse")
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
            rngs=keys["projections"],
        )
        num_pseudo_heads = num_heads if num_pseudo_heads is None else num_pseudo_heads
        require_positive("InterleavedHeadAttention", num_pseudo_heads=num_pseudo_heads)
        self.num_pseudo_heads = num_pseudo_heads
        self.implementation: Implementation = implementation

        initial = initial_mixing(
            "live" if callable(mixing_init) else mixing_init,
            keys["mixing"],
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            num_pseudo_heads=num_pseudo_heads,
            head_dim=self.head_dim,
            causal=causal,
            window=window,
            rope=rope,
            collapse=collapse,
            dtype=param_dtype,
        )

        def tensor(name: str, axes: tuple[str, ...], init: Initializer | None) -> nnx.Param:
            value = getattr(initial, name)
            return parameter(value if init is None else init(keys[name], value.shape, param_dtype), axes)

        mixing = mixing_init if callable(mixing_init) else None
        self.mixing_query = tensor("query", ("source_heads", "heads", "pseudo"), mixing)
        self.mixing_key = tensor("key", ("source_kv_heads", "kv_heads", "pseudo"), mixing)
        self.mixing_value = tensor("value", ("source_kv_heads", "kv_heads", "pseudo"), mixing)
        axes = ("heads", "pseudo") if collapse == "per_head" else ("heads", "source_heads", "pseudo")
        self.collapse = tensor("collapse", axes, collapse_init)

    @property
    def mixing(self) -> HeadMixing:
        """The four mixing tensors as the operation takes them."""
        return HeadMixing(
            query=self.mixing_query[...],
            key=self.mixing_key[...],
            value=self.mixing_value[...],
            collapse=self.collapse[...],
        )

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
        # The cache keeps base keys before rotation: the operation rotates what it is given, by the positions that
        # lie beside the keys, and mixing has to be redone for cached tokens anyway.
        del cached
        return interleaved_head_attention(
            query,
            key,
            value,
            self.mixing,
            causal=self.causal,  # pyright: ignore[reportArgumentType]
            window=self.window,
            rope=self.rope,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
            logits_soft_cap=self.logits_soft_cap,
            precision=self.precision,
            implementation=self.implementation,
        )
