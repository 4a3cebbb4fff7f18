"""Building blocks of the fused TPU kernels: what happens to one tile inside on-chip memory.

Orders of rows. *Base* rows of a group of g tokens are (source head, token): heads arrive side by side in lanes, so a
group's rows are filled by copies of g rows. *Pseudo-queries* of a group are (pseudo-head, token): a sum over
pseudo-heads then adds whole registers, and repeats every `Spec.unit` rows. *Pseudo-keys* are (token, pseudo-head), in
the order of the virtual index, so a window is one slice of them whatever the group.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops.pallas_tpu_plan import Spec
from iha_jax.ops.pallas_tpu_prepare import Rotation

MASKED = -1e30
"""Added to logits of invisible keys."""

LOWEST = -1e29
"""Least row maximum: where all keys are masked every weight is then exp(-9e29) = 0 rather than 1."""

F32 = jnp.float32


def dot(spec: Spec, a: Array, b: Array, over: tuple[int, int] = (1, 0)) -> Array:
    """Product of two matrices over axes ``over``, accumulated and returned in float32."""
    # bfloat16 products are exact; Mosaic refuses a precision for them.
    precision = spec.precision if a.dtype == F32 else None
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=F32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + H/2) of rows in float32."""
    return x * cos + pltpu.roll(x, x.shape[1] // 2, 1) * sin


def unrotate(x: Array, cos: Array, sin: Array) -> Array:
    """The transpose of `rotate`."""
    return x * cos - pltpu.roll(x, x.shape[1] // 2, 1) * sin


def gather_base(x_ref, base_ref, rows_ref, rotation: Rotation | None, heads: int, group: int, dim: int) -> None:
    """Heads side by side to base rows, rotated by their token's index.

    Args:
      x_ref: ``[1, tile, heads*dim]``.
      base_ref: float32 ``[groups, >= heads*group, dim]``, written.
      rows_ref: float32 ``[tile, >= dim]``, scratch.
      rotation: refs ``[1, tile, dim]``, or None.
      heads: heads in x.
      group: tokens of a group.
      dim: their size in lanes.
    """
    for head in range(heads):
        x = x_ref[0, :, head * dim : (head + 1) * dim].astype(F32)
        if rotation is not None:
            x = rotate(x, rotation.cos[0], rotation.sin[0])
        rows_ref[:, :dim] = x
        for i in range(base_ref.shape[0]):
            base_ref[i, head * group : (head + 1) * group, :] = rows_ref[i * group : (i + 1) * group, :dim]


def scatter_base(base_ref, out_ref, rows_ref, rotation: Rotation | None, heads: int, group: int, dim: int) -> None:
    """The transpose of `gather_base`: gradients of base rows to gradients of heads side by side."""
    for head in range(heads):
        for i in range(base_ref.shape[0]):
            rows_ref[i * group : (i + 1) * group, :dim] = base_ref[i, head * group : (head + 1) * group, :]
        x = rows_ref[:, :dim]
        if rotation is not None:
            x = unrotate(x, rotation.cos[0], rotation.sin[0])
        out_ref[0, :, head * dim : (head + 1) * dim] = x.astype(out_ref.dtype)


def mix_group(spec: Spec, weights: Array, base: Array, rotation: Rotation | None, scale: float = 1.0) -> Array:
    """Pseudo-heads of one group: ``[P*g, M*g]`` times ``[M*g, H]``, rotated by their number, in the inputs' dtype."""
    mixed = dot(spec, weights, base)
    if rotation is not None:
        mixed = rotate(mixed, rotation.cos[...], rotation.sin[...])
    return (mixed * scale if scale != 1.0 else mixed).astype(spec.dtype)


def pseudo_queries(spec: Spec, weights: Array, base_ref, rotation: Rotation | None) -> Array:
    """All pseudo-queries of a head's tile ``[rows, H]``, multiplied by what turns products into logits."""
    groups = [
        mix_group(spec, weights, base_ref[i].astype(spec.dtype), rotation, score_scale(spec))
        for i in range(spec.query_groups)
    ]
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=0)


def score_scale(spec: Spec) -> float:
    """The factor of pseudo-queries: the scale, over the cap where there is one (the argument of tanh)."""
    return spec.scale if spec.logits_soft_cap is None else spec.scale / spec.logits_soft_cap


def logits(spec: Spec, query: Array, key: Array, bias: Array) -> tuple[Array, Array | None]:
    """Masked logits ``[rows, chunk]`` and their derivative by the capped product where there is a cap."""
    scores = dot(spec, query, key, (1, 1))
    if spec.logits_soft_cap is None:
        return scores + bias, None
    bent = jnp.tanh(scores)
    return bent * spec.logits_soft_cap + bias, spec.logits_soft_cap * (1.0 - bent * bent)


def as_column(x: Array) -> Array:
    """int32 ``[1, n]`` -> ``[n, 1]`` without a transposition: masked sums of two halves that float32 holds exactly."""
    n = x.shape[1]
    same = lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(jnp.int32, (n, n), 1)

    def column(half: Array) -> Array:
        spread = jnp.where(same, jnp.broadcast_to(half.astype(F32), (n, n)), 0.0)
        return jnp.sum(spread, axis=1, keepdims=True).astype(jnp.int32)

    return column(x >> 16) * 65536 + column(x & 0xFFFF)


def mask_bias(spec: Spec, query: tuple[Array, Array], key: Array) -> Array:
    """0 where a key is visible and `MASKED` elsewhere.

    Args:
      spec: static description.
      query: index and segment of the queries, int32 ``[rows, 1]`` each.
      key: index and segment of the keys, int32 ``[2, chunk]``.
    """
    seen = query[1] == key[1:2]
    lower, upper = spec.distance
    if lower is not None or upper is not None:
        distance = query[0] - key[0:1]
        if lower is not None:
            seen = seen & (distance >= lower)
        if upper is not None:
            seen = seen & (distance < upper)
    return jnp.where(seen, 0.0, MASKED)


def per_unit(spec: Spec, x: Array) -> Array:
    """Sums rows of pseudo-queries that belong to the same row of a unit: ``[rows, c]`` -> ``[groups*unit, c]``."""
    x = x.reshape(spec.query_groups, spec.rows // (spec.query_groups * spec.unit), spec.unit, x.shape[1])
    return jnp.sum(x, axis=1).reshape(spec.query_groups * spec.unit, x.shape[3])


def over_units(spec: Spec, x: Array, units: Array, combine) -> Array:
    """Combines ``[rows, c]`` with ``[groups*unit, c]``, repeated for every turn of a unit."""
    split = x.reshape(spec.query_groups, spec.rows // (spec.query_groups * spec.unit), spec.unit, x.shape[1])
    units = units.reshape(spec.query_groups, 1, spec.unit, units.shape[1])
    return combine(split, units).reshape(x.shape)


def reciprocal(total: Array) -> Array:
    """1/total, 0 for a query that saw nothing."""
    seen = total > 0
    return jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)


def chunk_range(spec: Spec, tile: Array) -> tuple[Array | int, Array | int]:
    """The chunks a tile of queries can see (global)."""
    left, right = spec.reach
    low, high = 0, spec.chunks
    if left is not None:
        low = lax.div(jnp.maximum(tile * spec.rows - left, 0), spec.chunk)
    if right is not None:
        high = jnp.minimum(lax.div((tile + 1) * spec.rows + (right + spec.chunk - 1), spec.chunk), spec.chunks)
    return low, high


def for_each(count: int, body) -> None:
    """A loop without a carry; unrolled where there is one turn."""
    if count == 1:
        body(0)
        return

    def step(i, carry):
        body(i)
        return carry

    lax.fori_loop(0, count, step, 0)


def zero(ref) -> None:
    """Clears a ref, one entry of its first axis after the other."""

    def clear(i):
        ref[i] = jnp.zeros(ref.shape[1:], ref.dtype)

    for_each(ref.shape[0], clear)


def window_start(spec: Spec, step: Array) -> tuple[Array | int, Array | int, Array | int]:
    """Local: where in the buffer the oldest tile, a query tile's chunk and the newest tile start."""
    slot = lax.rem(step, spec.slots) * spec.rows if spec.slots > 1 else 0
    aligned = lambda x: x if isinstance(x, int) else pl.multiple_of(x, 16)  # noqa: E731
    return aligned(slot), aligned(slot + (spec.lag * spec.rows - spec.history)), aligned(slot + spec.lag * spec.rows)


def advance(spec: Spec, step: Array, *buffers) -> None:
    """Local: once the buffer is full, moves the tiles that are still needed to its start."""
    if spec.lag == 0:
        return
    kept, source = spec.lag * spec.rows, spec.slots * spec.rows

    @pl.when((step > 0) & (lax.rem(step, spec.slots) == 0))
    def _():
        def move(head):
            for buffer in buffers:
                buffer[head, 0:kept, :] = buffer[head, source : source + kept, :]

        for_each(spec.kv_heads, move)


def store_pseudo_keys(spec: Spec, start, key_base, value_base, weights, key_buffer, value_buffer) -> None:
    """Mixes the newest tile of keys and values into the buffers."""
    size = spec.key_group * spec.pseudo

    def one(head):
        for i in range(spec.key_groups):
            at = pl.ds(start + i * size, size)
            key = key_base[i].astype(spec.dtype)
            key_buffer[head, at, :] = mix_group(spec, weights.key[head], key, weights.key_rotation)
            value = value_base[i].astype(spec.dtype)
            value_buffer[head, at, :] = mix_group(spec, weights.value[head], value, None)

    for_each(spec.kv_heads, one)


def kv_head(spec: Spec, head):
    """The key/value head that serves a query head."""
    shared = spec.heads // spec.kv_heads
    return head if shared == 1 else (head // shared if isinstance(head, int) else lax.div(head, shared))
