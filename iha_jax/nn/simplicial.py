"""2-simplicial attention (arXiv 1909.00668, 2507.02754): every query attends to *pairs* of tokens."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax import sharding
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.parameters import Initializer, default_bias_init, default_kernel_init, kernel, parameter, split_keys
from iha_jax.ops.sharded import attend_sharded, layout_of

# Logits of one piece of work, as in `iha_jax.nn.dot_product`.
_MAX_LOGITS = 2**24


def simplicial_attention(
    query: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H2"],
    values: Float[Array, "B S K V2"],
    *,
    causal: bool,
    window: int | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    key_positions: Int[Array, "B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T N V"]:
    """Softmax over all pairs (i, j) that a query sees, of ``Σ_h q[h] k[i, h] k'[j, h] / √H``; values ``v[i] ∘ v'[j]``.

    Work grows with T S², whatever the window; memory is that of some query rows at a time.

    Args:
      query: ``[B, T, N, H]``.
      keys: ``[B, S, K, 2 H]``, k and k' side by side.
      values: ``[B, S, K, 2 V]``, v and v' side by side.
      causal: whether neither of a pair's positions may exceed the query's.
      window: W: both distances are below W (either way, if not causal).
      query_positions: int32 ``[B, T]``; default ``0 … T-1``.
      key_positions: likewise; default the query's if given, else ``0 … S-1``.
      query_segment_ids: int32 ``[B, T]``, 0 is padding; default all 1.
      key_segment_ids: likewise; default the query's if given.
      logits_soft_cap: c in ``c * tanh(logits / c)``, before the mask.
      precision: of both contractions.

    Returns:
      ``[B, T, N, V]`` in the query's dtype; exactly 0 for a query with nothing to see.

    On a mesh it runs under `jax.shard_map`, split as `iha_jax.ops.sharded` says.

    Raises:
      ValueError: if positions or ids leave open what S != T means, or sizes do not divide on the mesh in force.
    """
    query_len, key_len = query.shape[1], keys.shape[1]
    for name, for_query, for_key in (
        ("positions", query_positions, key_positions),
        ("segment_ids", query_segment_ids, key_segment_ids),
    ):
        if for_query is not None and for_key is None and query_len != key_len:
            raise ValueError(f"query_{name} without key_{name} needs S = T, got T={query_len} and S={key_len}.")
    if causal and query_positions is None and query_len != key_len:
        raise ValueError(f"causal attention with T={query_len} and S={key_len} needs both position arrays.")
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "logits_soft_cap": logits_soft_cap,
        "precision": precision,
    }
    integers = {
        "query_positions": query_positions,
        "key_positions": key_positions,
        "query_segment_ids": query_segment_ids,
        "key_segment_ids": key_segment_ids,
    }
    layout = layout_of(query, keys) if sharding.mesh_sizes() else None
    if layout is not None:

        def attend(query: Array, keys: Array, values: Array, _, **integers: Any) -> Array:
            return simplicial_attention(query, keys, values, **options, **integers)

        kind = "token" if causal else None
        return attend_sharded(attend, layout, query, keys, values, None, causal=kind, window=window, **integers)

    batch = query.shape[0]
    if query_positions is None:
        query_positions = jnp.arange(query_len, dtype=jnp.int32)[None]
        key_positions = jnp.arange(key_len, dtype=jnp.int32)[None] if key_positions is None else key_positions
    key_positions = query_positions if key_positions is None else key_positions
    seen = None
    if causal or window is not None:
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        seen = distance >= 0 if causal else jnp.full_like(distance, True, dtype=bool)
        if window is not None:
            seen &= jnp.abs(distance) < window
    if query_segment_ids is not None or key_segment_ids is not None:
        key_ids = query_segment_ids if key_segment_ids is None else key_segment_ids
        assert key_ids is not None
        query_ids = jnp.ones((batch, query_len), jnp.int32) if query_segment_ids is None else query_segment_ids
        # What padding holds must not matter, not even inf: 0 weight times inf is not 0.
        query, keys, values = (
            jnp.where((ids == 0)[:, :, None, None], jnp.zeros_like(x), x)
            for x, ids in ((query, query_ids), (keys, key_ids), (values, key_ids))
        )
        same = (query_ids[:, :, None] == key_ids[:, None, :]) & (key_ids != 0)[:, None, :]
        seen = same if seen is None else seen & same
    if seen is not None:
        seen = jnp.broadcast_to(seen, (batch, query_len, key_len))
    dense = functools.partial(_dense, cap=logits_soft_cap, precision=precision)
    rows = _rows(batch, query.shape[2], query_len, key_len)
    if rows == query_len:
        return dense(query, keys, values, seen)
    starts = [min(start, query_len - rows) for start in range(0, query_len, rows)]

    def attend_rows(start: Array) -> Array:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1)

        return dense(cut(query), keys, values, None if seen is None else cut(seen))

    out = jax.lax.map(jax.checkpoint(attend_rows), jnp.asarray(starts, jnp.int32))
    # The last piece starts where it still fits; rows it shares with the one before are equal, and cut off.
    pieces = [out[i][:, i * rows - start :] for i, start in enumerate(starts)]
    return jnp.concatenate(pieces, axis=1)


def computed_triples(batch: int, heads: int, tokens: int) -> tuple[int, bool]:
    """What self-attention really computes: triples per head and sequence, and whether the backward pass does it again.

    Args:
      batch: B.
      heads: N.
      tokens: T.
    """
    rows = _rows(batch, heads, tokens, tokens)
    return math.ceil(tokens / rows) * rows * tokens**2, rows < tokens


def _rows(batch: int, heads: int, tokens: int, key_len: int) -> int:
    """Query rows of one piece of work, as equal as whole numbers allow."""
    most = max(1, _MAX_LOGITS // (batch * heads * key_len**2))
    return math.ceil(tokens / math.ceil(tokens / most))


def _dense(query: Array, keys: Array, values: Array, seen: Array | None, *, cap, precision) -> Array:
    """All pairs at once; seen is ``[B, T, S]``."""
    dtype, compute = query.dtype, jnp.promote_types(query.dtype, jnp.float32)
    batch, tokens, heads, dim = query.shape
    kv_heads = keys.shape[2]
    contract = functools.partial(jnp.einsum, precision=precision, preferred_element_type=compute)
    first, second = jnp.split(keys.astype(compute), 2, axis=-1)
    query = query.astype(compute).reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    # Axes: b row, t query, i and j the pair, k and g the head, h within it.
    left = query[:, :, None] * first[:, None, :, :, None]
    logits = contract("btikgh,bjkh->bkgtij", left, second) * jnp.asarray(dim**-0.5, compute)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    pairs = None
    if seen is not None:
        pairs = (seen[:, :, :, None] & seen[:, :, None, :])[:, None, None]
        logits = jnp.where(pairs, logits, jnp.finfo(compute).min)
    weights = jax.nn.softmax(logits.reshape(*logits.shape[:-2], -1), axis=-1).reshape(logits.shape)
    if pairs is not None:
        weights = jnp.where(pairs, weights, 0)
    first, second = jnp.split(values.astype(compute), 2, axis=-1)
    inner = contract("bkgtij,bjkv->btikgv", weights, second)
    out = jnp.sum(inner * first[:, None, :, :, None], axis=2)
    return out.reshape(batch, tokens, heads, -1).astype(dtype)


class SimplicialAttention(MultiHeadAttention):
    """2-simplicial attention: a trilinear product of a query and two keys, a softmax over pairs of tokens.

    Beside MHA's parameters it has ``second_key_kernel`` and ``second_value_kernel`` [Dc, K, H], and their biases. See
    `simplicial_attention` for the operation; its cost grows with the cube of the length. `normalize_qk` normalises both
    keys, with one scale. The cache keeps both keys and both values.

    There is no RoPE: rotating query and keys by their positions leaves a trilinear product dependent on absolute
    positions, so these must come with the input.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        use_bias: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs | Array,
        **options: Any,
    ):
        """Makes the parameters.

        Args:
          num_heads: N.
          in_features: D.
          use_bias: of query, key and value projections.
          param_dtype: of the parameters.
          kernel_init: of the projections.
          bias_init: of the biases.
          rngs: a ``params`` stream, or a key.
          **options: every other option of `MultiHeadAttention` but ``rope``.

        Raises:
          ValueError: for options that contradict each other; both values are named; for a ``rope``.
        """
        if options.pop("rope", None) is not None:
            raise ValueError("SimplicialAttention has no rotary embedding, but rope was given: leave it out or None.")
        keys = split_keys(rngs, "attention", "key", "value", "key_bias", "value_bias")
        super().__init__(
            num_heads,
            in_features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rope=None,
            rngs=keys["attention"],
            **options,
        )
        heads = (self.num_kv_heads, self.head_dim)

        def second(name: str) -> tuple[nnx.Param, nnx.Param | None]:
            axes = ("embed", "kv_heads", "head_dim")
            weights = kernel(keys[name], kernel_init, (self.context_features,), heads, axes, param_dtype)
            bias = bias_init(keys[f"{name}_bias"], heads, param_dtype) if use_bias else None
            return weights, None if bias is None else parameter(bias, axes[1:])

        self.second_key_kernel, self.second_key_bias = second("key")
        self.second_value_kernel, self.second_value_bias = second("value")

    @property
    def _cached_dim(self) -> int:
        return 2 * self.head_dim

    def _project(self, x: Array, source: Array) -> tuple[Array, Array, Array]:
        query, key, value = super()._project(x, source)
        source = source.astype(query.dtype)
        second_key = self._inward(source, self.second_key_kernel, self.second_key_bias)
        second_value = self._inward(source, self.second_value_kernel, self.second_value_bias)
        if self.key_norm is not None:
            second_key = self.key_norm(second_key)
        return query, jnp.concatenate([key, second_key], axis=-1), jnp.concatenate([value, second_value], axis=-1)

    def _attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H2"],
        value: Float[Array, "B S K H2"],
        *,
        query_positions: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B S"] | None,
        query_segment_ids: Int[Array, "B T"] | None,
        key_segment_ids: Int[Array, "B S"] | None,
        cached: bool = False,
    ) -> Float[Array, "B T N H"]:
        del cached
        return simplicial_attention(
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
        )
