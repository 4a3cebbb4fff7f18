"""The transpose of mixing: gradients of pseudo-heads to those of base heads and of the mixing matrices."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_spec import Sharing, Spec


def unmix_heads(spec: Spec, d_ref, size: int, turned_ref, base_ref, d_base_ref, d_mix_ref, sharing: Sharing) -> None:
    """The transpose of `mix_heads` behind the rotation: gradients of base rows and of the mixing matrices.

    Args:
      spec: static description.
      d_ref: gradients of pseudo-heads before their rotation ``[heads, rows, dim]``, in the heads' dtype; groups that
        share lanes have rows in common (`share_lanes`).
      size: pseudo-rows of a group.
      turned_ref: mixing matrices transposed and side by side ``[base rows, heads * size]``.
      base_ref: float32 ``[groups, base rows, dim]``.
      d_base_ref: likewise, written.
      d_mix_ref: float32 ``[turns, base rows, heads/turns * size]``, added to: the gradients of ``turned_ref``, some
        heads side by side. The other way round the products would have as many rows as there are pseudo-rows.
      sharing: of lanes by groups.
    """
    (heads, _, dim), count = d_ref.shape, sharing.count
    sets = base_ref.shape[0] // count
    for k in range(sets):
        d_mixed = d_ref[:, k * size : (k + 1) * size, :].reshape(heads * size, dim)
        d_base = tile.dot(spec, turned_ref[...], d_mixed)
        for j in range(count):
            # Of equal copies one is left, and the transpose of copying adds them up.
            own = d_base if count == 1 else jnp.where(owners(d_base.shape, sharing) == j, d_base * count, 0.0)
            d_base_ref[k * count + j] = own
    # All groups in one sum: their lanes side by side.
    base = []
    for k in range(sets):
        x = share_lanes([base_ref[k * count + j] for j in range(count)], sharing)
        base.append((x if count == 1 else x * count).astype(spec.dtype))
    base = base[0] if sets == 1 else jnp.concatenate(base, axis=1)
    stack = heads // d_mix_ref.shape[0]

    def some(turn):
        first = turn * stack
        parts = [
            d_ref[pl.ds(first, stack), k * size : (k + 1) * size, :].reshape(stack * size, dim) for k in range(sets)
        ]
        parts = parts[0] if sets == 1 else jnp.concatenate(parts, axis=1)
        d_mix_ref[turn] += tile.dot(spec, base, parts, (1, 1))

    tile.for_each(heads // stack, some)


def share_lanes(parts: list[Array], sharing: Sharing) -> Array:
    """One copy of each of several groups' rows, each in lanes of its own."""
    found = parts[0]
    for j, x in enumerate(parts[1:], 1):
        found = jnp.where(owners(x.shape, sharing) == j, x, found)
    return found


def owners(shape: tuple[int, ...], sharing: Sharing) -> Array:
    """Which of the groups that share a register a lane belongs to."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    return lax.div(lax.rem(lane, sharing.period), sharing.period // sharing.count)


def side_by_side(heads: int, size: int, base_rows: int) -> tuple[int, int, int]:
    """The shape of `unmix_heads`' gradient of mixing matrices ``[heads, size, base rows]``."""
    stack = tile.stack_of(heads, size)
    return heads // stack, base_rows, stack * size


def not_side_by_side(x: Array, heads: int) -> Array:
    """That gradient as the matrices are: ``[heads, size, base rows]``."""
    turns, base_rows, _ = x.shape
    x = x.reshape(turns, base_rows, heads // turns, -1)
    return jnp.moveaxis(x, 1, 3).reshape(heads, -1, base_rows)
