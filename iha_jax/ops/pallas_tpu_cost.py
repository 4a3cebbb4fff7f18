"""The work of the fused TPU kernels, counted from their own tiles, for the compiler's scheduler and for estimates."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import DTypeLike

from iha_jax.ops import tuning
from iha_jax.ops.forms import Problem
from iha_jax.ops.pallas_tpu_plan import DoesNotFit, plan
from iha_jax.ops.pallas_tpu_spec import Spec


def chunk_visits(spec: Spec) -> int:
    """How many (query tile, chunk) pairs a batch row's head computes, skipped ones not counted."""
    if spec.kind == "local":
        return spec.query_tiles
    left, right = spec.reach
    visits = 0
    for i in range(spec.query_tiles):
        low = 0 if left is None else max(i * spec.rows - left, 0) // spec.chunk
        high = spec.chunks
        if right is not None:
            high = min(-(-((i + 1) * spec.rows + right) // spec.chunk), high)
        visits += max(high - low, 0)
    return visits


def products(spec: Spec, backward: bool) -> list[tuple[str, int, int, int, int]]:
    """Every matrix product as (name, times, m, k, n): ``[m, k] @ [k, n]``, for the whole problem."""
    b, n, kv, h, v = spec.batch, spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim
    tiles = b * spec.query_tiles
    arrivals = b * min(spec.key_tiles, spec.backward_steps if backward else spec.steps)
    visits = b * n * chunk_visits(spec)
    sweeps = 1 if spec.kind == "local" else 2
    query_rows, key_rows = spec.query_group * spec.pseudo, spec.key_group * spec.pseudo
    mixes_values = spec.mixes_values or not backward
    rows = spec.weight_rows
    # What a tile's queries see of a chunk, as (queries, columns).
    strips, weight_strips = [(spec.rows, spec.chunk)], [(rows, spec.chunk)]
    if spec.kind == "local":
        strips, weight_strips = ([block.shape for block in x] for x in (spec.strips, spec.weight_strips))
    found = [
        ("mix queries", tiles * n * spec.query_groups, query_rows, spec.query_base, h),
        ("mix keys", arrivals * kv * spec.key_groups, key_rows, spec.key_base, h),
    ]
    found += [("scores", sweeps * visits, some, h, columns) for some, columns in strips]
    if mixes_values:
        found.append(("mix values", arrivals * kv * spec.key_groups, key_rows, spec.key_base, v))
    else:
        found.append(("weights of base values", visits, len(spec.pieces) * spec.tile, spec.piece_lanes, spec.key_base))
    if spec.across_heads:
        found.append(("collapse", tiles * n * spec.query_groups, spec.out_base, query_rows, v))
    if not backward:
        return [*found, *(("values", visits, some, columns, v) for some, columns in weight_strips)]
    if spec.across_heads:
        found += [("values", visits, some, columns, v) for some, columns in weight_strips]
        found.append(("d collapse", tiles * n * spec.query_groups, spec.out_base, v, query_rows))
    if spec.mixes_values:
        found += [
            ("d probabilities", sweeps * visits, rows, v, spec.chunk),
            ("d values", visits, spec.chunk, rows, v),
        ]
    else:
        pieces, every = len(spec.pieces), n * spec.tile
        found += [
            ("d weights of base values", tiles * pieces, every, v, spec.key_base),
            ("d probabilities", visits, pieces * spec.tile, spec.key_base, spec.piece_lanes),
            ("d mixing of values", visits, spec.piece_lanes, pieces * spec.tile, spec.key_base),
            ("d base values", tiles * pieces, spec.key_base, every, v),
        ]
    turns = tiles * n * spec.query_groups // spec.sharing(spec.query_groups).count
    found += [("d queries", visits, some, columns, h) for some, columns in strips]
    found += [
        ("d base queries", turns, spec.query_base, query_rows, h),
        ("d mixing of queries", turns, query_rows, h, spec.query_base),
    ]
    if spec.kind == "local":
        for queries, columns in (block.shape for block in spec.blocks):
            found.append(("d keys", visits, columns, queries, h))
    else:
        found.append(("d keys", visits, spec.chunk, spec.rows, h))
    departures = b * spec.key_tiles * kv * spec.key_groups
    for name, dim in (("keys", h), ("values", v))[: 2 if spec.mixes_values else 1]:
        times = departures // spec.sharing(spec.key_groups, values=name == "values").count
        found += [
            (f"d base {name}", times, spec.key_base, key_rows, dim),
            (f"d mixing of {name}", times, key_rows, dim, spec.key_base),
        ]
    return found


def flops(spec: Spec, backward: bool) -> int:
    """Multiplications and additions of all products, padding included."""
    return sum(2 * times * m * k * n for _, times, m, k, n in products(spec, backward))


def flops_of(problem: Problem, dtype: str) -> tuple[int, int] | None:
    """FLOPs of the forward and of the backward kernel, which recomputes; None where they don't fit on chip.

    Args:
      problem: with positions or segments of its own.
      dtype: of the heads.
    """
    fields = dataclasses.asdict(problem)
    del fields["rotates_pseudo_heads"]
    fields["key_sources"] = fields.pop("kv_sources")
    options = {"scale": 1.0, "logits_soft_cap": None, "precision": None}  # of no weight here
    try:
        spec = plan(**fields, **options, dtype=dtype, sizes=tuning.sizes_for(problem))
    except DoesNotFit:
        return None
    return spec.groups * flops(spec, False), spec.groups * flops(spec, True)


def moved_bytes(grid: tuple[int, ...], blocks: Iterable[tuple[pl.BlockSpec, DTypeLike]]) -> int:
    """Bytes that a call moves between main memory and the chip: a block each time its index changes.

    Args:
      grid: of the call, the last axis fastest.
      blocks: block and dtype of every operand and result.
    """
    steps = [x.reshape(-1) for x in np.indices(grid, dtype=np.int32)]
    total = 0
    for block, dtype in blocks:
        # Both are optional in general, and given here.
        shape: Any = block.block_shape
        index_map: Any = block.index_map
        index = np.stack(np.broadcast_arrays(*(np.asarray(i) for i in index_map(*steps)), steps[0])[:-1])
        fetches = 1 + int(np.count_nonzero((np.diff(index, axis=1) != 0).any(axis=0)))
        total += fetches * math.prod(shape) * jnp.dtype(dtype).itemsize
    return total


def cost_estimate(spec: Spec, backward: bool, blocks: Iterable[tuple[pl.BlockSpec, DTypeLike]]) -> pl.CostEstimate:
    """What the compiler is told about a call.

    Args:
      spec: static description.
      backward: whether it is the backward kernel.
      blocks: block and dtype of every operand and result.
    """
    steps = spec.backward_steps if backward else spec.steps
    scores = spec.batch * spec.heads * chunk_visits(spec) * spec.scores
    sweeps = 1 if spec.kind == "local" else 2
    return pl.CostEstimate(
        flops=flops(spec, backward),
        bytes_accessed=moved_bytes((spec.batch, steps), blocks),
        # A power of two for every score, and the hyperbolic tangent of a cap.
        transcendentals=scores * sweeps * (1 if spec.logits_soft_cap is None else 2),
    )
