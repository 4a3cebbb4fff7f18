"""Tiles of the fused GPU kernels, and everything static about a call.

A kernel's block of threads *owns* some consecutive pseudo-rows of one head (row ``t*P + p`` is pseudo-head p of token
t) and goes through those it can see, *visitors*, a chunk at a time: the forward kernel and the gradient of queries own
queries and are visited by keys, the gradient of keys and values owns keys and is visited by queries. Either side is
mixed from base heads where it is needed, by one product with a block-diagonal matrix (`pallas_gpu_prepare`), which
costs ``sources / P`` times a head's width per row: hence few visitors at a time and many owners.
"""

import dataclasses

import jax

from iha_jax.ops.types import Causal

MIXING_BLOCK = 128
"""Most base rows (token, source) of one mixing product: with H = 128 in bfloat16 they take 32 KiB of shared memory.
Tiles that need no more are mixed by straight code, which the compiler fetches ahead over the loop of chunks; others by
a loop of such products."""

UNMIXING_BLOCK = 32
"""The same for the transpose, which has a ``[rows, block]`` product in registers beside the gradient: at 128 each
thread spilled 600 bytes more (H = 128, 128 rows, ahead of time for H100)."""

HEAD_DIMS = (32, 64, 128)
"""Served: powers of two (Triton's shapes) whose halves are at least 16 wide (the matrix unit's), and no larger than
what leaves registers for two sums of a tile."""

PSEUDO_HEADS = (1, 2, 4, 8, 16)
"""Served: powers of two, of which the smallest tile of 16 rows holds at least one token."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """The sizes of one kernel.

    Attributes:
      owner: pseudo-rows a block of threads owns.
      visitor: pseudo-rows it is visited by at a time.
      warps: of 32 threads.
      stages: how many chunks are on their way from memory.

    Raises:
      ValueError: for sizes that are no powers of two, or rows the matrix unit cannot take (fewer than 16).
    """

    owner: int
    visitor: int
    warps: int
    stages: int

    def __post_init__(self):
        for name in ("owner", "visitor", "warps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value!r}")
        if not isinstance(self.stages, int) or self.stages < 1:
            raise ValueError(f"stages must be a positive whole number, got {self.stages!r}")
        if self.visitor < 16 or self.owner < self.visitor:
            raise ValueError(f"expected 16 <= visitor <= owner, got visitor={self.visitor}, owner={self.owner}")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The sizes of the three kernels: forward, gradient of queries, gradient of keys and values."""

    forward: Tile
    query: Tile
    key: Tile

    @property
    def owner(self) -> int:
        """Rows that sequences are padded to: the largest owner, of which all others are divisors."""
        return max(tile.owner for tile in (self.forward, self.query, self.key))


def default_tiles(head_dim: int, dtype: str) -> Tiles:
    """Sizes that spill few registers or none, ahead of time for H100 (at most 255 registers a thread).

    More owners share the mixing of their visitors, fewer visitors leave registers for the sums. Bytes spilled by a
    thread, forward / queries / keys, bfloat16, N 8, P 4: H = 64 none; H = 128 none / 500 / none. With 64 visitors it
    is 1600 / 3900 / 2000 at H = 128; for keys 128 owners spill 460. Shared memory stays below half of an H100's
    227 KiB (but for 32 heads with P = 2: 128 KiB), so that registers alone decide how many blocks of threads share a
    processor.
    """
    if dtype == "float32":  # twice the shared memory, and products that keep their operands in registers
        tile = Tile(owner=64, visitor=16, warps=8, stages=1)
        return Tiles(tile, tile, tile)
    wide = Tile(owner=128, visitor=32, warps=8, stages=2)
    if head_dim <= 64:
        return Tiles(wide, wide, wide)
    return Tiles(wide, Tile(owner=128, visitor=32, warps=8, stages=1), Tile(owner=64, visitor=32, warps=8, stages=2))


@dataclasses.dataclass(frozen=True)
class Reach:
    """What an owner's rows see, relative to its first row; None: no limit.

    Attributes:
      start: no row before this is seen by any of them.
      stop: nor from this on.
      core_start: from this row on, up to ``core_stop``, all of them see everything.
      core_stop: see there.
    """

    start: int | None
    stop: int | None
    core_start: int | None
    core_stop: int | None


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a call.

    Attributes:
      batch: B.
      query_len: T.
      key_len: S.
      sources: query heads that are mixed (M).
      key_sources: key/value heads that are mixed (L).
      heads: query heads that are made and attended with.
      kv_heads: key/value heads that are made.
      head_dim: H.
      value_dim: that of the values.
      pseudo: P.
      tiles: sizes of the kernels.
      causal: which order visibility follows.
      window: W, or None.
      aligned: as in `Arguments`: chunks may be skipped by index.
      plain: positions are 0, 1, 2, … and there are no segments: only edges are masked.
      rotated: whether pseudo-heads are rotated by their number.
      scale: of the logits.
      logits_soft_cap: cap, or None.
      precision: of contractions of float32.
      dtype: of inputs, pseudo-heads and outputs.
    """

    batch: int
    query_len: int
    key_len: int
    sources: int
    key_sources: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    pseudo: int
    tiles: Tiles
    causal: Causal
    window: int | None
    aligned: bool
    plain: bool
    rotated: bool
    scale: float
    logits_soft_cap: float | None
    precision: jax.lax.PrecisionLike
    dtype: str

    @property
    def query_tokens(self) -> int:
        """T, padded."""
        return self._padded(self.query_len)

    @property
    def key_tokens(self) -> int:
        """S, padded."""
        return self._padded(self.key_len)

    def _padded(self, length: int) -> int:
        tokens = self.tiles.owner // self.pseudo
        return -(-length // tokens) * tokens

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Parts (start, size) of a head's width that products are taken of: halves where pairs are rotated."""
        half = self.head_dim // 2
        return ((0, half), (half, half)) if self.rotated else ((0, self.head_dim),)

    def mixing(self, rows: int, sources: int, most: int = MIXING_BLOCK) -> tuple[int, int]:
        """Products (number, base rows of each, at most ``most``) that mix so many pseudo-rows."""
        terms = rows // self.pseudo * sources
        block = most
        while block > 16 and terms % block:
            block //= 2
        return -(-terms // block), block

    def mixing_columns(self, sources: int) -> int:
        """Base rows of the largest owner, padded."""
        count, block = self.mixing(self.tiles.owner, sources)
        return count * block

    def base_rows(self, tokens: int, sources: int) -> int:
        """Rows (token, source) of base heads, with those that the last mixing product reads in vain."""
        excess = 0
        for tile in dataclasses.astuple(self.tiles):
            for rows in tile[:2]:
                count, block = self.mixing(rows, sources)
                excess = max(excess, count * block - rows // self.pseudo * sources)
        return tokens * sources + excess

    @property
    def distance(self) -> tuple[int | None, int | None]:
        """Half-open range of allowed (query index - key index)."""
        if self.window is None:
            return (None if self.causal is None else 0), None
        limit = min(self.window * (self.pseudo if self.causal == "virtual" else 1), 2**31 - 1)
        return (1 - limit if self.causal is None else 0), limit

    def reach(self, tile: Tile, by_query: bool) -> Reach:
        """What an owner sees: keys if its rows are queries, else queries."""
        rows, pseudo = tile.owner, self.pseudo
        far = None if self.window is None else self.window * pseudo
        if self.causal is None:
            start = stop = core_start = core_stop = None
            if far is not None:
                start, stop, core_start, core_stop = pseudo - far, rows + far - pseudo, rows - far, far
        else:
            step = 1 if self.causal == "virtual" else pseudo
            before = None if far is None else step - far
            core_before = None if far is None else rows - far
            if by_query:
                start, stop, core_start, core_stop = before, rows, core_before, step
            else:
                start, core_start = 0, rows - step
                stop, core_stop = (None, None) if far is None else (rows + far - step, far)
        if not self.aligned:
            start = stop = None
        if not self.plain:
            core_start = core_stop = 0
        return Reach(start, stop, core_start, core_stop)
