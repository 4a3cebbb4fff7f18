"""What is static about a call of the fused TPU kernels.

Both kernels go through the tokens in tiles, one after the other, and keep the pseudo-keys and -values they made in
on-chip memory. They differ in what is kept and how a tile of queries meets its keys:

* ``"local"`` (windows): the last few tiles; all keys of a query tile are one chunk, so probabilities are final in one
  pass.
* ``"global"``: all keys of the sequence, a few heads at a time; queries sweep over chunks of them twice, once for the
  softmax's statistics and once for its result, and skip the chunks that causality or a window exclude.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax

LANES = 128
"""Width of a vector register and of the matrix unit (v5e, v5p)."""

SUBLANES = 8
"""Rows of a vector register of 32-bit numbers."""

ROWS = 16
"""Pseudo-rows come in multiples of this: two bfloat16 rows share a 32-bit sublane."""


class Part(NamedTuple):
    """Local: queries of a tile that see the same columns of its chunk, to whole registers.

    Attributes:
      rows: of pseudo-queries.
      weight_rows: of what meets values.
      columns: of the chunk.
    """

    rows: slice
    weight_rows: slice
    columns: slice

    @property
    def width(self) -> int:
        """Columns."""
        return self.columns.stop - self.columns.start


class Block(NamedTuple):
    """Local: queries of a tile and keys of its chunk that meet in one product, to whole registers.

    Attributes:
      rows: of pseudo-queries.
      columns: of the chunk.
    """

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and of columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


class Sharing(NamedTuple):
    """How groups of tokens share lanes in products of gradients, each in one of the copies of `Spec.copies`.

    Attributes:
      count: groups in a register.
      period: lanes after which their order repeats.
    """

    count: int
    period: int


def round_up(x: int, multiple: int) -> int:
    """The next multiple."""
    return -(-x // multiple) * multiple


def _holds(some: slice, number: int) -> bool:
    return some.start <= number < some.stop


def _copies(size: int, lanes: int) -> int:
    """A power of two."""
    return 1 << int(math.log2(lanes // size))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a kernel call. Lengths in pseudo-rows unless said otherwise.

    Attributes:
      kind: ``"local"`` or ``"global"``.
      batch: B.
      query_tiles: tiles of queries.
      key_tiles: tiles of keys.
      tile: tokens of a tile.
      pseudo: P.
      query_group: tokens mixed by one product on the query side.
      span: tokens whose pseudo-queries lie together, in the order (pseudo-head, token); a query group has whole spans.
      key_group: likewise on the key side.
      chunk: pseudo-keys a query tile is multiplied with at once.
      chunks: how many of them (local: 1).
      history: local: pseudo-keys before the newest tile that a chunk reaches back to.
      seen: local: pseudo-keys that a token's first pseudo-query can see before it, and its last one after it, by index.
      own_masks: local: query tiles up to and from which a tile has its own mask, others that of the tile before; None
        where every tile has its own. Where not None, every query sees at least itself.
      lag: tiles between the arrival of a key tile and the last query tile that sees it.
      delay: tiles between the arrival of a query's own key tile and its turn.
      slots: local: new tiles until the kept ones are moved back to the start of the buffer.
      sources: query heads that are mixed (M).
      key_sources: key/value heads that are mixed.
      groups: in how many parts the heads are attended with, one after the other.
      heads: query heads of a part.
      kv_heads: key/value heads of a part.
      head_dim: H, padded to whole registers.
      value_dim: that of the values.
      head_size: H.
      value_size: that of the values.
      out_heads: output heads: ``heads``, or all of them with the across-heads collapse.
      across_heads: the collapse.
      mixes_values: whether the backward kernel has pseudo-values, rather than weights of base values
        (`pallas_tpu_base`; local and per-head only).
      distance: half-open range of allowed (query index - key index), None for no limit.
      reach: how far keys can lie before and after a query by index, for skipping chunks, None for no limit.
      free: global: chunks of this many leading pseudo-keys need no mask: ``"past"``, those before a tile of queries;
        or their number, the same for all queries (0: every chunk is masked).
      scale: of the logits.
      logits_soft_cap: cap, or None.
      precision: of contractions of float32.
      dtype: of inputs, pseudo-heads and outputs: float32 or bfloat16.
    """

    kind: Literal["local", "global"]
    batch: int
    query_tiles: int
    key_tiles: int
    tile: int
    pseudo: int
    query_group: int
    span: int
    key_group: int
    chunk: int
    chunks: int
    history: int
    seen: tuple[int, int]
    own_masks: tuple[int, int] | None
    lag: int
    delay: int
    slots: int
    sources: int
    key_sources: int
    groups: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    head_size: int
    value_size: int
    out_heads: int
    across_heads: bool
    mixes_values: bool
    distance: tuple[int | None, int | None]
    reach: tuple[int | None, int | None]
    free: Literal["past"] | int
    scale: float
    logits_soft_cap: float | None
    precision: jax.lax.PrecisionLike
    dtype: str

    @property
    def out_dtype(self) -> str:
        """Of the output: `dtype`, or float32 where it is a part of a sum."""
        return "float32" if self.across_heads and self.groups > 1 else self.dtype

    @property
    def gradient_dtype(self) -> str:
        """Of the base heads' gradients: likewise, every part of the heads adds to them."""
        return "float32" if self.groups > 1 else self.dtype

    @property
    def score_scale(self) -> float:
        """The factor of pseudo-queries: logits over log 2, or with a cap the argument of tanh; of every copy."""
        scale = self.scale / self.copies
        return scale * math.log2(math.e) if self.logits_soft_cap is None else scale / self.logits_soft_cap

    @property
    def rows(self) -> int:
        """Pseudo-queries (and new pseudo-keys) of a tile."""
        return self.tile * self.pseudo

    @property
    def unit(self) -> int:
        """Rows after which the tokens of a span repeat: their number, or one register of several turns."""
        return max(SUBLANES, self.span)

    @property
    def weight_rows(self) -> int:
        """Rows of probabilities that meet values: one unit of a span, or all with the across-heads collapse."""
        return self.rows if self.across_heads else self.spans * self.unit

    @property
    def sees_itself(self) -> bool:
        """Whether no query can have all keys masked but those that pad the last tile."""
        return self.own_masks is not None

    @property
    def parts(self) -> list[Part]:
        """Local: the tile's queries by the columns they can see, neighbouring spans that see the same together."""
        size = self.span * self.pseudo
        weight_size = size if self.across_heads else self.unit
        found: list[Part] = []
        for i in range(self.spans):
            # The tile's first pseudo-query lies after `history` keys, less those that arrived while it waited.
            start = self.history - self.delay * self.rows + i * size
            low = max(start - self.seen[0], 0) // LANES * LANES
            high = min(round_up(start + size + self.seen[1], LANES), self.chunk)
            first, first_weight = i * size, i * weight_size
            if found and found[-1].columns == slice(low, high):
                last = found.pop()
                first, first_weight = last.rows.start, last.weight_rows.start
            rows, weight_rows = slice(first, (i + 1) * size), slice(first_weight, (i + 1) * weight_size)
            found.append(Part(rows, weight_rows, slice(low, high)))
        return found

    @property
    def strips(self) -> list[Block]:
        """Local: columns of the chunk with the queries that see them, to whole packed registers.

        What one product makes or takes: keys are loaded into the matrix unit once for all queries that see them.
        """
        return self._strips([part.rows for part in self.parts], self.rows)

    @property
    def weight_strips(self) -> list[Block]:
        """Local: the same for rows of what meets values."""
        return self._strips([part.weight_rows for part in self.parts], self.weight_rows)

    def _strips(self, rows_of: list[slice], total: int) -> list[Block]:
        found: list[Block] = []
        for low in range(0, self.chunk, LANES):
            seen = [rows for rows, part in zip(rows_of, self.parts, strict=True) if _holds(part.columns, low)]
            if not seen:
                continue
            rows = slice(seen[0].start // ROWS * ROWS, min(round_up(seen[-1].stop, ROWS), total))
            joins = bool(found) and found[-1] == (rows, slice(found[-1].columns.start, low))
            start = found.pop().columns.start if joins else low
            found.append(Block(rows, slice(start, low + LANES)))
        return found

    @property
    def blocks(self) -> list[Block]:
        """Local: the tile's queries in blocks that take the matrix unit least time with the keys they see.

        Gradients of keys are sums over queries, up to 128 of them in one pass over a block's columns.
        """
        size, start = self.query_group * self.pseudo, self.history - self.delay * self.rows

        def cut(groups: int) -> list[Block]:
            found = []
            for first in range(0, self.rows, groups * size):
                stop = min(first + groups * size, self.rows)
                low = max(start + first - self.seen[0], 0) // LANES * LANES
                high = min(round_up(start + stop + self.seen[1], LANES), self.chunk)
                found.append(Block(slice(first, stop), slice(low, high)))
            return found

        def cost(blocks: list[Block]) -> int:
            return sum(-(-rows // LANES) * columns for rows, columns in (block.shape for block in blocks))

        return min([*(cut(n) for n in range(self.query_groups, 0, -1)), self.strips], key=cost)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where values are not mixed: the groups of tokens that some query of the tile sees.

        First column of a group's pseudo-keys, possibly before the chunk's first, and its number among the kept groups.
        """
        size = self.key_group * self.pseudo
        first = self.history - self.lag * self.rows
        visible = self.history - self.delay * self.rows - self.seen[0]
        starts = [(first + i * size, i) for i in range((self.lag + 1) * self.key_groups)]
        return [(start, i) for start, i in starts if start + size > max(visible, 0)]

    @property
    def kept_groups(self) -> int:
        """Where values are not mixed: groups of base values that are kept."""
        return (self.lag + self.slots) * self.key_groups

    @property
    def piece_lanes(self) -> int:
        """Lanes of a piece: a group's pseudo-keys, in whole registers."""
        return round_up(self.key_group * self.pseudo, LANES)

    @property
    def copies(self) -> int:
        """Copies of a query or key head in its lanes, in place of padding: in each half, side by side.

        Products have them for nothing, and what becomes of them are copies too: of several groups' gradients each can
        come in a copy of its own, in one register, without moving lanes.
        """
        return _copies(-(-self.head_size // 2), self.head_dim // 2)

    @property
    def value_copies(self) -> int:
        """Copies of a value head in its lanes."""
        return _copies(self.value_size, self.value_dim)

    def sharing(self, groups: int, values: bool = False) -> Sharing:
        """Of lanes by the groups of a tile: of queries and keys, or of values."""
        count, period = (self.value_copies, self.value_dim) if values else (self.copies, self.head_dim // 2)
        return Sharing(math.gcd(count, groups), period)

    @property
    def spans(self) -> int:
        """Spans of a tile."""
        return self.tile // self.span

    @property
    def query_groups(self) -> int:
        """Query groups of a tile."""
        return self.tile // self.query_group

    @property
    def key_groups(self) -> int:
        """Key groups of a tile."""
        return self.tile // self.key_group

    @property
    def query_base(self) -> int:
        """Base rows (source, token) of a query group, padded."""
        return round_up(self.sources * self.query_group, ROWS)

    @property
    def key_base(self) -> int:
        """Base rows (source, token) of a key group, padded."""
        return round_up(self.key_sources * self.key_group, ROWS)

    @property
    def out_base(self) -> int:
        """Rows (output head, token) of a query group, padded."""
        return round_up(self.out_heads * self.query_group, ROWS)

    @property
    def buffer(self) -> int:
        """Pseudo-keys of a head that are kept."""
        if self.kind == "local":
            return (self.lag + self.slots) * self.rows + self.beyond
        return self.chunk * self.chunks

    @property
    def beyond(self) -> int:
        """Local: pseudo-keys of a chunk behind the newest tile, which no query sees."""
        return self.chunk - self.history - self.rows if self.kind == "local" else 0

    def turns(self, registers: int) -> int:
        """Turns of the pipeline over heads whose scores, one intermediate result of each, take so many registers."""
        return registers * SUBLANES * LANES // self.scores

    @property
    def scores(self) -> int:
        """Numbers of a head's scores of a tile that are computed; global: with one chunk."""
        if self.kind == "global":
            return self.rows * self.chunk
        return sum((part.rows.stop - part.rows.start) * part.width for part in self.parts)

    @property
    def steps(self) -> int:
        """Grid steps of the forward pass: arrivals of key tiles and turns of query tiles."""
        return self.query_tiles + self.delay

    @property
    def backward_steps(self) -> int:
        """Grid steps until the gradient of the last key tile is complete."""
        return max(self.steps, self.key_tiles + self.lag)

    @property
    def in_step(self) -> bool:
        """Whether a tile of keys arrives, one of queries attends and one departs in every step but the last ones."""
        return self.kind == "local" and self.delay == 0 and self.key_tiles == self.query_tiles
