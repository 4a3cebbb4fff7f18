"""What is static about a call of the fused TPU kernels, and the account of its memory.

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
import jax.numpy as jnp

LANES = 128
"""Width of a vector register and of the matrix unit (v5e, v5p)."""

SUBLANES = 8
"""Rows of a vector register of 32-bit numbers."""

ROWS = 16
"""Pseudo-rows come in multiples of this: two bfloat16 rows share a 32-bit sublane."""

VMEM_BYTES = 56 * 2**20
"""What a kernel may plan to use: v5p and v7x have 64 MiB of vector memory a core, v5e and v6e 128, and the compiler
needs some of it for itself."""

VMEM_LIMIT = 62 * 2**20
"""What the compiler is allowed; its own default of 16 MiB is only a convention."""


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
    """Local: queries of a tile whose gradients of keys come from one product, and what they see, to whole registers.

    Attributes:
      rows: of pseudo-queries.
      columns: of the chunk.
    """

    rows: slice
    columns: slice


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
        """Rows after which the tokens of a query group repeat: their number, or one register of several turns."""
        return max(SUBLANES, self.query_group)

    @property
    def weight_rows(self) -> int:
        """Rows of probabilities that meet values: one unit of a group, or all with the across-heads collapse."""
        return self.rows if self.across_heads else self.query_groups * self.unit

    @property
    def sees_itself(self) -> bool:
        """Whether no query can have all keys masked but those that pad the last tile."""
        return self.own_masks is not None

    @property
    def parts(self) -> list[Part]:
        """Local: the tile's queries by the columns they can see, neighbouring groups that see the same together."""
        size = self.query_group * self.pseudo
        weight_size = size if self.across_heads else self.unit
        found: list[Part] = []
        for i in range(self.query_groups):
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
            return sum(
                -(-(rows.stop - rows.start) // LANES) * (columns.stop - columns.start) for rows, columns in blocks
            )

        return min((cut(n) for n in range(self.query_groups, 0, -1)), key=cost)

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
            return (self.lag + self.slots) * self.rows
        return self.chunk * self.chunks

    def turns(self, registers: int) -> int:
        """Turns of the pipeline over heads whose scores, one intermediate result of each, take so many registers."""
        return registers * SUBLANES * LANES // (self.rows * self.chunk)

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

    def vmem_bytes(self, backward: bool) -> int:
        """On-chip memory of a kernel: what it declares, and the scores it has in hand."""
        mixes_values = self.mixes_values or not backward
        size, f32 = jnp.dtype(self.dtype).itemsize, 4
        h, v, local = self.head_dim, self.value_dim, self.kind == "local"
        heads = self.sources * h + self.key_sources * (h + v) + self.out_heads * v  # a token's operands and outputs

        def matrix(rows: int, columns: int) -> int:
            return rows * round_up(columns, LANES)

        query_rows, key_rows = self.query_group * self.pseudo, self.key_group * self.pseudo
        value_rows = key_rows if mixes_values else self.piece_lanes
        mixing = self.heads * matrix(query_rows, self.query_base)
        mixing += self.kv_heads * matrix(key_rows + value_rows, self.key_base)
        if self.across_heads:
            collapse = self.heads * matrix(self.out_base, query_rows) * f32
        else:
            collapse = self.heads * self.rows * LANES * f32
        base = self.query_groups * self.query_base * h + self.key_groups * self.key_base * (h + v)
        scores, weights = self.rows * self.chunk, self.weight_rows * self.chunk
        # Operands of the tile and tables of rotations come in two buffers, indices in whole registers.
        total = 2 * self.tile * (heads * size + 4 * h * f32) + mixing * size + collapse
        total += SUBLANES * (2 * self.rows + self.chunk * (2 if local else self.chunks)) * f32
        kept = self.kv_heads * self.buffer * v if mixes_values else self.kept_groups * self.key_base * v
        pieces = 0 if mixes_values else len(self.pieces) * self.tile
        collapsed = self.heads * matrix(pieces, self.key_base)
        total += self.kv_heads * self.buffer * h * size + kept * size + self.heads * self.rows * h * size
        total += (base + self.tile * max(h, v)) * f32
        if self.across_heads:
            total += self.query_groups * self.out_base * v * f32
        elif mixes_values:
            total += self.heads * self.query_groups * self.unit * v * f32
        else:
            total += (collapsed + 2 * matrix(pieces, self.piece_lanes)) * f32
        if local:
            total += (3 * scores + 2 * self.rows * LANES) * f32
            total += 2 * weights * size if mixes_values else 0
        total += (6 if backward else 3) * scores * f32
        if not backward:
            return total
        total += 2 * self.tile * (heads * jnp.dtype(self.gradient_dtype).itemsize + self.key_sources * (h + v) * size)
        turned = self.query_base * round_up(self.heads * query_rows, LANES)
        turned += (2 if mixes_values else 1) * self.key_base * round_up(self.kv_heads * key_rows, LANES)
        if not mixes_values:
            total += 2 * self.kv_heads * matrix(value_rows, self.key_base) * f32
        total += turned * (size + 2 * f32) + collapse * (3 if self.across_heads else 1)
        total += self.kv_heads * self.buffer * h * f32 + kept * f32 + base * f32
        unmixed = h // self.sharing(self.key_groups).count
        unmixed += v // self.sharing(self.key_groups, values=True).count if mixes_values else 0
        total += self.kv_heads * self.rows * unmixed * size
        if not mixes_values:
            total += (collapsed + self.heads * self.tile * v) * f32
        if local:
            total += (
                2 * (weights + self.rows * LANES) * f32
                + 2 * scores * size
                + (0 if self.logits_soft_cap is None else 2 * scores * f32)
            )
        return total
