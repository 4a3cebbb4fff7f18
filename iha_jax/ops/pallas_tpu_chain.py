"""The chain rule of one head for a tile of queries: from gradients of outputs to those of pseudo-heads."""

import itertools
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_strips as strips
from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_prepare import Tokens
from iha_jax.ops.pallas_tpu_spec import Block, Spec

F32 = jnp.float32


class HeadChain:
    """One head's part of the chain rule for a query tile, for one chunk of keys at a time."""

    def __init__(self, spec, head, weights, extra, scratch):
        self.spec, self.head, self.kv, self.scratch = spec, head, tile.kv_head(spec, head), scratch
        self.weights, self.extra = weights, extra
        self.held: Array | None = None

    @property
    def d_out(self) -> Array:
        """Gradients of what the probabilities' rows give: ``[rows, Hv]`` across heads, else ``[spans*unit, Hv]``."""
        if self.held is not None:
            return self.held
        spec, d_out = self.spec, self.scratch.d_out
        if not spec.across_heads:
            return d_out[self.head].astype(spec.dtype)
        turned = self.extra.collapse_t[self.head]
        groups = [tile.dot(spec, turned, d_out[i]) for i in range(spec.query_groups)]
        return jnp.concatenate(groups, axis=0).astype(spec.dtype)

    def d_probabilities(self, at, rows: slice = slice(None)) -> Array:
        """Gradients of probabilities: ``[rows, chunk]`` across heads, one unit for all pseudo-queries per head."""
        return tile.dot(self.spec, self.d_out[rows], self.scratch.value[self.kv, at, :], (1, 1))

    def times(self, weight: Array, d_probabilities: Array) -> Array:
        """Weights times the gradients of probabilities, ``[rows, chunk]``."""
        if self.spec.across_heads:
            return weight * d_probabilities
        return tile.over_units(self.spec, weight, d_probabilities, jnp.multiply)

    def reduce(
        self,
        weight: Array,
        d_probabilities: Array,
        mean: Array,
        over: Array,
        slope: Array | None,
    ):
        """Through the softmax, for all columns ``c`` that are given.

        Args:
          weight: unnormalised probabilities ``[rows, c]``.
          d_probabilities: as that function returns them.
          mean: ``[rows, 128]``: the probabilities' mean of their gradients.
          over: ``[rows, 128]``: what normalises the probabilities.
          slope: derivative of the logits by the products, or None for 1.

        Returns:
          What meets values ``[spans*unit or rows, c]`` and the gradient of the products ``[rows, c]``, float32.
        """
        spec, width = self.spec, weight.shape[1]
        factor = over if spec.across_heads else tile.by_span(over, self.weights.collapse[self.head])
        probabilities = weight * tile.over_lanes(factor, width)
        # Logits are in units of log 2: their gradient is log 2 times that of natural ones.
        mean, d_probabilities = tile.over_lanes(mean * math.log(2), width), d_probabilities * math.log(2)
        if spec.across_heads:
            d_scores = probabilities * (d_probabilities - mean)
        else:
            d_scores = probabilities * tile.over_units(spec, mean, d_probabilities, lambda x, y: y - x)
            probabilities = tile.per_unit(spec, probabilities)
        if slope is not None:
            d_scores = d_scores * slope
        return probabilities, d_scores

    def spread(self, at, probabilities: Array, d_scores: Array) -> tuple[Array, Array | None]:
        """Adds to the gradients of the chunk's pseudo-keys and -values.

        Returns:
          The gradient of the pseudo-queries ``[rows, H]``; across heads also the pseudo-outputs ``[rows, Hv]``.
        """
        spec, scratch = self.spec, self.scratch
        if spec.mixes_values:
            probabilities = probabilities.astype(spec.dtype)
            self._add(scratch.d_value, at, tile.dot(spec, probabilities, self.d_out, (0, 0)))
        if spec.kind == "local":
            self._add_blocks(scratch.d_key, at, d_scores, scratch.query[self.head])
        else:
            self._add(scratch.d_key, at, tile.dot(spec, d_scores, scratch.query[self.head], (0, 0)))
        d_query = self._of_rows(d_scores, scratch.key, at, spec.strips)
        if not spec.across_heads:
            return d_query, None
        return d_query, self._of_rows(probabilities, scratch.value, at, spec.weight_strips)

    def _of_rows(self, x: Array, kept, at, some: list[Block]) -> Array:
        """``[rows, c]`` by a chunk of the kept keys or values; local: without what `Spec.strips` leave out."""
        spec = self.spec
        if spec.kind == "global":
            return tile.dot(spec, x, kept[self.kv, at, :])
        return strips.by_strips(spec, some, x, kept.at[self.kv], at)

    def _add(self, to, at, found: Array) -> None:
        """Adds to a chunk's gradients; to what a local tile's own keys have none of yet, it writes."""
        spec = self.spec
        if not self._writes:
            to[self.kv, at, :] += found
            return
        if spec.history:
            to[self.kv, pl.ds(at.start, spec.history), :] += found[: spec.history]
        newest = found[spec.history : spec.history + spec.rows]
        to[self.kv, tile.rows_at(at.start, spec.history, spec.rows), :] = newest

    def _add_blocks(self, to, at, x: Array, y: Array) -> None:
        """Adds the product of ``x`` transposed ``[rows, chunk]`` with ``y``, without what `Spec.blocks` leave out."""
        spec, found = self.spec, []
        for rows, columns in spec.blocks:
            found.append((columns, tile.dot(spec, x[rows, columns], y[rows], (0, 0))))
        ends = {end for columns, _ in found for end in (columns.start, columns.stop)}
        end = spec.history + spec.rows  # nobody sees what lies beyond
        for start, stop in itertools.pairwise(sorted(x for x in {0, spec.history, end, *ends} if x <= end)):
            here = [z[start - c.start : stop - c.start] for c, z in found if c.start <= start and stop <= c.stop]
            rows = tile.rows_at(at.start, start, stop - start)
            if start >= spec.history and self._writes:
                to[self.kv, rows, :] = sum(here[1:], here[0]) if here else jnp.zeros((stop - start, y.shape[1]), F32)
            elif here:
                to[self.kv, rows, :] += sum(here[1:], here[0])

    @property
    def _writes(self) -> bool:
        """Whether this head is the first that has gradients of the newest keys."""
        return self.spec.kind == "local" and self.spec.heads == self.spec.kv_heads


def sweep(spec: Spec, number: Array, tokens: Tokens, scratch, columns, chain: HeadChain):
    """Global: the softmax's statistics and the means over all visible chunks, then the gradients."""
    chain.held = chain.d_out  # outside the loops

    def chunk(j, masked):
        at = pl.ds(pl.multiple_of(j * spec.chunk, 128), spec.chunk)
        bias = tile.mask_bias(spec, columns, tokens.key_index[0, j]) if masked else None
        return (
            at,
            *tile.logits(spec, tile.dot(spec, scratch.query[chain.head], scratch.key[chain.kv, at, :], (1, 1)), bias),
            chain.d_probabilities(at),
        )

    def statistics(j, carry, masked):
        top, total, mean = carry
        _, scores, _, d_probabilities = chunk(j, masked)
        new = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        weight, shrink = jnp.exp2(scores - new), jnp.exp2(top - new)
        product = chain.times(weight, d_probabilities)
        total = total * shrink + jnp.sum(weight, axis=1, keepdims=True)
        return new, total, mean * shrink + jnp.sum(product, axis=1, keepdims=True)

    nothing = jnp.zeros((spec.rows, 1), F32)
    start = jnp.full((spec.rows, 1), tile.LOWEST, F32), nothing, nothing
    top, total, mean = tile.over_chunks(spec, number, statistics, start)
    over = tile.all_lanes(tile.reciprocal(total, spec.dtype, positive=spec.sees_itself))
    mean = tile.all_lanes(mean) * over

    def gradients(j, carry, masked):
        at, scores, slope, d_probabilities = chunk(j, masked)
        weight = jnp.exp2(scores - top)
        found = chain.reduce(weight, d_probabilities, mean, over, slope)
        found = chain.spread(at, found[0], found[1].astype(spec.dtype))
        return tuple(x if y is None else x + y for x, y in zip(carry, found, strict=True))

    start = jnp.zeros((spec.rows, spec.head_dim), F32), None
    if spec.across_heads:
        start = start[0], jnp.zeros((spec.rows, spec.value_dim), F32)
    d_query, pseudo_out = tile.over_chunks(spec, number, gradients, start)
    return d_query, pseudo_out, mean
