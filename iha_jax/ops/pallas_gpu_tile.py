"""The pieces of the fused GPU kernels: mixing a tile's pseudo-heads, scores and masks, and loops over what is seen.

A tile's pseudo-heads are ``[rows, H]``, rows (token, pseudo-head) in natural order. Where pairs (i, i + H/2) are
rotated they are kept as two halves, since Triton cannot slice a register tile: a tuple of one or two pieces.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from iha_jax.ops.pallas_gpu_plan import MIXING_BLOCK, UNMIXING_BLOCK, Reach, Spec, Tile
from iha_jax.ops.pallas_gpu_prepare import Mixing, Tokens

F32 = jnp.float32

LOG2_E = 1.4426950408889634

NOTHING_SEEN = 1e30
"""Stands for the logarithm of the sum of a row that sees nothing: its probabilities are exactly zero."""

Pieces = tuple[Array, ...]


def dot(spec: Spec, a: Array, b: Array, over: tuple[int, int] = (1, 0)) -> Array:
    """Product of two matrices over axes ``over``, accumulated and returned in float32."""
    precision = spec.precision if a.dtype == F32 else None
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=F32)


def mix(spec: Spec, base: Any, weights: Any, head: Any, first: Array, rows: int, sources: int, pieces) -> Pieces:
    """Pseudo-heads of a tile, float32, from refs of base heads ``[(T, M), H]`` and weights ``[head, (t, p), (t, m)]``.

    Args:
      spec: the call's.
      base: ref.
      weights: ref.
      head: which of its heads.
      first: the tile's first pseudo-row.
      rows: pseudo-rows of the tile.
      sources: M.
      pieces: which columns, each (start, size).
    """
    count, block = spec.mixing(rows, sources)
    start = lax.div(first, jnp.int32(spec.pseudo)) * sources

    def product(j, sums):
        matrix = weights[head, pl.ds(0, rows), pl.ds(j * block, block)]
        return tuple(
            x + dot(spec, matrix, base[pl.ds(start + j * block, block), pl.ds(*columns)])
            for x, columns in zip(sums, pieces, strict=True)
        )

    sums = tuple(jnp.zeros((rows, size), F32) for _, size in pieces)
    if count * block > MIXING_BLOCK:
        return lax.fori_loop(0, count, product, sums)
    for j in range(count):
        sums = product(j, sums)
    return sums


def unmix(
    spec: Spec,
    gradient: Pieces,
    base: Any,
    weights: Any,
    d_base: Any,
    d_weights: Any,
    first: Array,
    rows: int,
    sources: int,
    pieces,
) -> None:
    """The transpose of `mix`: adds to the gradients of base heads ``[(T, M), H]`` and of weights ``[p, (t, m)]``.

    Every head adds to the same base heads, and every tile to the same weights, in an order that the hardware chooses:
    gradients may differ from run to run by float32's rounding.
    """
    count, block = spec.mixing(rows, sources, UNMIXING_BLOCK)
    start = lax.div(first, jnp.int32(spec.pseudo)) * sources
    tokens = rows // spec.pseudo
    gradient = tuple(x.astype(spec.dtype) for x in gradient)
    shape = (rows, block)
    row_token = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(spec.pseudo))

    def product(j, carry):
        matrix = weights[0, pl.ds(0, rows), pl.ds(j * block, block)]
        here = pl.ds(start + j * block, block)
        total = jnp.zeros(shape, F32)
        for x, columns in zip(gradient, pieces, strict=True):
            plt.atomic_add(d_base, (here, pl.ds(*columns)), dot(spec, matrix, x, (0, 0)))
            total += dot(spec, x, base[here, pl.ds(*columns)], (1, 1))
        # Tokens are mixed by themselves: of the product only the blocks on the diagonal count.
        token = lax.div(lax.broadcasted_iota(jnp.int32, shape, 1) + j * block, jnp.int32(sources))
        total = jnp.where(token == row_token, total, 0.0).reshape(tokens, spec.pseudo, block)
        plt.atomic_add(d_weights, (pl.ds(0, spec.pseudo), pl.ds(j * block, block)), total.sum(axis=0))
        return carry

    lax.fori_loop(0, count, product, ())


def queries(spec: Spec, tokens: Tokens, weights: Any, head: Any, first: Array, rows: int) -> Pieces:
    """Pseudo-queries of a tile, times what makes their products with keys logits of base 2, in the heads' dtype."""
    found = mix(spec, tokens.query, weights, head, first, rows, spec.sources, spec.pieces)
    if spec.rotated:
        found = rotate(found, *rotation(tokens, rows))
    scale = spec.scale * LOG2_E if spec.logits_soft_cap is None else spec.scale / spec.logits_soft_cap
    return tuple((x * scale).astype(spec.dtype) for x in found)


def keys(spec: Spec, tokens: Tokens, weights: Any, first: Array, rows: int) -> Pieces:
    """Pseudo-keys of a tile."""
    found = mix(spec, tokens.key, weights, 0, first, rows, spec.key_sources, spec.pieces)
    if spec.rotated:
        found = rotate(found, *rotation(tokens, rows))
    return tuple(x.astype(spec.dtype) for x in found)


def values(spec: Spec, tokens: Tokens, weights: Any, first: Array, rows: int) -> Array:
    """Pseudo-values of a tile."""
    (found,) = mix(spec, tokens.value, weights, 0, first, rows, spec.key_sources, ((0, spec.value_dim),))
    return found.astype(spec.dtype)


def rotation(tokens: Tokens, rows: int) -> tuple[Array, Array]:
    """Cosines and sines of a tile's rows."""
    return tokens.cos[pl.ds(0, rows), :], tokens.sin[pl.ds(0, rows), :]


def rotate(x: Pieces, cos: Array, sin: Array) -> Pieces:
    """Rotates pairs of the two halves; with ``-sin`` back again."""
    first, second = x
    return first * cos - second * sin, second * cos + first * sin


def per_pseudo(spec: Spec, x: Array) -> Array:
    """Rows of tokens repeated for each pseudo-head: ``[t, d]`` -> ``[(t, p), d]``."""
    count, dim = x.shape
    return jnp.broadcast_to(x[:, None, :], (count, spec.pseudo, dim)).reshape(count * spec.pseudo, dim)


def logits(spec: Spec, query: Pieces, key: Pieces, seen: Array | None) -> tuple[Array, Array | None]:
    """Logits of base 2 ``[queries, keys]``, and their derivative by the products where a cap makes it other than 1."""
    found = dot(spec, query[0], key[0], (1, 1))
    for q, k in zip(query[1:], key[1:], strict=True):
        found += dot(spec, q, k, (1, 1))
    slope = None
    if spec.logits_soft_cap is not None:
        found = jnp.tanh(found)
        slope = 1.0 - found * found
        found = found * (spec.logits_soft_cap * LOG2_E)
    if seen is not None:
        found = jnp.where(seen, found, -jnp.inf)
    return found, slope


def seen(spec: Spec, tokens: Tokens, query_row: Array, query_rows: int, key_row: Array, key_rows: int) -> Array:
    """Which keys of a tile are visible to which queries: ``[queries, keys]``."""
    query = [tokens.query_index[i, pl.ds(query_row, query_rows)] for i in range(2)]
    key = [tokens.key_index[i, pl.ds(key_row, key_rows)] for i in range(2)]
    found = query[1][:, None] == key[1][None, :]
    distance = query[0][:, None] - key[0][None, :]
    low, high = spec.distance
    if low is not None:
        found &= distance >= low
    if high is not None:
        found &= distance < high
    return found


def over_chunks(spec: Spec, tile: Tile, reach: Reach, owner: Array, owners: int, visitors: int, step: Callable, carry):
    """``carry = step(first row, masked, carry)`` for every chunk of rows that some of an owner's rows can see.

    Args:
      spec: the call's.
      tile: sizes.
      reach: what the owner sees, relative to its first row.
      owner: the owner's first row.
      owners: rows on the owner's side that are no padding.
      visitors: likewise on the other side.
      step: the work, with or without masks.
      carry: its start.
    """
    chunk = tile.visitor
    count = -(-visitors // chunk)

    def bound(offset: int | None, otherwise: int, up: bool) -> Array:
        if offset is None:
            return jnp.int32(otherwise)
        row = jnp.clip(owner + offset, 0, visitors)
        return lax.div(row + (chunk - 1 if up else 0), jnp.int32(chunk))

    low = bound(reach.start, 0, up=False)
    high = bound(reach.stop, count, up=True)
    run = lambda masked: lambda j, carry: step(j * chunk, masked, carry)  # noqa: E731
    if reach.core_stop == 0:
        return lax.fori_loop(low, high, run(True), carry)
    core_low = jnp.clip(bound(reach.core_start, 0, up=True), low, jnp.maximum(low, high))
    core_high = jnp.clip(bound(reach.core_stop, visitors // chunk, up=False), core_low, jnp.maximum(core_low, high))
    core_high = jnp.where(owner + tile.owner <= owners, core_high, core_low)
    carry = lax.fori_loop(low, core_low, run(True), carry)
    carry = lax.fori_loop(core_low, core_high, run(False), carry)
    return lax.fori_loop(core_high, jnp.maximum(core_high, high), run(True), carry)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks of threads, along one axis (Triton has three, and `jax.vmap` adds one each).

    Heads come first, since they share what they read, then tiles, then batch rows.
    """

    heads: int
    tiles: int
    batch: int
    last_first: bool = False
    """Tiles in reverse: late queries see most, so they start first."""

    @property
    def shape(self) -> tuple[int]:
        """Of the Pallas grid."""
        return (self.heads * self.tiles * self.batch,)

    def split(self, number: Any) -> tuple[Any, Any, Any]:
        """Head, tile and batch row of a block of threads."""
        heads, tiles = jnp.int32(self.heads), jnp.int32(self.tiles)
        rest = lax.div(number, heads)
        tile = lax.rem(rest, tiles)
        return lax.rem(number, heads), self.tiles - 1 - tile if self.last_first else tile, lax.div(rest, tiles)

    def block(self, shape: tuple[int | None, ...], index: Callable) -> pl.BlockSpec:
        """A block spec whose index map is a function of head, tile and batch row."""
        return pl.BlockSpec(shape, lambda number: index(*self.split(number)))

    def whole(self, x: Any) -> pl.BlockSpec:
        """All of an array."""
        return pl.BlockSpec(x.shape, lambda number: (0,) * x.ndim)

    def row(self, x: Any) -> pl.BlockSpec:
        """All of a batch row, of an array ``[B|1, ...]`` without that axis."""
        shared = x.shape[0] == 1
        return self.block((None, *x.shape[1:]), lambda h, i, b: (0 if shared else b, *(0,) * (x.ndim - 1)))

    def head(self, x: Any) -> pl.BlockSpec:
        """All of a head, of an array ``[heads, ...]`` without that axis."""
        return self.block((None, *x.shape[1:]), lambda h, i, b: (h, *(0,) * (x.ndim - 1)))

    def tokens(self, tokens: Tokens) -> Tokens:
        """Of `Tokens`."""
        tables = (None if x is None else self.whole(x) for x in tokens[5:])
        return Tokens(*(self.row(x) for x in tokens[:5]), *tables)

    def mixing(self, mixing: Mixing, query_heads: int, key_head: Callable) -> Mixing:
        """Of `Mixing`: the matrices of some query heads and of the key/value head that serves them.

        Args:
          mixing: the operands.
          query_heads: how many; the grid's head says which.
          key_head: which key/value head, a function of the grid's head.
        """

        def some(x: Array) -> pl.BlockSpec:
            return self.block((query_heads, *x.shape[1:]), lambda h, i, b: (h, *(0,) * (x.ndim - 1)))

        def one(x: Array) -> pl.BlockSpec:
            return self.block((1, *x.shape[1:]), lambda h, i, b: (key_head(h), *(0,) * (x.ndim - 1)))

        return Mixing(some(mixing.query), one(mixing.key), one(mixing.value), some(mixing.collapse))


def shapes(tree):
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def in_place(operands, last, outputs: int) -> dict[int, int]:
    """Aliases of a call's last operand, arrays that are added to, with its outputs after the first so many."""
    before = len(jax.tree.leaves(operands))
    return {before + i: outputs + i for i in range(len(jax.tree.leaves(last)))}


def compiler_params(tile: Tile) -> Any:
    """What Triton is told; it also makes Triton the backend."""
    return plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)


def lengths(spec: Spec) -> tuple[int, int]:
    """Pseudo-rows of queries and of keys that are no padding."""
    return spec.query_len * spec.pseudo, spec.key_len * spec.pseudo


def no_rows(rows: int) -> Array:
    """Running maxima before anything is seen: finite, so that no difference of infinities arises."""
    return jnp.full(rows, -NOTHING_SEEN, F32)


def online(scores: Array, top: Array) -> tuple[Array, Array, Array]:
    """One step of the online softmax: new maxima, the factor for what was summed before, and weights."""
    new = jnp.maximum(top, scores.max(axis=1))
    return new, jnp.exp2(top - new), jnp.exp2(scores - new[:, None])
