"""Building blocks of the fused TPU kernels: what happens to one tile inside on-chip memory.

Orders of rows. *Base* rows of a group of g tokens are (source head, token): heads arrive side by side in lanes, so a
group's rows are filled by copies of g rows. *Pseudo-queries* of a group are (span of tokens, pseudo-head, token): a sum
over pseudo-heads then adds whole registers, and repeats every `Spec.unit` rows. *Pseudo-keys* are (token, pseudo-head),
in the order of the virtual index, so a window is one slice of them whatever the group.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops.pallas_tpu_prepare import Rotation
from iha_jax.ops.pallas_tpu_spec import LANES, Spec

MASKED = -1e30
"""Added to logits of invisible keys."""

LOWEST = -1e29
"""Least row maximum: where all keys are masked every weight is then exp(-9e29) = 0 rather than 1."""

F32 = jnp.float32

STACK_ROWS = 1600
"""Pseudo-rows of several heads mixed by one product."""

MIXED_TOGETHER = 20
"""Products of a mixing that are written out one after the other, at most."""

LOG2_E = math.log2(math.e)
"""Logits are kept in units of log 2: the hardware has powers of two, and the factor is free in scaled queries."""


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


class Mix(NamedTuple):
    """One mixing: of queries, keys or values.

    Attributes:
      weights: ref ``[heads, size, base rows]``.
      base: float32 ref ``[groups, base rows, dim]``.
      rotation: refs ``[size, dim]``, or None.
      scale: factor, in the rotation's tables where there are any.
      out: ref ``[heads, rows, dim]``, written from row ``start`` on.
      start: first row.
    """

    weights: Any
    base: Any
    rotation: Rotation | None
    scale: float
    out: Any
    start: Any


def mix_heads(spec: Spec, *mixes: Mix) -> None:
    """Pseudo-heads of all heads of a tile, rotated by their number, in the heads' dtype.

    Several heads go through one product, which spares loading the same base rows into the matrix unit again; mixings
    of the same shape go side by side, so that one is multiplied while another is rotated.
    """
    heads, size, base_rows = mixes[0].weights.shape
    groups = mixes[0].base.shape[0]
    stack = stack_of(heads, size * groups * len(mixes))

    def some(turn):
        first = turn * stack
        for mix in mixes:
            weights = mix.weights[pl.ds(first, stack)].reshape(stack * size, base_rows)
            for i in range(groups):
                mixed = dot(spec, weights, mix.base[i].astype(spec.dtype))
                for n in range(stack):
                    part = mixed[n * size : (n + 1) * size]
                    if mix.rotation is not None:
                        part = rotate(part, mix.rotation.cos[...], mix.rotation.sin[...])
                    elif mix.scale != 1.0:
                        part = part * mix.scale
                    mix.out[first + n, rows_at(mix.start, i * size, size), :] = part.astype(spec.dtype)

    # Written out: one product after the other waits for the rotation of its own result.
    for_each(heads // stack, some, together=MIXED_TOGETHER)


def rows_at(start, offset: int, size: int):
    """Rows from ``start + offset`` on; old compilers forget that a sum of multiples of 16 is one."""
    return pl.ds(start + offset if isinstance(start, int) else pl.multiple_of(start + offset, 16), size)


def stack_of(heads: int, rows: int) -> int:
    """How many heads, of so many pseudo-rows each, go through one product."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * rows <= STACK_ROWS))


def logits(spec: Spec, scores: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """Masked logits over log 2 from products ``[rows, chunk]``, and with a cap their derivative by these."""
    slope = None
    if spec.logits_soft_cap is not None:
        cap = spec.logits_soft_cap * LOG2_E
        bent = jnp.tanh(scores)
        scores, slope = bent * cap, cap * (1.0 - bent * bent)
    return (scores if bias is None else scores + bias), slope


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


def over_lanes(x: Array, width: int) -> Array:
    """``[rows, 128]``, the same in all lanes, repeated to ``width`` lanes: the same registers again."""
    return jnp.concatenate([x] * (width // x.shape[1]), axis=1) if width > x.shape[1] else x


def all_lanes(x: Array) -> Array:
    """``[rows, 1]`` -> ``[rows, 128]``: how a number for each row is kept; a sum over lanes lies in all of them."""
    return jnp.broadcast_to(x, (x.shape[0], LANES))


def top_of(spec: Spec, scores: Array) -> Array:
    """Row maxima of masked scores ``[rows, 1]``."""
    top = jnp.max(scores, axis=1, keepdims=True)
    return top if spec.sees_itself else jnp.maximum(top, LOWEST)


def per_unit(spec: Spec, x: Array) -> Array:
    """Sums rows of pseudo-queries that belong to the same row of a unit: ``[rows, c]`` -> ``[spans*unit, c]``."""
    split = _by_unit(spec, x)
    return jnp.sum(split, axis=1).reshape(-1, x.shape[1])


def over_units(spec: Spec, x: Array, units: Array, combine) -> Array:
    """Combines ``[rows, c]`` with ``[spans*unit, c]``, repeated for every turn of a unit."""
    units = units.reshape(-1, 1, spec.unit, units.shape[1])
    return combine(_by_unit(spec, x), units).reshape(x.shape)


def by_span(x: Array, weights: Array) -> Array:
    """``[rows, 128]`` times a span's ``[P*span, 128]``, the same for every span."""
    return (x.reshape(-1, *weights.shape) * weights[None]).reshape(x.shape)


def _by_unit(spec: Spec, x: Array) -> Array:
    size = spec.span * spec.pseudo
    return x.reshape(x.shape[0] // size, size // spec.unit, spec.unit, x.shape[1])


def reciprocal(total: Array, dtype: str, *, positive: bool) -> Array:
    """1/total; of 0, the total of a query that saw nothing and whose weights are 0, something finite.

    The hardware's approximation and Newton steps, each of which doubles the right digits: a third of the instructions
    of an exact division, and one step is enough for what is rounded to bfloat16.
    """
    if not positive:
        total = jnp.maximum(total, 1e-30)
    # jax 0.12 moved it.
    approximate = getattr(pltpu, "reciprocal", None) or pl.reciprocal
    guess = approximate(total, approx=True)
    for _ in range(1 if dtype == "bfloat16" else 2):
        guess = guess * (2.0 - total * guess)
    return guess


def chunk_range(spec: Spec, tile: Array) -> tuple[Array | int, Array | int]:
    """The chunks a tile of queries can see (global)."""
    left, right = spec.reach
    low, high = 0, spec.chunks
    if left is not None:
        low = lax.div(jnp.maximum(tile * spec.rows - left, 0), spec.chunk)
    if right is not None:
        high = jnp.minimum(lax.div((tile + 1) * spec.rows + (right + spec.chunk - 1), spec.chunk), spec.chunks)
    return low, high


def over_chunks(spec: Spec, tile: Array, body, carry):
    """``carry = body(chunk, carry, masked)`` over the chunks a tile of queries can see (global)."""
    low, high = chunk_range(spec, tile)
    if spec.free == "past":
        free = lax.div(tile * spec.rows, spec.chunk)
    else:
        free = spec.free // spec.chunk
    if not (isinstance(free, int) and free == 0):
        carry = lax.fori_loop(low, free, lambda j, carry: body(j, carry, False), carry)
        low = free
    return lax.fori_loop(low, high, lambda j, carry: body(j, carry, True), carry)


def for_each(count: int, body, together: int = 1) -> None:
    """A loop without a carry, ``together`` turns of ``body`` in one iteration; none where there is one iteration."""
    together = max(n for n in range(1, together + 1) if count % n == 0) if count else 1

    def step(i, carry):
        for k in range(together):
            body(i * together + k)
        return carry

    if count == together:
        step(0, 0)
    elif count:
        lax.fori_loop(0, count // together, step, 0)


def pipeline(count: int, most: int, *stages) -> None:
    """Runs every ``stage(head, slot)`` for all heads in order, each stage a turn behind the one before.

    One head's scores are on the matrix unit while those of the head before go through the exponential and the one
    before that is multiplied with values; what is handed over lies in one of two slots, which take turns. A stage may
    read what the two before it have left, the last stage only what the one before it has. The stages of one turn do
    not depend on each other, so the compiler can overlap them; it begins with those that it sees first.

    Args:
      count: heads.
      most: turns to write out, besides those at the start and the end in which not all stages have a head. The
        instructions of a turn take less time than the way from its first load to its last store, so turns in a row
        overlap; but every one of them takes time to compile.
      *stages: functions of a head and a slot.
    """
    # Later stages go before those that would overwrite what they read. The last one only multiplies: put last, it
    # fills the matrix unit beside the next turn's arithmetic.
    lags = [*reversed(range(len(stages) - 1)), len(stages) - 1]

    def turn(i, parity: int) -> None:
        for lag in lags:
            if not isinstance(i, int) or 0 <= i - lag < count:
                stages[lag](i - lag, (parity - lag) % 2)

    first = min(len(stages) - 1, count)
    full = count - first
    together = turns_together(full, most)

    def several(j):
        for k in range(together):
            turn(first + j * together + k, (first + k) % 2)

    for i in range(first):
        turn(i, i % 2)
    for_each(full // together, several)
    for i in range(first + full // together * together, count + len(stages) - 1):
        turn(i, i % 2)


def turns_together(turns: int, most: int) -> int:
    """Turns of the pipeline in one iteration of its loop, an even number so that slots are static."""
    return max(n for n in range(2, max(most, 2) + 1, 2) if n == 2 or n + turns % n <= most)


def zero(ref) -> None:
    """Clears a ref of three axes, some rows of one entry after the other."""
    rows = ref.shape[1]
    if rows > 512:
        rows = max(n for n in range(8, 513, 8) if rows % n == 0)
    turns = ref.shape[1] // rows

    def clear(i):
        if turns == 1:
            ref[i] = jnp.zeros((rows, ref.shape[2]), ref.dtype)
        else:
            start = pl.multiple_of(lax.rem(i, turns) * rows, 8)
            ref[lax.div(i, turns), pl.ds(start, rows), :] = jnp.zeros((rows, ref.shape[2]), ref.dtype)

    for_each(ref.shape[0] * turns, clear)


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

    def move(head):
        for buffer in buffers:
            buffer[head, 0:kept, :] = buffer[head, source : source + kept, :]

    when_full(spec, step, lambda: for_each(spec.kv_heads, move))


def when_full(spec: Spec, step: Array, body) -> None:
    """Local: calls ``body`` in the steps before which the buffer got full."""
    pl.when((step > 0) & (lax.rem(step, spec.slots) == 0))(body)


def kv_head(spec: Spec, head):
    """The key/value head that serves a query head."""
    shared = spec.heads // spec.kv_heads
    return head if shared == 1 else (head // shared if isinstance(head, int) else lax.div(head, shared))
