"""What interleaved and plain attention layers share: projections in and out, and decoding with a cache."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax import sharding
from iha_jax.nn.cache import AttentionCache, Chunk
from iha_jax.nn.norms import RMSNorm
from iha_jax.nn.parameters import Initializer, compute_dtype, kernel, parameter, require_positive, split_keys
from iha_jax.ops.rope import Rope
from iha_jax.sharding import LogicalAxes

_HEADS: LogicalAxes = ("batch", "sequence", "heads", None)
_KV_HEADS: LogicalAxes = ("batch", "sequence", "kv_heads", None)


class AttentionProjections(nnx.Module):
    """Query, key, value and output projections, and the walk along a cache; subclasses say how heads attend.

    A subclass implements `_attend`; it may override `_to_cache`, what a key goes through before it is stored.

    Attributes:
      num_maps: attention maps of a head; queries and keys of H are so many vectors side by side.
    """

    num_maps: ClassVar[int] = 1

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None,
        head_dim: int | None,
        out_features: int | None,
        context_features: int | None,
        causal: object,
        window: int | None,
        rope: Rope | None,
        normalize_qk: bool,
        use_bias: bool,
        use_output_bias: bool | None,
        logits_soft_cap: float | None,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        precision: jax.lax.PrecisionLike,
        kernel_init: Initializer,
        out_kernel_init: Initializer | None,
        bias_init: Initializer,
        rngs: nnx.Rngs | Array,
    ):
        """Validates the options both layers have and makes the projections; see the subclasses for the arguments."""
        kind = type(self).__name__
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_positive(kind, num_heads=num_heads, in_features=in_features, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"{kind}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}.")
        if head_dim is None:
            if in_features % num_heads:
                raise ValueError(
                    f"{kind}: in_features={in_features} is no multiple of num_heads={num_heads}: give head_dim."
                )
            head_dim = in_features // num_heads
        out_features = in_features if out_features is None else out_features
        context_features = in_features if context_features is None else context_features
        require_positive(kind, head_dim=head_dim, out_features=out_features, context_features=context_features)
        if window is not None:
            require_positive(f"{kind} with a window (None: without one)", window=window)
        if rope is not None and not isinstance(rope, Rope):
            raise ValueError(f"{kind}: rope must be an iha_jax.Rope or None, got {type(rope).__name__}.")
        if head_dim % self.num_maps:
            raise ValueError(f"{kind}: head_dim={head_dim} must be a multiple of its {self.num_maps} maps.")
        if rope is not None and head_dim // self.num_maps % 2:
            raise ValueError(
                f"{kind}: rope rotates pairs and needs an even head dimension, got head_dim={head_dim}"
                + (f" for {self.num_maps} maps." if self.num_maps > 1 else ".")
            )
        if logits_soft_cap is not None and not logits_soft_cap > 0:
            raise ValueError(f"{kind}: logits_soft_cap must be > 0 or None, got {logits_soft_cap}.")

        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.in_features, self.out_features, self.context_features = in_features, out_features, context_features
        self.causal, self.window, self.rope = causal, window, rope
        self.logits_soft_cap = logits_soft_cap
        self.dtype, self.param_dtype, self.precision = dtype, param_dtype, precision

        keys = split_keys(rngs, "query", "key", "value", "out", "query_bias", "key_bias", "value_bias", "out_bias")
        n, k, h = num_heads, num_kv_heads, head_dim

        def inward(name: str, features: int, heads: int, axis: str) -> nnx.Param:
            axes = ("embed", axis, "head_dim")
            return kernel(keys[name], kernel_init, (features,), (heads, h), axes, param_dtype)

        self.query_kernel = inward("query", in_features, n, "heads")
        self.key_kernel = inward("key", context_features, k, "kv_heads")
        self.value_kernel = inward("value", context_features, k, "kv_heads")
        out_init = kernel_init if out_kernel_init is None else out_kernel_init
        out_axes = ("heads", "head_dim", "embed")
        self.out_kernel = kernel(keys["out"], out_init, (n, h), (out_features,), out_axes, param_dtype)

        def bias(name: str, shape: tuple[int, ...], axes: tuple[str, ...], wanted: bool) -> nnx.Param | None:
            return parameter(bias_init(keys[name], shape, param_dtype), axes) if wanted else None

        self.query_bias = bias("query_bias", (n, h), ("heads", "head_dim"), use_bias)
        self.key_bias = bias("key_bias", (k, h), ("kv_heads", "head_dim"), use_bias)
        self.value_bias = bias("value_bias", (k, h), ("kv_heads", "head_dim"), use_bias)
        use_output_bias = use_bias if use_output_bias is None else use_output_bias
        self.out_bias = bias("out_bias", (out_features,), ("norm",), use_output_bias)

        def norm() -> RMSNorm | None:
            return RMSNorm(h // self.num_maps, param_dtype=param_dtype, axis="head_dim") if normalize_qk else None

        self.query_norm, self.key_norm = norm(), norm()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S Dc"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        context_positions: Int[Array, "B S"] | None = None,
        context_segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B T Do"]:
        """Attends within x, or from x to a context.

        Args:
          x: inputs ``[B, T, D]``.
          context: what keys and values are made of, ``[B, S, Dc]``; default x. Needs ``causal=None``.
          positions: int32 ``[B, T]``, strictly increasing within a segment; default ``0 … T-1``.
          segment_ids: int32 ``[B, T]``; tokens attend within their own segment, 0 is padding. Default all 1.
          context_positions: likewise of the context; needed if and only if a context and `positions` are given.
          context_segment_ids: likewise of the context; may be given alone, to mask the context's padding.

        Returns:
          ``[B, T, Do]`` in the layer's dtype.

        Raises:
          ValueError: for shapes and options that contradict each other.
        """
        self._check_input("x", x, self.in_features)
        if context is None:
            if context_positions is not None or context_segment_ids is not None:
                raise ValueError("context_positions and context_segment_ids describe a context, but none was given.")
            if self.context_features != self.in_features:
                raise ValueError(
                    f"this layer reads a context of context_features={self.context_features} (in_features="
                    f"{self.in_features}): call it with context=."
                )
            source = x
        else:
            self._check_context(x, context, positions, context_positions, segment_ids, context_segment_ids)
            source = context
        query, key, value = self._project(x, source)
        heads = self._attend(
            query,
            key,
            value,
            query_positions=positions,
            key_positions=context_positions,
            query_segment_ids=segment_ids,
            key_segment_ids=context_segment_ids,
        )
        return self._output(heads)

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> AttentionCache:
        """An empty cache of base keys and values, ``min(window, max_length)`` slots a row where there is a window.

        Args:
          batch_size: B.
          max_length: the most tokens a row will take.
          dtype: of keys and values, default the layer's.
        """
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        return AttentionCache.create(batch_size, max_length, self.num_kv_heads, self._cached_dim, dtype, self.window)

    def decode(
        self,
        x: Float[Array, "B t D"],
        cache: AttentionCache,
        positions: Int[Array, "B t"] | None = None,
        segment_ids: Int[Array, "B t"] | None = None,
    ) -> tuple[Float[Array, "B t Do"], AttentionCache]:
        """Continues each row by a chunk of any length; however a sequence is cut, the results are those of a call.

        Args:
          x: inputs ``[B, t, D]``.
          cache: from `init_cache` or the previous call.
          positions: int32 ``[B, t]``; default continue each row from the tokens it has.
          segment_ids: int32 ``[B, t]``; 0 is padding (right padding for ragged prompts): it isn't written and takes
            no position. Default each row's last id.

        Returns:
          Outputs ``[B, t, Do]`` and the new cache. A row that would pass ``max_length`` is NaN and leaves the
          cache unchanged, where lengths are traced. On a mesh that splits tokens, a chunk or a cache that does not
          divide is whole on every device along those axes.

        Raises:
          ValueError: if the layer is not causal or the cache is another layer's; if a row would pass
            ``max_length`` and lengths are concrete.
        """
        self._check_input("x", x, self.in_features)
        if self.causal in (None, False):
            raise ValueError(f"decoding needs a causal layer, but this one has causal={self.causal!r}.")
        expected = (x.shape[0], self.num_kv_heads, self._cached_dim, self.window)
        given = (cache.key.shape[0], *cache.key.shape[2:], cache.window)
        if given != expected:
            raise ValueError(
                f"this layer and input need a cache of (B, K, H, window) = {expected}, got one of {given}: "
                "make it with this layer's init_cache."
            )
        chunk = cache.plan(x.shape[1], positions, segment_ids)
        keys = cache.num_slots + (0 if self.window is None else x.shape[1])
        with sharding.tokens_whole_if_uneven(x.shape[1], keys):
            return self._decode(x, cache, chunk)

    def _decode(self, x: Array, cache: AttentionCache, chunk: Chunk) -> tuple[Array, AttentionCache]:
        query, key, value = self._project(x, x)
        key = self._to_cache(key, chunk.positions)
        if self.window is None:
            # One buffer holds past and chunk in order; write first, and read once.
            cache = cache.write(chunk, key, value)
            heads = self._attend(
                query,
                cache.key.astype(query.dtype),
                cache.value.astype(query.dtype),
                query_positions=chunk.positions,
                key_positions=cache.positions,
                query_segment_ids=chunk.segment_ids,
                key_segment_ids=cache.segment_ids,
                cached=True,
            )
        else:
            # A ring can't be written first: the chunk's late tokens would erase what its early ones must see.
            heads = self._attend_ring(query, key, value, cache, chunk)
            cache = cache.write(chunk, key, value)
        y = self._output(heads)
        return jnp.where(chunk.overflow[:, None, None], jnp.asarray(jnp.nan, y.dtype), y), cache

    def _attend_ring(self, query: Array, key: Array, value: Array, cache: AttentionCache, chunk) -> Array:
        past = cache.oldest_first()
        keys = jnp.concatenate([past.key.astype(key.dtype), key], axis=1)
        values = jnp.concatenate([past.value.astype(value.dtype), value], axis=1)
        positions = jnp.concatenate([past.positions, chunk.positions], axis=1)
        ids = jnp.concatenate([past.segment_ids, chunk.segment_ids], axis=1)
        slots = past.num_slots
        if query.shape[1] <= slots:
            return self._attend(
                query,
                keys,
                values,
                query_positions=chunk.positions,
                key_positions=positions,
                query_segment_ids=chunk.segment_ids,
                key_segment_ids=ids,
                cached=True,
            )
        # A long chunk (a prompt): as many queries as keys make it ordinary banded self-attention, whose cost is
        # tokens times window. The ring's own queries are zeros, and their results are dropped.
        query = jnp.concatenate([jnp.zeros((query.shape[0], slots, *query.shape[2:]), query.dtype), query], axis=1)
        heads = self._attend(
            query,
            keys,
            values,
            query_positions=positions,
            key_positions=None,
            query_segment_ids=ids,
            key_segment_ids=None,
            cached=True,
        )
        return heads[:, slots:]

    def _project(self, x: Array, source: Array) -> tuple[Array, Array, Array]:
        """Base heads ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,H]``, normalised where asked, not yet rotated."""
        dtype = compute_dtype(self.dtype, x, self.query_kernel[...])
        x, source = x.astype(dtype), source.astype(dtype)
        query = self._inward(x, self.query_kernel, self.query_bias, _HEADS)
        key = self._inward(source, self.key_kernel, self.key_bias, _KV_HEADS)
        value = self._inward(source, self.value_kernel, self.value_bias, _KV_HEADS)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._each_map(self.query_norm, query), self._each_map(self.key_norm, key)
        return query, key, value

    def _inward(
        self, x: Float[Array, "B T D"], weight: nnx.Param, bias: nnx.Param | None, axes: LogicalAxes = _KV_HEADS
    ) -> Array:
        """Heads of x in x's dtype, ``[B, T, N, H]``."""
        y = sharding.einsum("btd,dnh->btnh", x, weight[...].astype(x.dtype), axes=axes, precision=self.precision)
        return y if bias is None else y + bias[...].astype(x.dtype)[None, None]

    def _each_map(self, function: Callable[[Array], Array], x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Applies to the vectors that lie side by side in a head what applies to a vector."""
        if self.num_maps == 1:
            return function(x)
        # Cut, not reshaped: a mesh may split the heads, and an explicit one then refuses to merge axes with them.
        return jnp.concatenate([function(part) for part in jnp.split(x, self.num_maps, axis=-1)], axis=-1)

    @property
    def _cached_dim(self) -> int:
        """Size of a key and of a value as the cache keeps them."""
        return self.head_dim

    def _output(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T Do"]:
        weights = self.out_kernel[...].astype(heads.dtype)
        axes = ("batch", "sequence", None)
        y = sharding.einsum("btnh,nhd->btd", heads, weights, axes=axes, precision=self.precision)
        return y if self.out_bias is None else y + self.out_bias[...].astype(y.dtype)[None, None]

    def _to_cache(self, key: Float[Array, "B t K H"], positions: Int[Array, "B t"]) -> Array:
        """What is stored of a key. Here: the base key itself."""
        del positions
        return key

    _attend: Callable[..., Array]

    def _check_input(self, name: str, x: Array, features: int) -> None:
        if x.ndim != 3 or x.shape[2] != features:
            raise ValueError(f"{name} must be [batch, tokens, {features}], got shape {x.shape}.")

    def _check_context(self, x, context, positions, context_positions, segment_ids, context_segment_ids) -> None:
        if self.causal not in (None, False):
            raise ValueError(f"a context needs causal=None, but this layer has causal={self.causal!r}.")
        self._check_input("context", context, self.context_features)
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"x and context must have the same batch size, got {x.shape[0]} and {context.shape[0]}.")
        if (positions is None) != (context_positions is None):
            raise ValueError("with a context give positions and context_positions both, or neither.")
        if segment_ids is not None and context_segment_ids is None:
            raise ValueError("with a context, segment_ids need context_segment_ids beside them.")
