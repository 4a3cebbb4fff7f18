"""Local: products of a tile's pseudo-queries with its chunk of keys or values, without the columns nobody sees.

The softmax goes by `Spec.parts`, queries that see the same columns; products go by `Spec.strips`, columns that the same
queries see. Both are made of whole registers, so that going from one to the other moves none.
"""

import itertools

import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_spec import Block, Spec


def columns_of(columns: slice, at):
    """Rows of the kept keys that are some columns of the chunk ``at``."""
    return tile.rows_at(at.start, columns.start, columns.stop - columns.start)


def from_strips(spec: Spec, found: list[Array]) -> list[Array]:
    """Arrays by `Spec.strips` to arrays by `Spec.parts`: whole registers, put together otherwise."""
    parts = []
    for part in spec.parts:
        pieces = []
        for (rows, columns), x in zip(spec.strips, found, strict=True):
            low, high = max(columns.start, part.columns.start), min(columns.stop, part.columns.stop)
            if low < high:
                some = slice(part.rows.start - rows.start, part.rows.stop - rows.start)
                pieces.append(x[some, low - columns.start : high - columns.start])
        parts.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))
    return parts


def to_strips(spec: Spec, found: list[Array]) -> list[Array]:
    """The other way round, with zeros for what a part does not see."""
    strips = []
    for rows, columns in spec.strips:
        pieces, width = [], columns.stop - columns.start
        for part, x in zip(spec.parts, found, strict=True):
            low, high = max(rows.start, part.rows.start), min(rows.stop, part.rows.stop)
            if low >= high:
                continue
            if part.columns.start <= columns.start and columns.stop <= part.columns.stop:
                first = columns.start - part.columns.start
                pieces.append(x[low - part.rows.start : high - part.rows.start, first : first + width])
            else:
                pieces.append(jnp.zeros((high - low, width), x.dtype))
        strips.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0))
    return strips


def to_whole(spec: Spec, found: list[Array]) -> Array:
    """Arrays by `Spec.parts` below each other, with zeros for the columns that a part does not see."""
    whole = []
    for part, x in zip(spec.parts, found, strict=True):
        sides = [part.columns.start, spec.chunk - part.columns.stop]
        before, after = (jnp.zeros((x.shape[0], n), x.dtype) if n else None for n in sides)
        pieces = [y for y in (before, x, after) if y is not None]
        whole.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))
    return whole[0] if len(whole) == 1 else jnp.concatenate(whole, axis=0)


def products(spec: Spec, query_ref, key_ref, at) -> list[Array]:
    """Local: products of one head's pseudo-queries with the keys of the chunk ``at``, by `Spec.parts`.

    Args:
      spec: static description.
      query_ref: ``[rows, H]``.
      key_ref: ``[buffer, H]``.
      at: rows of the buffer.
    """
    found = [
        tile.dot(spec, query_ref[rows, :], key_ref[columns_of(columns, at), :], (1, 1)) for rows, columns in spec.strips
    ]
    return from_strips(spec, found)


def by_strips(spec: Spec, strips: list[Block], x, kept_ref, at) -> Array:
    """``[rows, chunk]`` by a chunk of the kept keys or values of a head, without what the strips leave out."""
    found = [(rows, tile.dot(spec, x[rows, columns], kept_ref[columns_of(columns, at), :])) for rows, columns in strips]
    ends = {end for rows, _ in found for end in (rows.start, rows.stop)}
    pieces = []
    for start, stop in itertools.pairwise(sorted(ends)):
        here = [z[start - r.start : stop - r.start] for r, z in found if r.start <= start and stop <= r.stop]
        pieces.append(sum(here[1:], here[0]))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
