"""Dot-product attention for the baseline, as strong as XLA allows: banded for windows, memory linear in length.

`jax.nn.dot_product_attention` serves where it can and is best: short sequences without a window, cap or precision.
On XLA it materialises all T x S logits and computes a window's full square, so the rest is done here.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from iha_jax import sharding
from iha_jax.nn.between_heads import BetweenHeads
from iha_jax.ops.sharded import attend_sharded, layout_of

# Logits of one piece of work: 64 MiB in float32. Below it everything is one piece and saved for the backward pass;
# above, pieces are computed in turn and recomputed, so memory does not grow with T*S.
_MAX_LOGITS = 2**24
# Causal attention in pieces splits the queries in so many parts, each reading only keys up to its own end: the
# share of hidden pairs computed in vain is 1/16 of the square instead of 1/2.
_CAUSAL_PARTS = 8
# Smallest band block: narrower products cost more in overhead than they save.
_MIN_BLOCK = 16


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    causal: bool,
    window: int | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    key_positions: Int[Array, "B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    between: BetweenHeads | None = None,
) -> Float[Array, "B T N Hv"]:
    """Scaled dot-product attention of already rotated heads; K divides N.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, Hv]``.
      causal: whether a key's position must not exceed the query's.
      window: W: distances below W are seen (either way, if not causal).
      query_positions: int32 ``[B, T]``, strictly increasing within a segment; default ``0 … T-1``.
      key_positions: likewise; default the query's if given, else ``0 … S-1``.
      query_segment_ids: int32 ``[B, T]``, 0 is padding; default all 1.
      key_segment_ids: likewise; default the query's if given.
      logits_soft_cap: c in ``c * tanh(logits / c)``, before the mask.
      precision: of every contraction.
      between: what becomes of the maps between the heads, or None. With M maps in a head, H is that of M vectors
        side by side, and the scale that of one.

    Returns:
      ``[B, T, N, Hv]`` in the query's dtype; exactly 0 for a query with nothing to see.

    On a mesh it runs under `jax.shard_map`, split as `iha_jax.ops.sharded` says.

    Raises:
      ValueError: if positions or ids leave open what S != T means, or sizes do not divide on the mesh in force.
    """
    query_len, key_len = query.shape[1], key.shape[1]
    for name, for_query, for_key in (
        ("positions", query_positions, key_positions),
        ("segment_ids", query_segment_ids, key_segment_ids),
    ):
        if for_query is not None and for_key is None and query_len != key_len:
            raise ValueError(f"query_{name} without key_{name} needs S = T, got T={query_len} and S={key_len}.")
    if causal and query_positions is None and query_len != key_len:
        raise ValueError(f"causal attention with T={query_len} and S={key_len} needs both position arrays.")
    layout = layout_of(query, key) if sharding.mesh_sizes() else None
    if layout is not None:
        all_heads = between is not None and between.needs_all_heads
        if all_heads:  # gathered, and every device of the tensor axes does the same
            layout = dataclasses.replace(layout, heads=(), kv_heads=(), parts=1)

        def attend(query: Array, key: Array, value: Array, _, **others) -> Array:
            return dot_product_attention(
                query,
                key,
                value,
                causal=causal,
                window=window,
                logits_soft_cap=logits_soft_cap,
                precision=precision,
                between=others.pop("whole", None),
                **others,
            )

        out = attend_sharded(
            attend,
            layout,
            query,
            key,
            value,
            None,
            causal="token" if causal else None,
            window=window,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
            whole=between,
        )
        return sharding.constrain(out, ("batch", "sequence", "heads", None)) if all_heads else out
    # Index order stands for position order where both sides are one sequence.
    aligned = key_positions is None and (key_segment_ids is None or query_segment_ids is None)
    default_positions = query_positions is None and key_positions is None
    segmented = query_segment_ids is not None or key_segment_ids is not None
    if segmented:
        key_ids = query_segment_ids if key_segment_ids is None else key_segment_ids
        assert key_ids is not None
        query_ids = jnp.ones((key.shape[0], query_len), jnp.int32) if query_segment_ids is None else query_segment_ids
        # What padding holds must not matter, not even inf: 0 weight times inf is not 0.
        key, value = _blank(key, key_ids), _blank(value, key_ids)
        query = _blank(query, query_ids)
    else:
        query_ids, key_ids = None, None

    maps = query.shape[2] * (1 if between is None else between.num_maps)
    logits = query.shape[0] * maps * query_len * key_len
    plain = window is None and logits_soft_cap is None and precision is None and between is None
    plain = plain and query.shape[3] == value.shape[3]  # jax.nn's refuses values of their own width
    if plain and default_positions and not segmented and logits <= _MAX_LOGITS:
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    if query_positions is None:
        query_positions = jnp.arange(query_len, dtype=jnp.int32)[None]
        key_positions = jnp.arange(key_len, dtype=jnp.int32)[None] if key_positions is None else key_positions
    if key_positions is None:
        key_positions = query_positions
    queries = (query, query_positions, query_ids)
    keys = (key, value, key_positions, key_ids)
    dense = functools.partial(
        _dense, causal=causal, window=window, cap=logits_soft_cap, precision=precision, between=between
    )
    band = _band(query_len, causal, window) if aligned and query_len == key_len else None
    if band is not None:
        return _banded(queries, keys, *band, maps, dense)
    if logits <= _MAX_LOGITS:
        return dense(queries, keys)
    return _in_pieces(queries, keys, causal and aligned and query_len == key_len, maps, dense)


def computed_pairs(
    batch: int, heads: int, tokens: int, causal: bool, window: int | None, keys: int | None = None
) -> tuple[int, bool]:
    """What attention whose positions count from 0 really computes.

    Args:
      batch: B.
      heads: N, times the maps in a head.
      tokens: T.
      causal: as in `dot_product_attention`.
      window: likewise.
      keys: S, default T; where it isn't T nothing is skipped by index.

    Returns:
      Pairs of a query and a key for which logits are computed, per head and sequence, masked ones and padding
      included; and whether the backward pass computes the logits again.
    """
    keys = tokens if keys is None else keys
    band = _band(tokens, causal, window) if keys == tokens else None
    if band is not None:
        block, behind, ahead = band
        slab_blocks, slabs = _slabs(batch, heads, tokens, *band)
        return slabs * slab_blocks * block * (behind + block + ahead), slabs > 1
    if batch * heads * tokens * keys <= _MAX_LOGITS:
        return tokens * keys, False
    pieces = _pieces(batch, heads, tokens, keys, causal and keys == tokens)
    return sum(len(firsts) * rows * seen for _, seen, rows, firsts in pieces), True


def _band(tokens: int, causal: bool, window: int | None) -> tuple[int, int, int] | None:
    """Block, keys behind and keys ahead of it for a window worth cutting out, else None."""
    if window is None:
        return None
    block = max(_MIN_BLOCK, window // 2)
    behind = -(-(window - 1) // block) * block
    ahead = 0 if causal else behind
    return (block, behind, ahead) if behind + block + ahead < tokens else None


def _slabs(batch: int, heads: int, tokens: int, block: int, behind: int, ahead: int) -> tuple[int, int]:
    """Blocks of one slab (what one piece of work covers), and slabs."""
    blocks = -(-tokens // block)
    per_block = batch * heads * block * (behind + block + ahead)
    slab_blocks = min(blocks, max(1, _MAX_LOGITS // per_block))
    return slab_blocks, -(-blocks // slab_blocks)


def _pieces(batch: int, heads: int, tokens: int, key_len: int, causal: bool) -> list[tuple[int, int, int, list[int]]]:
    """Parts of the queries as (start, keys seen, rows of a piece, first row of every piece)."""
    part = -(-tokens // (_CAUSAL_PARTS if causal else 1))
    result = []
    for start in range(0, tokens, part):
        stop = min(start + part, tokens)
        seen = stop if causal else key_len
        rows = max(1, min(stop - start, _MAX_LOGITS // (batch * heads * seen)))
        count = math.ceil((stop - start) / rows)
        rows = math.ceil((stop - start) / count)
        # The last piece starts where it still fits; rows it shares with the one before are equal, and cut off.
        result.append((start, seen, rows, [min(start + i * rows, stop - rows) for i in range(count)]))
    return result


def _blank(x: Array, ids: Array) -> Array:
    return jnp.where((ids == 0)[:, :, None, None], jnp.zeros_like(x), x)


def _dense(queries, keys, *, causal, window, cap, precision, between) -> Array:
    """Attention with all logits at once. Leading axes of every array may be [B] or, for blocks, [B, blocks]."""
    query, query_positions, query_ids = queries
    key, value, key_positions, key_ids = keys
    compute = jnp.promote_types(query.dtype, jnp.float32)
    *lead, tokens, heads, dim = query.shape
    key_len, kv_heads = key.shape[-3:-1]
    grouped = (*lead, kv_heads, heads // kv_heads, tokens, key_len)
    query = query.reshape(*lead, tokens, kv_heads, heads // kv_heads, dim)
    contract = functools.partial(jnp.einsum, precision=precision, preferred_element_type=compute)
    if between is None or between.num_maps == 1:
        logits = contract("...tkgh,...skh->...kgts", query, key)
    else:
        dim //= between.num_maps
        query, key = (x.reshape(*x.shape[:-1], between.num_maps, dim) for x in (query, key))
        logits = contract("...tkgmh,...skmh->...kgmts", query, key)
    logits = logits * jnp.asarray(dim**-0.5, compute)
    if between is not None:
        logits = between.of_logits(logits.reshape(*lead, -1, tokens, key_len), contract)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    seen = None
    if causal or window is not None:
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        if causal:
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
        else:
            seen = jnp.abs(distance) < window
    if query_ids is not None:
        query_ids, key_ids = query_ids[..., :, None], key_ids[..., None, :]
        same = (query_ids == key_ids) & (key_ids != 0)
        seen = same if seen is None else seen & same
    if seen is not None:
        seen = seen[..., None, None, :, :] if between is None else seen[..., None, :, :]
        logits = jnp.where(seen, logits, jnp.finfo(compute).min)
    weights = jax.nn.softmax(logits, axis=-1)
    if seen is not None:
        # A query with nothing to see gives 0, not an average of what it can't see.
        weights = jnp.where(seen, weights, 0)
    if between is not None:
        weights = between.of_weights(weights, contract).reshape(grouped)
    out = contract("...kgts,...skh->...tkgh", weights.astype(value.dtype), value)
    return out.reshape(*lead, tokens, heads, value.shape[-1]).astype(query.dtype)


def _banded(queries, keys, block: int, behind: int, ahead: int, maps: int, dense) -> Array:
    """Windowed self-attention: a block of queries reads its own block and what the window reaches around it."""
    batch, tokens = queries[0].shape[:2]
    band = behind + block + ahead
    slab_blocks, slabs = _slabs(batch, maps, tokens, block, behind, ahead)
    slab = slab_blocks * block
    padding = slabs * slab - tokens

    def pad(x: Array | None, before: int, after: int) -> Array | None:
        return None if x is None else jnp.pad(x, ((0, 0), (before, after)) + ((0, 0),) * (x.ndim - 2))

    key, value, key_positions, key_ids = keys
    far = jnp.iinfo(jnp.int32).max // 2
    if key_ids is None:
        # Padding must not be seen; without ids, positions no window reaches see to that. Padding's own queries
        # then see nothing, which is harmless: they are cut off below.
        key_positions = jnp.pad(key_positions, ((0, 0), (behind, padding + ahead)), constant_values=-far)
    else:
        key_positions = pad(key_positions, behind, padding + ahead)
    queries = tuple(pad(x, 0, padding) for x in queries)
    keys = (
        pad(key, behind, padding + ahead),
        pad(value, behind, padding + ahead),
        key_positions,
        pad(key_ids, behind, padding + ahead),
    )

    def blocked(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(x.shape[0], slab_blocks, block, *x.shape[2:])

    def bands(x: Array | None) -> Array | None:
        if x is None:
            return None
        # Slices overlap: block i reads rows i*block … i*block + band of the slab and its halo.
        pieces = [
            x[:, i : i + slab].reshape(x.shape[0], slab_blocks, block, *x.shape[2:]) for i in range(0, band, block)
        ]
        return jnp.concatenate(pieces, axis=2)

    def attend(start: Array | int) -> Array:
        def cut(x: Array | None, size: int) -> Array | None:
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        slab_queries = tuple(blocked(cut(x, slab)) for x in queries)
        slab_keys = tuple(bands(cut(x, slab + behind + ahead)) for x in keys)
        out = dense(slab_queries, slab_keys)
        return out.reshape(batch, slab, *out.shape[3:])

    if slabs == 1:
        out = attend(0)
    else:
        starts = jnp.arange(slabs, dtype=jnp.int32) * slab
        out = jnp.moveaxis(jax.lax.map(jax.checkpoint(attend), starts), 0, 1)
        out = out.reshape(batch, slabs * slab, *out.shape[3:])
    return out[:, :tokens]


def _in_pieces(queries, keys, causal_by_index: bool, maps: int, dense) -> Array:
    """Attention over all keys, some query rows at a time, recomputed in the backward pass."""
    batch, tokens = queries[0].shape[:2]
    key_len = keys[0].shape[1]
    outputs = []
    for start, seen, rows, firsts in _pieces(batch, maps, tokens, key_len, causal_by_index):
        part_keys = tuple(x if x is None else x[:, :seen] for x in keys)

        def attend(first: Array, rows: int = rows, part_keys: tuple = part_keys) -> Array:
            piece = tuple(x if x is None else jax.lax.dynamic_slice_in_dim(x, first, rows, axis=1) for x in queries)
            return dense(piece, part_keys)

        out = jax.lax.map(jax.checkpoint(attend), jnp.asarray(firsts, jnp.int32))
        for i, first in enumerate(firsts):
            outputs.append(out[i][:, start + i * rows - first :])
    return jnp.concatenate(outputs, axis=1)
