"""Tile sizes of the blockwise implementation, with the reason for each number."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that depend on the device; `tuning` has measured ones, these are the defaults.

    Attributes:
      local_score_bytes: blockwise: aim for the scores of one step along a narrow window. Two steps run side by side
        (`UNROLL`), and each has three such arrays on their way: at 1 MiB they stay in a CPU core's own cache (at
        4 MiB the same work took 1.2 times as long, at 32 MiB 1.5 to 4 times).
      global_score_bytes: blockwise: the same for wide windows and global layers, of all unrolled stripes together.
      stripes: blockwise: causal layers without a window run in this many stripes of queries, each against its
        visible prefix of keys: (1 + 1/stripes)/2 of the square is computed. More stripes save little and cost
        compile time each.
      local_rows: kernels: aim for the pseudo-queries of a narrow window's tile. A tile sees window + tile keys and
        wastes some of the second part, but the matrix unit spends as long loading 128 keys as multiplying them with
        128 rows, and of larger tiles more whole registers of scores can be left out.
      global_rows: kernels: the same for wide windows and global layers, where a tile is small beside what it sees.
      global_chunk: kernels: pseudo-keys of a chunk: its scores with 256 rows are half a MiB; larger ones waste more
        of the causal diagonal.

    Raises:
      ValueError: for a size that is not a positive whole number.
    """

    local_score_bytes: int = 2**20
    global_score_bytes: int = 4 * 2**20
    stripes: int = 8
    local_rows: int = 320
    global_rows: int = 256
    global_chunk: int = 512

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if self.global_chunk % 128:
            raise ValueError(f"global_chunk must be a multiple of 128, got {self.global_chunk}")


UNROLL = 2
"""Steps of a loop side by side. XLA's CPU runs a batch of small products on one thread, but independent products on
several: two steps take 0.75 times as long as one after the other on two cores. More cost compile time."""

MAX_NARROW_BYTES = 32 * 2**20
"""Above this a single all-heads tile of a window is too large, and heads are taken in groups instead."""

MIN_ROWS = 128
"""Rows (pseudo-queries) worth having in one product before more of them make no difference."""

ROW_OVERHEAD = 24
"""A product of r rows costs about as much as r + ROW_OVERHEAD rows of a large one (measured on CPU at H = 32)."""


FEW_QUERIES = 64
"""Below this many query tokens over more keys it is decoding: the kernels of whole sequences would be mostly padding (a
tile has 160 to 256 pseudo-queries or at least 8 tokens), and all would unfold the keys for it."""

STREAM_SHARE = 8
"""Decoding in XLA: a tile's pseudo-keys are 1/8 of the cached keys; smaller tiles save no more than their rotations."""

STREAM_TILE = 64
"""Decoding in XLA: fewest tokens of a tile; shorter products cost more than they save."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Which keys a query tile touches, in tokens relative to the tile: ``left`` before it, ``right`` after it."""

    left: int
    right: int


@dataclasses.dataclass(frozen=True)
class NarrowPlan:
    """Window layers: many small tiles side by side, all heads at once.

    Attributes:
      tile: query tokens of a tile.
      left: key tiles before the query's own.
      right: key tiles after it.
      group: query tiles side by side in one step.
      steps: how many steps; ``tile * group * steps`` covers T.
    """

    tile: int
    left: int
    right: int
    group: int
    steps: int

    @property
    def key_tokens(self) -> int:
        """Key tokens that a tile is multiplied with."""
        return (self.left + 1 + self.right) * self.tile

    @property
    def padded(self) -> int:
        """Query tokens computed, T rounded up."""
        return self.tile * self.group * self.steps


@dataclasses.dataclass(frozen=True)
class Slab:
    """A range of queries against a range of keys, both in tokens."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int

    @property
    def queries(self) -> int:
        """Query tokens."""
        return self.query_stop - self.query_start

    @property
    def keys(self) -> int:
        """Key tokens."""
        return self.key_stop - self.key_start


@dataclasses.dataclass(frozen=True)
class SlabPlan:
    """Layers with many keys for each query: heads in groups, query tiles one after the other.

    Attributes:
      slabs: distinct shapes, unrolled; or, for wide windows, one shape (indices relative to its position)
        scanned ``repeats`` times.
      repeats: None where the slabs are unrolled.
      kv_heads: key/value heads in a group.
      tile: query tokens of a tile.
    """

    slabs: tuple[Slab, ...]
    repeats: int | None
    kv_heads: int
    tile: int


def band_of(causal: str | None, window: int | None) -> Band | None:
    """The band of key tokens around a query that a window can reach, or None without a window."""
    if window is None:
        return None
    if causal == "virtual":
        return Band(window, 0)  # for p < P-1 the first of the W*P keys lies in token t - W
    if causal == "token":
        return Band(window - 1, 0)
    return Band(window - 1, window - 1)


def narrow_plan(batch: int, query_len: int, heads: int, pseudo: int, band: Band, sizes: Sizes) -> NarrowPlan | None:
    """Tiles for a window, or None where one tile of all heads would be too large."""

    def tiles_around(tile: int) -> tuple[int, int]:
        return -(-band.left // tile), -(-band.right // tile)

    def cost(tile: int) -> float:
        left, right = tiles_around(tile)
        return (left + 1 + right) * tile * (1 + ROW_OVERHEAD / (tile * pseudo))

    reach = max(band.left, band.right, 1)
    # Divisors of the reach waste no part of the band; the rest are for reaches with few divisors.
    lengths = {-(-reach // n) for n in range(1, 17)} | {1, 2, 4, 8, 16, 32, 64, 128}
    tile = min((size for size in lengths if size <= query_len), key=lambda size: (cost(size), size))
    left, right = tiles_around(tile)
    score_bytes = 4 * batch * heads * tile * pseudo * (left + 1 + right) * tile * pseudo
    if score_bytes > MAX_NARROW_BYTES:
        return None
    tiles = -(-query_len // tile)
    # Each group's keys are laid out with the left + right tiles around it: small groups would copy them often.
    overlap = min(2 * (left + right), MAX_NARROW_BYTES // score_bytes)
    group = min(tiles, max(1, sizes.local_score_bytes // score_bytes, overlap))
    steps = -(-tiles // group)
    if steps > 1:  # whole turns of the loop
        steps = UNROLL * round(steps / UNROLL)
    return NarrowPlan(tile=tile, left=left, right=right, group=-(-tiles // steps), steps=steps)


def slab_plan(
    batch: int,
    query_len: int,
    key_len: int,
    heads: int,
    kv_heads: int,
    pseudo: int,
    dims: int,
    *,
    causal_by_index: bool,
    band: Band | None,
    all_heads: bool,
    sizes: Sizes,
) -> SlabPlan:
    """Slabs, head groups and tiles for a global layer or a wide window.

    Args:
      batch: B.
      query_len: T.
      key_len: S.
      heads: N.
      kv_heads: K.
      pseudo: P.
      dims: head dimension of keys and of values together.
      causal_by_index: whether keys after a query's index can be skipped.
      band: the window's reach where it can be used by index, else None.
      all_heads: keep all heads in one group (base scores share the products of base heads).
      sizes: what to aim for.
    """
    repeats = None
    if band is not None:
        reach = band.left + band.right
        length = min(query_len, max(1, reach // sizes.stripes, -(-64 // pseudo)))
        repeats = -(-query_len // length)
        slabs = (Slab(0, length, -band.left, length + band.right),)
    elif causal_by_index:
        length = max(-(-query_len // sizes.stripes), min(query_len, -(-64 // pseudo)))
        starts = range(0, query_len, length)
        slabs = tuple(Slab(i, min(i + length, query_len), 0, min(i + length, key_len)) for i in starts)
    else:
        slabs = (Slab(0, query_len, 0, key_len),)

    keys = max(slab.keys for slab in slabs)
    queries = max(slab.queries for slab in slabs)
    row_bytes = 4 * batch * (heads // kv_heads) * pseudo * pseudo * keys  # one query token, one key/value head
    # A group's pseudo-keys and -values may be no larger than all base heads (or than the budget): decoding reads a
    # long cache with few queries, and must not unfold it P times.
    mixed_bytes = 4 * batch * pseudo * keys * dims  # one key/value head
    mixed_limit = max(sizes.global_score_bytes, 4 * batch * kv_heads * keys * dims)
    # Unrolled slabs may be in flight together, so they share the budget; but a product wants some rows.
    limit = sizes.global_score_bytes
    budget = limit // len(slabs)
    wanted = min(queries, max(1, MIN_ROWS // (pseudo * (heads // kv_heads))))
    group = kv_heads if all_heads else 1
    if not all_heads:
        while group < kv_heads:
            larger = next(n for n in range(group + 1, kv_heads + 1) if kv_heads % n == 0)
            if larger * row_bytes * wanted > budget or larger * mixed_bytes > mixed_limit:
                break
            group = larger
    tile = min(queries, max(budget // (group * row_bytes), min(wanted, limit // (group * row_bytes)), 1))
    tile = math.ceil(queries / math.ceil(queries / tile))
    return SlabPlan(slabs=slabs, repeats=repeats, kv_heads=group, tile=tile)
