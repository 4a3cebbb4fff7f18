"""The tiles of the fused TPU kernels for a problem, with the reason for each number (see `pallas_tpu_spec`)."""

import dataclasses
import math

import jax

from iha_jax.ops.block_sizes import Sizes, band_of
from iha_jax.ops.pallas_tpu_memory import VMEM_BYTES, vmem_bytes
from iha_jax.ops.pallas_tpu_spec import LANES, ROWS, SUBLANES, Spec, round_up
from iha_jax.ops.types import Causal

LOCAL_CHUNK = 4096
"""Most pseudo-keys of a local tile: with 128 rows its scores take 2 MiB, each intermediate result as much again."""

PIPELINED = 4
"""Stages of the pipeline over heads (`pallas_tpu_tile.pipeline`): with fewer heads at a time it never fills."""


class DoesNotFit(Exception):
    """A problem that the kernels cannot hold in on-chip memory; says which part is too large."""


def mixing_group(tile: int, heads: int, pseudo: int) -> int:
    """Tokens mixed by one product, a power of two.

    The product has ``group * heads`` terms, of which ``heads`` count: up to 128 the matrix unit does them for free,
    and the ``group * P`` rows of the result must be whole registers in which the tokens repeat.
    """
    group = 1
    while not (group * pseudo % ROWS == 0 and (group >= SUBLANES or pseudo % (SUBLANES // group) == 0)):
        group *= 2
    while group * 2 * heads <= LANES and tile % (group * 2) == 0 and group < 16:
        group *= 2
    return group


def plan(
    *,
    batch: int,
    query_len: int,
    key_len: int,
    sources: int,
    key_sources: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    pseudo: int,
    causal: Causal,
    window: int | None,
    aligned: bool,
    plain: bool = False,
    across_heads: bool,
    scale: float,
    logits_soft_cap: float | None,
    precision: jax.lax.PrecisionLike,
    dtype: str,
    sizes: Sizes = Sizes(),
) -> Spec:
    """The kernel call that serves a problem; its heads may be a part of all, to be run one part after the other.

    ``heads`` and ``kv_heads`` are those to compute, out of all the sources. ``aligned`` is as in `Arguments`;
    ``plain`` says that positions are 0, 1, 2, … and that there are no segments.

    Raises:
      DoesNotFit: if not even one key/value head's part fits on chip.
    """
    band = band_of(causal, window) if aligned else None
    if band is not None and band.left >= key_len and (causal is not None or band.right >= query_len):
        band = None  # the window reaches everything
    parts = [k for k in range(kv_heads, 0, -1) if kv_heads % k == 0]  # key/value heads together, most first
    candidates = []
    shifted = plain and query_len == key_len  # the mask depends on a tile's place only at the ends
    if band is not None:
        wide = (band.left + band.right) * pseudo > 2 * sizes.local_rows
        rows = sizes.global_rows if wide else sizes.local_rows
        tiles = [_tile(rows, query_len, pseudo), _tile(rows // 2, query_len, pseudo)]
        many = [k for k in parts if k >= min(PIPELINED, kv_heads)]
        few = [k for k in parts if k not in many]
        # Large tiles, small ones where that allows for enough heads, then whatever fits.
        for tile, some in ((tiles[0], many), (tiles[1], many), (tiles[0], few), (tiles[1], few)):
            shape = _local(tile, band.left, band.right, pseudo, causal, window, key_len if shifted else None)
            if shape["chunk"] <= LOCAL_CHUNK:
                # Moving the kept tiles less often is worth some memory, but not fewer heads at a time.
                candidates += [({**shape, "slots": n * shape["slots"]}, k) for k in some for n in (4, 2, 1)]
    for rows in (sizes.global_rows, sizes.global_rows // 2):
        tile = _tile(rows, query_len, pseudo)
        shape = _global(tile, query_len, key_len, pseudo, causal if aligned else None, band, sizes)
        candidates += [(shape, k) for k in parts]
    head_size, value_size = head_dim, value_dim
    head_dim, value_dim = round_up(head_dim, LANES), round_up(value_dim, LANES)
    limit = None if window is None else window * (pseudo if causal == "virtual" else 1)
    if limit is not None:
        limit = min(limit, 2**31 - 1)
    lower = 0 if causal is not None else (None if limit is None else 1 - limit)
    needed = 0
    for shape, part in candidates:
        part_heads, tile = part * (heads // kv_heads), shape["tile"]
        group = mixing_group(tile, sources, pseudo)
        span, beyond = group, 0
        if shape["kind"] == "local" and not across_heads:
            span, beyond = _span(shape, group, pseudo)
        if beyond:
            shape = {**shape, "history": shape["history"] - beyond}
        found = Spec(
            batch=batch,
            query_tiles=-(-query_len // tile),
            key_tiles=-(-key_len // tile),
            pseudo=pseudo,
            query_group=group,
            span=span,
            key_group=mixing_group(tile, key_sources, pseudo),
            sources=sources,
            key_sources=key_sources,
            groups=kv_heads // part,
            heads=part_heads,
            kv_heads=part,
            head_dim=head_dim,
            value_dim=value_dim,
            head_size=head_size,
            value_size=value_size,
            out_heads=sources if across_heads else part_heads,
            across_heads=across_heads,
            mixes_values=True,
            distance=(lower, limit),
            free=0 if not plain or window is not None else ("past" if causal is not None else key_len * pseudo),
            scale=float(scale),
            logits_soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
            precision=precision,
            dtype=dtype,
            **shape,
        )
        found = dataclasses.replace(found, mixes_values=_mixes_values(found))
        needed = max(vmem_bytes(found, backward=True), vmem_bytes(found, backward=False))
        if needed <= VMEM_BYTES:
            return found
    raise DoesNotFit(
        f"the pseudo-keys and -values of one head, S={key_len} tokens times P={pseudo}, and their gradients need "
        f"{needed / 2**20:.0f} MiB of on-chip memory, more than {VMEM_BYTES / 2**20:.0f} MiB"
    )


def _span(shape: dict, group: int, pseudo: int) -> tuple[int, int]:
    """Tokens whose pseudo-queries lie together, and columns behind the newest keys, so that most columns stay unseen.

    Keys that a span's queries do not see are left out in whole registers: short spans, and a chunk that ends a little
    behind the newest keys, leave out more of them.
    """
    before, after = shape["seen"]
    rows, chunk = shape["tile"] * pseudo, shape["chunk"]
    first = before + shape["delay"] * rows + rows  # columns that some query sees

    def registers(span: int, beyond: int) -> int:
        size, total = span * pseudo, 0
        for i in range(0, rows, size):
            start = shape["history"] - beyond - shape["delay"] * rows + i
            low = max(start - before, 0) // LANES
            high = min(-(-(start + size + after) // LANES), chunk // LANES)
            total += (high - low) * size
        return total

    spans = [group]
    while spans[-1] % 2 == 0 and _whole_registers(spans[-1] // 2, pseudo):
        spans.append(spans[-1] // 2)
    choices = [(span, beyond) for span in spans for beyond in range(0, chunk - first + 1, ROWS)]
    return min(choices, key=lambda x: registers(*x))


def _whole_registers(span: int, pseudo: int) -> bool:
    """Whether a span's pseudo-queries are whole registers in which its tokens repeat."""
    return span * pseudo % SUBLANES == 0 and (span >= SUBLANES or pseudo % (SUBLANES // span) == 0)


def _mixes_values(spec: Spec) -> bool:
    """Whether pseudo-values take the matrix unit less time backward than weights of base values do."""
    if spec.kind == "global" or spec.across_heads:
        return True
    mixed, base = value_cycles(spec)
    return mixed <= base


def value_cycles(spec: Spec) -> tuple[int, int]:
    """Cycles of the matrix unit that a head's values take backward: with pseudo-values, and never mixed.

    For a local tile. A product of ``m`` rows over up to 128 terms, into up to 128 columns, takes ``m`` cycles, and 128
    to load its matrix.
    """

    def product(m: int, k: int, n: int) -> int:
        return -(-k // LANES) * -(-n // LANES) * (m + LANES)

    size, pieces = spec.key_group * spec.pseudo, len(spec.pieces)
    mixed = -(-spec.key_base // LANES) * spec.rows  # base values are loaded for many heads at once
    mixed += product(spec.weight_rows, spec.chunk, LANES)  # gradients of probabilities
    mixed += product(spec.chunk, spec.weight_rows, LANES)  # gradients of pseudo-values
    mixed += 2 * spec.key_groups * product(spec.key_base, size, LANES)  # those of base values and of the mixing
    base = 2 * product(pieces * spec.tile, size, spec.key_base) + product(size, pieces * spec.tile, spec.key_base)
    rows = spec.heads * spec.tile  # of all heads: products with base values, their gradients
    shared = product(rows, spec.key_base, LANES) + product(spec.key_base, rows, LANES)
    return mixed, base + pieces * shared // spec.heads


def _tile(rows: int, query_len: int, pseudo: int) -> int:
    """Tokens of a tile: about so many rows, in multiples that every mixing group divides."""
    step = SUBLANES if pseudo % 2 == 0 else ROWS
    tile = step * max(1, rows // (step * pseudo))
    tile = 1 << int(math.log2(tile))
    while tile > step and tile // 2 >= query_len:
        tile //= 2
    return tile


def _local(
    tile: int, left: int, right: int, pseudo: int, causal: Causal, window: int | None, length: int | None
) -> dict:
    rows = tile * pseudo
    delay = -(-right // tile)
    before = window * pseudo - 1 if causal == "virtual" and window is not None else left * pseudo
    chunk = round_up(before + delay * rows + rows, LANES)
    while (chunk - rows) % ROWS:
        chunk += LANES
    history = chunk - rows
    lag = -(-history // rows)
    own_masks = None
    if length is not None:
        # Keys before the first token, and after the last.
        own_masks = -(-max(history - delay * rows, 0) // rows), length // tile - delay
    return {
        "kind": "local",
        "seen": (before, right * pseudo),
        "own_masks": own_masks,
        "tile": tile,
        "chunk": chunk,
        "chunks": 1,
        "history": history,
        "lag": lag,
        "delay": delay,
        "slots": max(lag, 1),
        "reach": (None, None),
    }


def _global(tile: int, query_len: int, key_len: int, pseudo: int, causal: Causal, band, sizes: Sizes) -> dict:
    rows = tile * pseudo
    query_tiles, key_tiles = -(-query_len // tile), -(-key_len // tile)
    chunk = min(sizes.global_chunk, round_up(key_tiles * rows, LANES))
    left = None if band is None else band.left * pseudo
    right = 0 if causal is not None else (None if band is None else band.right * pseudo)
    if right is None:
        delay = key_tiles - 1
    else:
        delay = min(-(-right // rows), key_tiles - 1)
    return {
        "kind": "global",
        "seen": (0, 0),
        "own_masks": None,
        "tile": tile,
        "chunk": chunk,
        "chunks": -(-key_tiles * rows // chunk),
        "history": 0,
        "lag": delay + query_tiles - 1,
        "delay": delay,
        "slots": 1,
        "reach": (left, right),
    }
