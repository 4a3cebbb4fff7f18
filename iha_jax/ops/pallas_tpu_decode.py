"""Decoding on a TPU: a few queries over a cache of base keys and values, which is read once and never unfolded.

Everything that has the queries' size is prepared and finished in XLA: pseudo-queries go in, pseudo-outputs come out
and are collapsed. The kernel reads the cache as it lies in memory. Forward only: gradients come from `blockwise`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from iha_jax.ops import masks, mixing
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.block_sizes import FEW_QUERIES
from iha_jax.ops.blockwise import blockwise
from iha_jax.ops.lowering import no_gradient, on_platform
from iha_jax.ops.pallas_tpu_decode_kernel import Inputs, decode_kernel
from iha_jax.ops.pallas_tpu_decode_plan import DecodeSpec, decode_plan
from iha_jax.ops.pallas_tpu_plan import DoesNotFit
from iha_jax.ops.pallas_tpu_spec import LANES
from iha_jax.ops.rope import apply_rope, rope_tables, turn_limbs

_ARRAYS = (
    *("query", "key", "value", "mixing", "query_positions", "key_positions", "query_segment_ids", "key_segment_ids"),
)


def is_decoding(args: Arguments) -> bool:
    """Whether these are a few queries over other tokens' keys, for which `pallas_tpu_decode` is made."""
    return args.query.shape[1] < min(FEW_QUERIES, args.key.shape[1])


def why_not_decode(args: Arguments) -> str | None:
    """The reason why the decoding kernel cannot serve these arguments, or None where it can."""
    if args.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the decoding kernel computes in float32 or bfloat16, got {args.query.dtype}"
    try:
        decode_plan(args)
    except DoesNotFit as reason:
        return str(reason)
    return None


def pallas_tpu_decode(args: Arguments) -> Array:
    """Serves whatever `why_not_decode` has nothing against; padding need not be cleared.

    Returns:
      ``[B, T, N, Hv]`` in the query's dtype.
    """
    static = tuple((x.name, getattr(args, x.name)) for x in dataclasses.fields(args) if x.name not in _ARRAYS)
    return iha_decode(static, {name: getattr(args, name) for name in _ARRAYS})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def iha_decode(static: tuple[tuple[str, Any], ...], arrays: dict[str, Any]) -> Array:
    """The operation as a differentiable function of its arrays."""
    args = Arguments(**arrays, **dict(static))
    spec = decode_plan(args)
    operands = decode_inputs(args, spec)
    pseudo_out: Any = on_platform("tpu", functools.partial(decode_kernel, spec), *operands)
    heads, tokens = args.mixing.num_heads, args.query.shape[1]
    shared, pseudo = heads // spec.kv_heads, spec.pseudo
    pseudo_out = pseudo_out[:, :, : shared * tokens * pseudo].reshape(-1, heads, tokens * pseudo, spec.value_dim)
    out = mixing.collapse(jnp.swapaxes(pseudo_out, 1, 2), args.mixing.collapse, args.precision)
    return out.astype(args.query.dtype)


def _decode_forward(static, arrays):
    return iha_decode(static, arrays), arrays


def _decode_backward(static, arrays, d_out):
    floating = {name: arrays[name] for name in ("query", "key", "value", "mixing")}

    def attend(floating):
        return blockwise(Arguments(**{**arrays, **floating}, **dict(static)))

    (gradients,) = jax.vjp(attend, floating)[1](d_out)
    none = {name: no_gradient(x) for name, x in arrays.items() if name not in floating}
    return ({**gradients, **none},)


iha_decode.defvjp(_decode_forward, _decode_backward)


def decode_inputs(args: Arguments, spec: DecodeSpec) -> tuple[Inputs, Array, Array]:
    """The kernel's operands, and which tiles it visits (see `decode_kernel`)."""
    pseudo = jnp.arange(spec.pseudo, dtype=jnp.int32)
    query_id, token_index, piece_id = _segments(args, spec)
    numbers = pseudo[None, None]
    query_index = masks.mask_index(args.query_positions[:, :, None], numbers, spec.pseudo, args.causal)  # [B, T, P]
    key_position = _fit(args.key_positions, 1, spec.tiles * spec.tile)
    key_index = masks.mask_index(key_position[:, :, None], numbers, spec.pseudo, args.causal)

    shared = args.mixing.num_heads // spec.kv_heads
    rows = (spec.batch, shared, *query_index.shape[1:])
    row_index = [
        jnp.broadcast_to(query_index[:, None], rows),
        jnp.broadcast_to(query_id[:, None, :, None], rows),
    ]
    row_index = [_fit(x.reshape(spec.batch, -1), 1, spec.rows, masks.PADDED_QUERY) for x in row_index]
    row_index = jnp.stack(row_index, axis=2)

    pieces = (spec.batch, spec.tiles, spec.pieces, spec.piece)
    piece_id = jnp.broadcast_to(piece_id[:, :, None], key_index.shape)
    piece_index = jnp.stack([key_index.reshape(pieces), piece_id.reshape(pieces)], axis=3)

    turns = key_rotation = half_swap = None
    if args.rope is not None:
        freqs, _ = args.rope.frequencies(spec.head_dim, spec.pseudo)
        sign = np.repeat([-1.0, 1.0], spec.head_dim // 2).astype(np.float32)
        turns = jnp.asarray(np.stack([np.tile(x, 2) for x in turn_limbs(freqs)]).view(np.int32))
        rolls = spec.head_dim % LANES == 0
        if not rolls:
            half_swap = jnp.asarray(np.roll(np.eye(spec.head_dim), spec.head_dim // 2, axis=1) * sign, spec.dtype)
        if not spec.base_scores:
            tables = rope_tables(pseudo, args.rope, spec.head_dim, spec.pseudo, with_factor=False)
            cos, sin = (jnp.tile(jnp.concatenate([x, x], axis=1), (spec.group, 1)) for x in tables)
            key_rotation = jnp.stack([cos, sin * sign[None] if rolls else sin])
    inputs = Inputs(
        query=_pseudo_queries(args, spec),
        key=_fit(args.key, 1, max(spec.tile, args.key.shape[1])),
        value=_fit(args.value, 1, max(spec.tile, args.key.shape[1])),
        row_index=row_index,
        token_index=token_index,
        piece_index=piece_index,
        mix_key=_mix_key(args.mixing.key, spec),
        mix_value=jnp.swapaxes(_by_piece(args.mixing.value, spec), 2, 3),
        turns=turns,
        key_rotation=key_rotation,
        half_swap=half_swap,
    )
    seen = _visible_tiles(query_index, query_id, key_index, piece_id, spec)
    counts = jnp.sum(seen, axis=1, dtype=jnp.int32)
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32)
    step = jnp.minimum(jnp.arange(spec.tiles, dtype=jnp.int32)[None], jnp.maximum(counts - 1, 0)[:, None])
    return inputs, jnp.take_along_axis(order, step, axis=1), counts


def _segments(args: Arguments, spec: DecodeSpec) -> tuple[Array, Array, Array]:
    """Segments of queries ``[B, T]``, position and segment of tokens in tiles, segments of keys ``[B, S]``.

    Padding, which sees nothing and is not seen, gets the segments of `masks` that never agree.
    """
    length = spec.tiles * spec.tile
    query = jnp.where(args.query_segment_ids == 0, masks.PADDED_QUERY, args.query_segment_ids)
    key = _fit(args.key_segment_ids, 1, length)
    tokens = jnp.stack([_fit(args.key_positions, 1, length), key], axis=1)
    tokens = tokens.reshape(spec.batch, 2, spec.tiles, spec.tile).swapaxes(1, 2)
    return query, tokens, jnp.where(key == 0, masks.PADDED_KEY, key)


def _visible_tiles(query_index: Array, query_id: Array, key_index: Array, key_id: Array, spec: DecodeSpec) -> Array:
    """Whether any query may see anything of a tile, bool ``[B, tiles]``: by segment and the range of indices."""

    def of_tile(x: Array) -> Array:
        return x.reshape(spec.batch, 1, spec.tiles, -1)

    key_index, key_id = of_tile(key_index), of_tile(key_id)
    low = jnp.min(query_index, axis=2)[:, :, None, None]
    high = jnp.max(query_index, axis=2)[:, :, None, None]
    seen = query_id[:, :, None, None] == key_id
    lower, upper = spec.distance
    # Differences, as indices may wrap around.
    if lower is not None:
        seen = seen & (high - key_index >= lower)
    if upper is not None:
        seen = seen & (low - key_index < upper)
    return jnp.any(seen, axis=(1, 3))


def _pseudo_queries(args: Arguments, spec: DecodeSpec) -> Array:
    """``[B, K, rows, H]``, rotated and scaled, rounded once."""
    query = jnp.where((args.query_segment_ids == 0)[:, :, None, None], jnp.zeros_like(args.query), args.query)
    mixed = mixing.mix(query.astype(jnp.float32), args.mixing.query, args.precision)  # [B, T, N, P, H]
    if args.rope is not None:
        index = args.query_positions[:, :, None] * spec.index_step
        if args.rope.positions == "virtual":
            index = index + jnp.arange(spec.pseudo, dtype=jnp.int32)[None, None]
        tables = rope_tables(index, args.rope, spec.head_dim, spec.pseudo)
        mixed = apply_rope(mixed, *(x[:, :, None] for x in tables))
    scale = args.scale * np.log2(np.e) if spec.logits_soft_cap is None else args.scale / spec.logits_soft_cap
    mixed = (mixed * jnp.float32(scale)).astype(spec.dtype)
    mixed = jnp.swapaxes(mixed, 1, 2).reshape(spec.batch, spec.kv_heads, -1, spec.head_dim)  # [B, K, (x T P), H]
    return _fit(mixed, 2, spec.rows)


def _mix_key(weights: Array, spec: DecodeSpec) -> Array:
    if spec.base_scores:
        return _by_piece(weights, spec)
    x = _kron(weights, spec.group).transpose(2, 3, 4, 0, 1)  # [k, token, r, token, l]
    x = x.reshape(spec.kv_heads, spec.group * spec.pseudo, -1)
    return _fit(x, 2, spec.base).astype(spec.dtype)


def _by_piece(weights: Array, spec: DecodeSpec) -> Array:
    """``[L, K, P]`` -> ``[K, span, base, piece]``: columns (token, pseudo-head) of a piece, rows of one group."""
    x = _kron(weights, spec.span * spec.group)  # [token, l, k, token, r]
    x = x.reshape(spec.span, -1, spec.kv_heads, spec.piece)
    return _fit(x, 1, spec.base).transpose(2, 0, 1, 3).astype(spec.dtype)


def _kron(weights: Array, tokens: int) -> Array:
    """``[L, K, P]`` -> ``[token, L, K, token, P]``: the same mixing for each token, nothing between tokens."""
    eye = jnp.eye(tokens, dtype=jnp.float32)
    return weights.astype(jnp.float32)[None, :, :, None, :] * eye[:, None, None, :, None]


def _fit(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    """An axis padded to ``size`` entries."""
    if x.shape[axis] == size:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width, constant_values=fill)
