"""The decoding kernel: a few queries against a long cache of base keys and values, one tile of it after the other.

Pseudo-values never exist: probabilities are mixed down to base values' rows (`paper.md` section 7). Pseudo-keys exist
for the tile in hand only, and not at all where scores can be mixed instead. Which keys a query sees follows from
positions and segments alone, so the cache may be ragged or a ring; tiles that no query sees are neither fetched nor
computed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_decode_plan import DecodeSpec
from iha_jax.ops.pallas_tpu_memory import VMEM_LIMIT
from iha_jax.ops.pallas_tpu_spec import LANES
from iha_jax.ops.rope import fractional_turns

F32 = jnp.float32

# Of a description they read only what both kinds have: precision and allowed distances.
_dot: Callable[..., Array] = tile.dot
_mask_bias: Callable[..., Array] = tile.mask_bias


class Inputs(NamedTuple):
    """Operands in main memory (block specs around them and refs inside: hence Any).

    Attributes:
      query: pseudo-queries, rotated and scaled to logits over log 2, ``[B, K, rows, H]``.
      key: ``[B, S, L, H]``, the cache as it is.
      value: ``[B, S, L, Hv]``.
      row_index: mask index and segment of every row, int32 ``[B, rows, 2]``.
      token_index: position and segment of every cached token, int32 ``[B, tiles, 2, tile]``; 0 beyond the end.
      piece_index: mask index and segment of every pseudo-key, int32 ``[B, tiles, pieces, 2, piece]``.
      mix_key: for pseudo-keys ``[K, group*P, base]``, rows (token, pseudo-head), columns (token, source); for scores
        from base products ``[K, span, base, piece]``.
      mix_value: ``[K, span, piece, base]``.
      turns: the rotary frequencies of a head's lanes as words of `turn_limbs`, int32 ``[2, H]``, or None.
      key_rotation: cos and sin of what rotates pseudo-keys by their number, float32 ``[2, group*P, H]``, or None.
      half_swap: ``[H, H]``: a product with it swaps the halves of a head and negates the new first one, or None
        where rolling lanes does.
    """

    query: Any
    key: Any
    value: Any
    row_index: Any
    token_index: Any
    piece_index: Any
    mix_key: Any
    mix_value: Any
    turns: Any
    key_rotation: Any
    half_swap: Any


class Scratch(NamedTuple):
    """On-chip memory."""

    key_base: Any  # float32 [groups, base, H]
    value_base: Any  # float32 [groups, base, Hv]
    turned: Any  # float32 [2, base, H]: cos and sin of a group's base rows
    tables: Any  # float32 [2, tile, H]: cos and sin of the tile's tokens
    live: Any  # float32 [tile, 128]: 1 where a token is not padding
    keys: Any  # pseudo-keys [K, tile*P, H], or scores of base products float32 [groups, K*rows, base]
    bias: Any  # float32 [pieces, rows, piece]
    scores: Any  # float32 [pieces, rows, piece]
    weights: Any  # [groups, K*rows, base]
    out: Any  # float32 [K*rows, Hv]
    top: Any  # float32 [K*rows, 128], running maximum of each row, the same in all lanes
    total: Any  # float32 [K*rows, 128], running sum
    shrink: Any  # float32 [K*rows, 128], what a tile's new maximum makes of earlier sums


def decode_kernel(spec: DecodeSpec, inputs: Inputs, tile_at: Array, counts: Array, *, interpret: Any) -> Array:
    """Runs the kernel.

    Args:
      spec: static description.
      inputs: operands.
      tile_at: int32 ``[B, tiles]``, first the tiles to visit, then the last of them repeated.
      counts: int32 ``[B]``, how many to visit.
      interpret: as of `pallas_call`.

    Returns:
      Pseudo-outputs, float32 ``[B, K, rows, Hv]``.
    """
    arrays, structure = jax.tree.flatten(inputs)
    rows = spec.kv_heads * spec.rows
    if spec.base_scores:
        keys = pltpu.VMEM((spec.groups, rows, spec.base), F32)
    else:
        keys = pltpu.VMEM((spec.kv_heads, spec.tile * spec.pseudo, spec.head_dim), jnp.dtype(spec.dtype))
    scratch = Scratch(
        key_base=pltpu.VMEM((spec.groups, spec.base, spec.head_dim), F32),
        value_base=pltpu.VMEM((spec.groups, spec.base, spec.value_dim), F32),
        turned=pltpu.VMEM((2, spec.base, spec.head_dim), F32),
        tables=pltpu.VMEM((2, spec.tile, spec.head_dim), F32),
        live=pltpu.VMEM((spec.tile, LANES), F32),
        keys=keys,
        bias=pltpu.VMEM((spec.pieces, spec.rows, spec.piece), F32),
        scores=pltpu.VMEM((spec.pieces, spec.rows, spec.piece), F32),
        weights=pltpu.VMEM((spec.groups, rows, spec.base), jnp.dtype(spec.dtype)),
        out=pltpu.VMEM((rows, spec.value_dim), F32),
        top=pltpu.VMEM((rows, LANES), F32),
        total=pltpu.VMEM((rows, LANES), F32),
        shrink=pltpu.VMEM((rows, LANES), F32),
    )

    def of_row(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, j, at, n: (b,) + (0,) * (x.ndim - 1))

    def of_cache(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, spec.tile, *x.shape[2:]), lambda b, j, at, n: (b, at[b, j], 0, 0))

    def of_tile(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, j, at, n: (b, at[b, j]) + (0,) * (x.ndim - 2))

    def whole(x: Array | None) -> pl.BlockSpec | None:
        if x is None:
            return None
        return pl.BlockSpec(x.shape, lambda b, j, at, n: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))

    in_specs = Inputs(
        query=of_row(inputs.query),
        key=of_cache(inputs.key),
        value=of_cache(inputs.value),
        row_index=of_row(inputs.row_index),
        token_index=of_tile(inputs.token_index),
        piece_index=of_tile(inputs.piece_index),
        mix_key=whole(inputs.mix_key),
        mix_value=whole(inputs.mix_value),
        turns=whole(inputs.turns),
        key_rotation=whole(inputs.key_rotation),
        half_swap=whole(inputs.half_swap),
    )
    out_shape = (spec.batch, spec.kv_heads, spec.rows, spec.value_dim)
    return pl.pallas_call(
        functools.partial(_kernel, spec, structure),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.batch, spec.tiles),
            in_specs=jax.tree.leaves(in_specs),
            out_specs=pl.BlockSpec((1, *out_shape[1:]), lambda b, j, at, n: (b, 0, 0, 0)),
            scratch_shapes=list(scratch),
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, F32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=decode_cost(spec),
        interpret=interpret,
        name="iha_decode",
    )(tile_at, counts, *arrays)


def decode_products(spec: DecodeSpec) -> list[tuple[str, int, int, int, int]]:
    """Every matrix product as (name, times, m, k, n), if all tiles are visited."""
    tiles, rows = spec.batch * spec.tiles, spec.kv_heads * spec.rows
    groups, pseudo_rows = tiles * spec.groups, spec.group * spec.pseudo
    by_piece = tiles * spec.kv_heads * spec.pieces
    found = [
        ("mix weights", by_piece * spec.span, spec.rows, spec.piece, spec.base),
        ("values", groups, rows, spec.base, spec.value_dim),
    ]
    if spec.base_scores:
        parts = 1 if spec.dtype == "float32" else 2
        return [
            *found,
            ("base scores", groups, rows, spec.head_dim, spec.base),
            ("mix scores", by_piece * spec.span * parts, spec.rows, spec.base, spec.piece),
        ]
    return [
        *found,
        ("mix keys", groups, spec.kv_heads * pseudo_rows, spec.base, spec.head_dim),
        ("scores", by_piece, spec.rows, spec.head_dim, spec.piece),
    ]


def decode_cost(spec: DecodeSpec) -> pl.CostEstimate:
    """What the compiler is told about a call: that of a full cache."""
    size = jnp.dtype(spec.dtype).itemsize
    tokens, rows = spec.batch * spec.tiles * spec.tile, spec.kv_heads * spec.rows
    moved = tokens * spec.key_sources * (spec.head_dim + spec.value_dim) * size
    moved += tokens * 8 * (1 + spec.pseudo) + spec.batch * rows * (spec.head_dim * size + spec.value_dim * 4)
    return pl.CostEstimate(
        flops=sum(2 * times * m * k * n for _, times, m, k, n in decode_products(spec)),
        bytes_accessed=moved,
        transcendentals=tokens * spec.pseudo * rows * (1 if spec.logits_soft_cap is None else 2),
    )


def _kernel(spec: DecodeSpec, structure, tile_at_ref, counts_ref, *refs) -> None:
    del tile_at_ref  # the index maps read it
    count = structure.num_leaves
    inputs = jax.tree.unflatten(structure, refs[:count])
    out_ref, scratch = refs[count], Scratch(*refs[count + 1 :])
    row, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def _():
        # Base rows that only pad a group are multiplied by zeros and must be finite.
        for ref in (scratch.key_base, scratch.value_base, scratch.turned):
            tile.zero(ref)
        scratch.out[...] = jnp.zeros_like(scratch.out)
        scratch.total[...] = jnp.zeros_like(scratch.total)
        scratch.top[...] = jnp.full_like(scratch.top, tile.LOWEST)

    @pl.when(step < counts_ref[row])
    def _():
        _visit(spec, inputs, scratch)

    @pl.when(step == spec.tiles - 1)
    def _():
        def write(head):
            at = pl.ds(_multiple(head * spec.rows), spec.rows)
            over = tile.reciprocal(scratch.total[at, :], spec.dtype, positive=False)[:, 0:1]
            out_ref[0, head] = scratch.out[at, :] * over

        tile.for_each(spec.kv_heads, write)


def _visit(spec: DecodeSpec, inputs: Inputs, scratch: Scratch) -> None:
    _describe_tokens(spec, inputs, scratch)
    _gather(spec, inputs, scratch)
    if spec.base_scores:
        query = inputs.query[0].reshape(spec.kv_heads * spec.rows, spec.head_dim)

        def base_scores(i):
            scratch.keys[i] = _dot(spec, query, scratch.key_base[i].astype(spec.dtype), (1, 1))

        tile.for_each(spec.groups, base_scores)
    else:
        _mix_keys(spec, inputs, scratch)

    query_index = inputs.row_index[0, :, 0:1], inputs.row_index[0, :, 1:2]
    for j in range(spec.pieces):
        scratch.bias[j] = _mask_bias(spec, query_index, inputs.piece_index[0, 0, j])
    tile.for_each(spec.kv_heads, functools.partial(_attend, spec, inputs, scratch))

    scratch.out[...] = scratch.out[...] * scratch.shrink[:, 0:1]

    def add_values(i):
        scratch.out[...] += _dot(spec, scratch.weights[i], scratch.value_base[i].astype(spec.dtype))

    tile.for_each(spec.groups, add_values)


def _describe_tokens(spec: DecodeSpec, inputs: Inputs, scratch: Scratch) -> None:
    """Which of the tile's tokens are alive, and their rotations."""
    for start in range(0, spec.tile, LANES):
        stop = min(start + LANES, spec.tile)
        ids = tile.as_column(inputs.token_index[0, 0, 1:2, start:stop])
        scratch.live[start:stop] = jnp.broadcast_to(jnp.where(ids != 0, 1.0, 0.0), (stop - start, LANES))
        if inputs.turns is None:
            continue
        index = tile.as_column(inputs.token_index[0, 0, 0:1, start:stop]) * spec.index_step
        words = lax.bitcast_convert_type(inputs.turns[...], jnp.uint32)
        cos, sin = _cos_sin(fractional_turns(index, words[0:1], words[1:2]))
        if inputs.half_swap is None:
            lane = lax.broadcasted_iota(jnp.int32, sin.shape, 1)
            sin = jnp.where(lane < spec.head_dim // 2, -sin, sin)
        scratch.tables[0, start:stop] = cos * spec.rope_factor
        scratch.tables[1, start:stop] = sin * spec.rope_factor


def _cos_sin(turns: Array) -> tuple[Array, Array]:
    """Of fixed-point turns (2**32 is one), float32: Taylor's series within an eighth of a turn, off by 3e-8."""
    quarter = (turns + 2**29) >> 30
    x = (turns - (quarter << 30)).astype(F32) * (2 * math.pi / 2**32)
    square = x * x
    sin = x * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    # Quarters 1 and 2 (modulo 4) have a negative cosine, 2 and 3 a negative sine.
    return jnp.where(((quarter + 1) & 2) == 2, -cos, cos), jnp.where((quarter & 2) == 2, -sin, sin)


def _gather(spec: DecodeSpec, inputs: Inputs, scratch: Scratch) -> None:
    """Cached heads to base rows (token, source) of their group, padding cleared, keys rotated by their token."""
    sources = spec.key_sources

    def of_group(i):
        for t in range(spec.group):
            token, rows = i * spec.group + t, slice(t * sources, (t + 1) * sources)
            live = scratch.live[pl.ds(token, 1), :][:, 0:1] > 0
            for ref, base in ((inputs.key, scratch.key_base), (inputs.value, scratch.value_base)):
                x = ref[0, token].astype(F32)
                base[i, rows, :] = jnp.where(jnp.broadcast_to(live, x.shape), x, 0.0)
            if inputs.turns is not None:
                for k in (0, 1):
                    x = scratch.tables[k, pl.ds(token, 1), :]
                    scratch.turned[k, rows, :] = jnp.broadcast_to(x, (sources, spec.head_dim))
        if inputs.turns is not None:
            x = scratch.key_base[i]
            swapped = _swapped(spec, x, inputs)
            scratch.key_base[i] = x * scratch.turned[0] + swapped * scratch.turned[1]

    tile.for_each(spec.groups, of_group)


def _swapped(spec: DecodeSpec, x: Array, inputs: Inputs) -> Array:
    """Halves of heads swapped, for the sine's part of a rotation, the new first one negated or its table is."""
    if inputs.half_swap is None:
        return pltpu.roll(x, spec.head_dim // 2, 1)
    swap = inputs.half_swap[...]
    # Its entries are 0 and ±1: exact in bfloat16 for what comes from a bfloat16 cache.
    precision = lax.Precision.HIGHEST if swap.dtype == F32 else None
    return lax.dot_general(
        x.astype(swap.dtype), swap, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=F32
    )


def _mix_keys(spec: DecodeSpec, inputs: Inputs, scratch: Scratch) -> None:
    """Pseudo-keys of every head of the tile, rotated by their number."""
    size = spec.group * spec.pseudo
    weights = inputs.mix_key[...].reshape(spec.kv_heads * size, spec.base)

    def of_group(i):
        mixed = _dot(spec, weights, scratch.key_base[i].astype(spec.dtype))
        at = pl.ds(_multiple(i * size), size)
        for k in range(spec.kv_heads):
            part = mixed[k * size : (k + 1) * size]
            if inputs.key_rotation is not None:
                part = part * inputs.key_rotation[0] + _swapped(spec, part, inputs) * inputs.key_rotation[1]
            scratch.keys[k, at, :] = part.astype(spec.dtype)

    tile.for_each(spec.groups, of_group)


def _scores(spec: DecodeSpec, inputs: Inputs, scratch: Scratch, head, at, j: int) -> Array:
    """Logits over log 2 of one head's rows against one piece ``[rows, piece]``, or the cap's argument."""
    if not spec.base_scores:
        key = scratch.keys[head, j * spec.piece : (j + 1) * spec.piece, :]
        return _dot(spec, inputs.query[0, head], key, (1, 1))
    parts = []
    for v in range(spec.span):
        base, weights = scratch.keys[j * spec.span + v, at, :], inputs.mix_key[head, v]
        high = base.astype(weights.dtype)
        parts.append(_dot(spec, high, weights))
        if weights.dtype != F32:
            # Scores, unlike heads, have few terms over which rounding errors would even out.
            low = (base - high.astype(F32)).astype(weights.dtype)
            parts.append(_dot(spec, low, weights))
    return functools.reduce(jnp.add, parts)


def _attend(spec: DecodeSpec, inputs: Inputs, scratch: Scratch, head) -> None:
    """One head's online softmax over the tile, and its weights of base values."""
    at = pl.ds(_multiple(head * spec.rows), spec.rows)
    top = scratch.top[at, :][:, 0:1]
    new = top
    for j in range(spec.pieces):
        scores = _scores(spec, inputs, scratch, head, at, j)
        if spec.logits_soft_cap is not None:
            scores = jnp.tanh(scores) * (spec.logits_soft_cap * tile.LOG2_E)
        scores = scores + scratch.bias[j]
        scratch.scores[j] = scores
        new = jnp.maximum(new, jnp.max(scores, axis=1, keepdims=True))
    shrink = jnp.exp2(top - new)
    total = scratch.total[at, :][:, 0:1] * shrink
    for j in range(spec.pieces):
        weights = jnp.exp2(scratch.scores[j] - new)
        total = total + jnp.sum(weights, axis=1, keepdims=True)
        weights = weights.astype(spec.dtype)
        for v in range(spec.span):
            mixed = _dot(spec, weights, inputs.mix_value[head, v])
            scratch.weights[j * spec.span + v, at, :] = mixed.astype(spec.dtype)
    for ref, x in ((scratch.top, new), (scratch.total, total), (scratch.shrink, shrink)):
        ref[at, :] = jnp.broadcast_to(x, (spec.rows, LANES))


def _multiple(start):
    """Row offsets are multiples of 16, which old compilers forget."""
    return start if isinstance(start, int) else pl.multiple_of(start, 16)
