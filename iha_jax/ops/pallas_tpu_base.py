"""Values that are never mixed: how the backward kernel of windows can do without pseudo-values (paper.md §7).

With the per-head collapse an output is ``sum over keys of P(key) * value(key)``, and a pseudo-value is a mixture of the
base values of its token. So gradients of probabilities follow from products of the outputs' gradients with base values,
one for all heads, and a small product with the mixing matrix; and the probabilities of a token's pseudo-keys, collapsed
with that matrix into weights of base values, give the base values' gradients. Where P is large and the window narrow
this takes the matrix unit less time, and keeps less, than pseudo-values and their gradients do.

A chunk's columns are cut into *pieces*, the pseudo-keys of one group of tokens, since the matrix that mixes a group is
the same for all of them; pieces of all heads lie below each other, ``[pieces * tile, lanes]``.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_strips as strips
from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_spec import LANES, SUBLANES, Spec

F32 = jnp.float32


def to_pieces(spec: Spec, parts: list[Array]) -> Array:
    """Probabilities by unit, one array for each of `Spec.parts`, to pieces ``[pieces * tile, piece lanes]``."""
    x = per_token(spec, strips.to_whole(spec, parts))
    return jnp.concatenate([_lanes_from(x, start, spec.piece_lanes) for start, _ in spec.pieces], axis=0)


def from_pieces(spec: Spec, x: Array) -> Array:
    """The transpose of `to_pieces` for what is 0 beyond a piece's own lanes: ``[spans*unit, chunk]``."""
    registers: dict[int, Array] = {}
    for i, (start, _) in enumerate(spec.pieces):
        piece = x[i * spec.tile : (i + 1) * spec.tile]
        low = start // LANES * LANES
        if start > low:
            piece = jnp.concatenate([piece, jnp.zeros((spec.tile, LANES), F32)], axis=1)
            piece = pltpu.roll(piece, start - low, 1)
        for k in range(piece.shape[1] // LANES):
            at = low // LANES + k
            if 0 <= at < spec.chunk // LANES:
                register = piece[:, k * LANES : (k + 1) * LANES]
                registers[at] = registers[at] + register if at in registers else register
    nothing = jnp.zeros((spec.tile, LANES), F32)
    found = [registers.get(at, nothing) for at in range(spec.chunk // LANES)]
    return per_unit_row(spec, jnp.concatenate(found, axis=1))


def _lanes_from(x: Array, start: int, width: int) -> Array:
    """Columns ``start`` to ``start + width``, zeros beyond those that there are; whole registers are free to take."""
    low = start // LANES * LANES
    high = low + width + (LANES if start > low else 0)
    found = x[:, max(low, 0) : min(high, x.shape[1])]
    zeros = lambda n: jnp.zeros((x.shape[0], n), x.dtype)  # noqa: E731
    if low < 0:
        found = jnp.concatenate([zeros(-low), found], axis=1)
    if high > x.shape[1]:
        found = jnp.concatenate([found, zeros(high - x.shape[1])], axis=1)
    return found if start == low else pltpu.roll(found, high - start, 1)[:, :width]


def per_token(spec: Spec, x: Array) -> Array:
    """Rows by unit to rows by token ``[tile, c]``: sums the turns of a unit, and fills registers again."""
    g = spec.span
    if g >= SUBLANES:
        return x
    groups = []
    for i in range(spec.spans):
        rows = x[i * SUBLANES : (i + 1) * SUBLANES]
        shift = SUBLANES // 2
        while shift >= g:
            rows = rows + pltpu.roll(rows, shift, 0)
            shift //= 2
        groups.append(rows)
    together = SUBLANES // g
    owner = lax.div(lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 0), g)
    found = []
    for first in range(0, spec.spans, together):
        rows = groups[first]
        for k in range(1, together):
            rows = jnp.where(owner == k, groups[first + k], rows)
        found.append(rows)
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=0)


def per_unit_row(spec: Spec, x: Array) -> Array:
    """The transpose of `per_token`: a token's row for every turn of its unit."""
    g = spec.span
    if g >= SUBLANES:
        return x
    owner = lax.div(lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 0), g)
    found = []
    for i in range(spec.spans):
        register, place = divmod(i * g, SUBLANES)
        rows = jnp.where(owner == place // g, x[register * SUBLANES : (register + 1) * SUBLANES], 0.0)
        shift = g
        while shift < SUBLANES:
            rows = rows + pltpu.roll(rows, shift, 0)
            shift *= 2
        found.append(rows)
    return jnp.concatenate(found, axis=0)


def keep(spec: Spec, step: Array, base_ref, kept_ref) -> None:
    """Puts the newest tile's base values ``[key groups, base rows, Hv]`` behind those of the tiles before."""
    first = first_group(spec, step) + spec.lag * spec.key_groups
    for i in range(spec.key_groups):
        kept_ref[first + i] = base_ref[i].astype(kept_ref.dtype)


def clear_newest(spec: Spec, step: Array, d_kept_ref) -> None:
    """Zeros for the gradients of a new tile's base values."""
    first = first_group(spec, step) + spec.lag * spec.key_groups
    for i in range(spec.key_groups):
        d_kept_ref[first + i] = jnp.zeros(d_kept_ref.shape[1:], F32)


def gather_heads(spec: Spec, x_ref, rows_ref) -> Array:
    """Heads side by side to below each other ``[n * tile, Hv]`` in their dtype; float32 ``rows_ref`` is written."""
    for head in range(spec.heads):
        rows_ref[head] = x_ref[0, :, head * spec.value_dim : (head + 1) * spec.value_dim].astype(F32)
    return rows_ref[...].reshape(spec.heads * spec.tile, spec.value_dim).astype(spec.dtype)


def first_group(spec: Spec, step: Array):
    """Which of the kept groups is the oldest tile's first."""
    return lax.rem(step, spec.slots) * spec.key_groups if spec.slots > 1 else 0


def advance(spec: Spec, step: Array, *kept_refs) -> None:
    """Moves the groups that are still needed to the start, in the same steps as `pallas_tpu_tile.advance`."""
    if spec.lag == 0:
        return

    def move():
        for ref in kept_refs:
            for i in range(spec.lag * spec.key_groups):
                ref[i] = ref[spec.slots * spec.key_groups + i]

    tile.when_full(spec, step, move)


def of_piece(spec: Spec, x, number: int) -> Array:
    """A piece of all heads, ``[n, pieces * tile, lanes]`` -> ``[n * tile, lanes]``, in the heads' dtype."""
    found = x[:, number * spec.tile : (number + 1) * spec.tile, :]
    return found.reshape(spec.heads * spec.tile, found.shape[2]).astype(spec.dtype)


def meet(spec: Spec, step: Array, d_out: Array, kept_ref, products_ref) -> None:
    """Products of outputs' gradients ``[n * tile, Hv]`` with kept base values: ``[n, pieces * tile, base rows]``."""
    first = first_group(spec, step)
    for number, (_, group) in enumerate(spec.pieces):
        found = tile.dot(spec, d_out, kept_ref[first + group], (1, 1))
        found = found.reshape(spec.heads, spec.tile, found.shape[1])
        products_ref[:, number * spec.tile : (number + 1) * spec.tile, :] = found


def add_gradients(spec: Spec, step: Array, collapsed_ref, d_out: Array, d_kept_ref) -> None:
    """Adds to the gradients of kept base values."""
    first = first_group(spec, step)
    for number, (_, group) in enumerate(spec.pieces):
        found = tile.dot(spec, of_piece(spec, collapsed_ref, number), d_out, (0, 0))
        d_kept_ref[first + group] += found
