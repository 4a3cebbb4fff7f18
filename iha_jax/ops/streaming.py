"""A few causal queries over a long cache in XLA: one tile of cached tokens after the other, online softmax.

Nothing of the cache's size is made: padding is cleared, keys are rotated and mixed (not at all where scores can be
mixed instead, `paper.md` section 7) for the tile in hand, and values are never mixed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import masks, mixing
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.block_sizes import FEW_QUERIES, STREAM_SHARE, STREAM_TILE
from iha_jax.ops.rope import apply_rope, rope_tables


def tile_of(args: Arguments) -> int:
    """Tokens of a tile: its pseudo-keys are a fixed share of the cached keys, whatever P is."""
    return max(STREAM_TILE, -(-args.key.shape[1] // (STREAM_SHARE * args.num_pseudo_heads)))


def streams(args: Arguments) -> bool:
    """Whether the arguments are of decoding over a cache long enough for tiles.

    Cross attention without causality trains, too: there a tile's gradient would be added to all keys' every time.
    """
    key_len = args.key.shape[1]
    few = args.query.shape[1] < min(FEW_QUERIES, key_len)
    return args.causal is not None and few and key_len >= 2 * tile_of(args)


class State(NamedTuple):
    """Of the online softmax, for rows q: the query heads of a key/value head, query tokens and pseudo-heads."""

    top: Array  # [B, K, q, 1, 1]
    total: Array  # [B, K, q, 1, 1]
    out: Array  # [B, K, q, Hv]


def streaming(args: Arguments) -> Array:
    """Serves what `streams` is true of; padding need not be cleared.

    Returns:
      ``[B, T, N, Hv]`` in the query's dtype.
    """
    compute, pseudo, heads = args.compute_dtype, args.num_pseudo_heads, args.mixing.num_heads
    batch, tokens = args.query.shape[:2]
    kv_heads, key_len = args.mixing.num_kv_heads, args.key.shape[1]
    tile = tile_of(args)
    numbers = jnp.arange(pseudo, dtype=jnp.int32)
    dot = functools.partial(jnp.einsum, precision=args.precision, preferred_element_type=compute)
    rope = args.rope

    def tables(index: Array, with_factor: bool = True) -> tuple[Array, Array]:
        assert rope is not None
        return rope_tables(index, rope, args.head_dim, pseudo, compute, with_factor)

    step = 0 if rope is None else rope.tokens_to_index(pseudo)
    rotates_pseudo = rope is not None and rope.positions == "virtual" and pseudo > 1

    def rows(x: Array) -> Array:
        """``[B, T, N, P, ...] -> [B, K, q, ...]``."""
        return jnp.swapaxes(x, 1, 2).reshape(batch, kv_heads, -1, *x.shape[4:])

    cleared = jnp.where((args.query_segment_ids == 0)[:, :, None, None], jnp.zeros_like(args.query), args.query)
    query = mixing.mix(cleared, args.mixing.query, args.precision)
    if rope is not None:
        index = args.query_positions[:, :, None] * step
        if rope.positions == "virtual":
            index = index + numbers[None, None]
        query = apply_rope(query, *(x[:, :, None] for x in tables(index)))
    query = rows(query)
    by_row = masks.mask_index(args.query_positions[:, :, None], numbers[None, None], pseudo, args.causal)
    every_head = (batch, tokens, heads, pseudo)
    by_row = rows(jnp.broadcast_to(by_row[:, :, None], every_head))[..., None, None]
    id_row = rows(jnp.broadcast_to(args.query_segment_ids[:, :, None, None], every_head))[..., None, None]
    mix_key, mix_value = args.mixing.key.astype(compute), args.mixing.value.astype(compute)

    def scores(key: Array, position: Array) -> Array:
        """``[B, K, q, P, tile]``."""
        if rope is not None:
            key = apply_rope(key, *(x[:, :, None] for x in tables(position * step)))
        if not rotates_pseudo:
            return dot("bkqls,lkr->bkqrs", dot("bkqh,bslh->bkqls", query, key), mix_key)
        mixed = dot("bslh,lkr->bkrsh", key.astype(compute), mix_key)
        mixed = apply_rope(mixed, *(x[None, None, :, None] for x in tables(numbers, with_factor=False)))
        return dot("bkqh,bkrsh->bkqrs", query, mixed.astype(key.dtype))

    def visit(state: State, number: Array) -> tuple[State, None]:
        # The last tile begins early enough to be whole, and leaves out what the one before it has seen.
        start = jnp.minimum(number * tile, key_len - tile)
        of_tile = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=tile, axis=1)
        ids, position = of_tile(args.key_segment_ids), of_tile(args.key_positions)
        new = start + jnp.arange(tile, dtype=jnp.int32) >= number * tile
        ids = jnp.where(new[None], ids, 0)
        key, value = (
            jnp.where((ids == 0)[:, :, None, None], jnp.zeros((), x.dtype), of_tile(x)) for x in (args.key, args.value)
        )
        logits = scores(key, position) * args.scale
        if args.logits_soft_cap is not None:
            logits = args.logits_soft_cap * jnp.tanh(logits / args.logits_soft_cap)
        by_key = masks.mask_index(position[:, None], numbers[None, :, None], pseudo, args.causal)[:, None, None]
        seen = masks.same_segment(id_row, ids[:, None, None, None])
        by_index = masks.visible_by_index(
            by_row, by_key, num_pseudo_heads=pseudo, causal=args.causal, window=args.window
        )
        logits = jnp.where(seen if by_index is None else seen & by_index, logits, -jnp.inf)

        top = jnp.maximum(state.top, jax.lax.stop_gradient(jnp.max(logits, axis=(3, 4), keepdims=True)))
        finite = jnp.where(top > -jnp.inf, top, 0.0)
        shrink, weights = jnp.exp(state.top - finite), jnp.exp(logits - finite)
        mixed = dot("bkqrs,lkr->bkqls", weights, mix_value).astype(value.dtype)
        return (
            State(
                top,
                state.total * shrink + jnp.sum(weights, axis=(3, 4), keepdims=True),
                state.out * shrink[..., 0] + dot("bkqls,bsld->bkqd", mixed, value),
            ),
            None,
        )

    narrow = (*query.shape[:3], 1, 1)
    start = State(
        jnp.full(narrow, -jnp.inf, compute),
        jnp.zeros(narrow, compute),
        jnp.zeros((*query.shape[:3], args.value.shape[3]), compute),
    )
    count = jnp.arange(-(-key_len // tile), dtype=jnp.int32)
    state = jax.lax.scan(jax.checkpoint(visit, prevent_cse=False), start, count)[0]
    total = jnp.where(state.total > 0, state.total, 1.0)[..., 0]
    out = (state.out / total).reshape(batch, heads, tokens * pseudo, -1)
    return mixing.collapse(jnp.swapaxes(out, 1, 2), args.mixing.collapse, args.precision).astype(args.query.dtype)
