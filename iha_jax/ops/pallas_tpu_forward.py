"""The fused forward kernel: base heads in, collapsed heads out."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_base as base
from iha_jax.ops import pallas_tpu_strips as strips
from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops.pallas_tpu_cost import cost_estimate
from iha_jax.ops.pallas_tpu_memory import VMEM_LIMIT
from iha_jax.ops.pallas_tpu_prepare import Rotation, Tokens, Weights
from iha_jax.ops.pallas_tpu_spec import LANES, Spec

F32 = jnp.float32

WRITTEN_OUT = 1800
"""Registers of scores whose turns of the pipeline over heads are written out: at the paper's layer all of them (four in
a row take 4 percent longer), of wide windows as many as do not spill more than they overlap."""


class Scratch(NamedTuple):
    """On-chip memory of the forward kernel."""

    key: Any  # [k, buffer, H] pseudo-keys
    value: Any  # [k, buffer, Hv] pseudo-values
    query: Any  # [n, rows, H] pseudo-queries of the tile
    query_base: Any  # float32 [query groups, M*g, H]
    key_base: Any  # float32 [key groups, L*g, H]
    value_base: Any  # float32 [key groups, L*g, Hv]
    rows: Any  # float32 [tile, max(H, Hv)]
    out: Any  # float32: per head [n, spans*unit, Hv], across heads [groups, N*g, Hv]
    bias: Any  # float32 [rows, chunk], local only
    scores: Any  # float32 [2, rows, chunk], then their exponentials, local only
    of_rows: Any  # float32 [2, rows, 128]: their maxima, then what normalises them, local only
    weights: Any  # [2, spans*unit or rows, chunk], local only


def forward(spec: Spec, tokens: Tokens, weights: Weights, *, interpret: Any) -> Array:
    """Runs the kernel for one part of the heads: ``[B, query tiles * tile, out heads * Hv]``."""
    # Here pseudo-values are faster by the compiler's schedule, though they take the matrix unit longer: with tiles of
    # 8 tokens the paper's layer took 7947 bundles a tile on v5e, and 8336 with weights of base values.
    spec = dataclasses.replace(spec, mixes_values=True)
    weights = in_dtype(spec, weights)
    arrays, structure = jax.tree.flatten((tokens, weights))
    specs = jax.tree.leaves(input_specs(spec, tokens, weights))
    if spec.across_heads:
        out_rows = (spec.query_groups, spec.out_base, spec.value_dim)
    else:
        out_rows = (spec.heads, spec.spans * spec.unit, spec.value_dim)
    shapes = [
        *buffers(spec),
        pltpu.VMEM(out_rows, F32),
        local_only(spec, spec.rows, spec.chunk),
        local_only(spec, 2, spec.rows, spec.chunk),
        local_only(spec, 2, spec.rows, LANES),
        local_only(spec, 2, spec.weight_rows, spec.chunk, dtype=jnp.dtype(spec.dtype)),
    ]
    lanes = spec.out_heads * spec.value_dim
    out_spec = pl.BlockSpec((1, spec.tile, lanes), lambda b, s: (b, query_tile(spec, s), 0))
    blocks = [*zip(specs, (x.dtype for x in arrays), strict=True), (out_spec, spec.out_dtype)]
    return pl.pallas_call(
        functools.partial(_kernel, spec, structure),
        grid=(spec.batch, spec.steps),
        in_specs=specs,
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct((spec.batch, spec.query_tiles * spec.tile, lanes), spec.out_dtype),
        scratch_shapes=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=cost_estimate(spec, backward=False, blocks=blocks),
        interpret=interpret,
        name=f"iha_forward_{spec.kind}",
    )(*arrays)


def in_dtype(spec: Spec, weights: Weights) -> Weights:
    """The matrices that mix heads, in the heads' dtype; the collapse and rotations stay float32."""
    return weights._replace(
        query=weights.query.astype(spec.dtype),
        key=weights.key.astype(spec.dtype),
        value=weights.value.astype(spec.dtype),
    )


def query_tile(spec: Spec, step):
    """The query tile whose turn it is, or the nearest one."""
    return _clip(step - spec.delay, spec.query_tiles - 1)


def key_tile(spec: Spec, step, lag: int = 0):
    """The key tile that arrived ``lag`` steps ago, or the nearest one."""
    return _clip(step - lag, spec.key_tiles - 1)


def _clip(x, highest: int):
    # Costs are counted in NumPy: what JAX computes while tracing would run on the mesh in force, which may be of chips
    # that are only compiled for.
    return (np if isinstance(x, np.ndarray) else jnp).clip(x, 0, highest)


def buffers(spec: Spec) -> list:
    """The first entries of the scratch memory of both kernels."""
    width = max(spec.head_dim, spec.value_dim)
    return [
        pltpu.VMEM((spec.kv_heads, spec.buffer, spec.head_dim), jnp.dtype(spec.dtype)),
        pltpu.VMEM(kept_values(spec), jnp.dtype(spec.dtype)),
        pltpu.VMEM((spec.heads, spec.rows, spec.head_dim), jnp.dtype(spec.dtype)),
        pltpu.VMEM((spec.query_groups, spec.query_base, spec.head_dim), F32),
        pltpu.VMEM((spec.key_groups, spec.key_base, spec.head_dim), F32),
        pltpu.VMEM((spec.key_groups, spec.key_base, spec.value_dim), F32),
        pltpu.VMEM((spec.tile, width), F32),
    ]


def kept_values(spec: Spec) -> tuple[int, int, int]:
    """The shape of what is kept of values."""
    if spec.mixes_values:
        return spec.kv_heads, spec.buffer, spec.value_dim
    return spec.kept_groups, spec.key_base, spec.value_dim


def whole(x: Array) -> pl.BlockSpec:
    """An operand that stays: fetched once, so one buffer is enough."""
    return pl.BlockSpec(x.shape, lambda b, s: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))


def local_only(spec: Spec, *shape: int, dtype: Any = F32):
    """Scratch memory that only the local kernels use."""
    return only_if(spec.kind == "local", *shape, dtype=dtype)


def only_if(used: bool, *shape: int, dtype: Any = F32):
    """Scratch memory, next to none if it is not used."""
    return pltpu.VMEM(shape if used else (*[1] * (len(shape) - 2), 16, 128), dtype)


def input_specs(spec: Spec, tokens: Tokens, weights: Weights) -> tuple[Tokens, Weights]:
    """Which block of every operand a grid step needs."""

    def of_tile(x: Array, index) -> pl.BlockSpec:
        one = x.shape[0] == 1
        return pl.BlockSpec((1, spec.tile, x.shape[2]), lambda b, s: (0 if one else b, index(spec, s), 0))

    def of_index(x: Array, index) -> pl.BlockSpec:
        one, count = x.shape[0] == 1, x.shape[1] if index is None else 1
        at = (lambda s: 0) if index is None else functools.partial(index, spec)
        buffers = {"pipeline_mode": pl.Buffered(1)} if index is None else {}
        return pl.BlockSpec((1, count, *x.shape[2:]), lambda b, s: (0 if one else b, at(s), 0, 0), **buffers)

    def rotation(x: Rotation | None, index) -> Rotation | None:
        return None if x is None else Rotation(of_tile(x.cos, index), of_tile(x.sin, index))

    return (
        Tokens(
            query=of_tile(tokens.query, query_tile),
            key=of_tile(tokens.key, key_tile),
            value=of_tile(tokens.value, key_tile),
            query_rotation=rotation(tokens.query_rotation, query_tile),
            key_rotation=rotation(tokens.key_rotation, key_tile),
            query_index=of_index(tokens.query_index, query_tile),
            key_index=of_index(tokens.key_index, query_tile if spec.kind == "local" else None),
        ),
        jax.tree.map(whole, weights),
    )


def arrive(spec: Spec, step: Array, tokens: Tokens, weights: Weights, scratch) -> None:
    """Takes in a key tile: base rows, then pseudo-keys and -values of every head."""
    if spec.kind == "local":
        start = tile.window_start(spec, step)[2]
    else:
        start = pl.multiple_of(step * spec.rows, 16)
    sizes = (spec.key_sources, spec.key_group)
    tile.gather_base(tokens.key, scratch.key_base, scratch.rows, tokens.key_rotation, *sizes, spec.head_dim)
    tile.gather_base(tokens.value, scratch.value_base, scratch.rows, None, *sizes, spec.value_dim)
    mixes = [tile.Mix(weights.key, scratch.key_base, weights.key_rotation, 1.0, scratch.key, start)]
    if spec.mixes_values:
        mixes.append(tile.Mix(weights.value, scratch.value_base, None, 1.0, scratch.value, start))
    else:
        base.keep(spec, step, scratch.value_base, scratch.value)
    tile.mix_heads(spec, *mixes)


def take_turn(spec: Spec, tokens: Tokens, weights: Weights, scratch) -> None:
    """Pseudo-queries of every head of a query tile."""
    tile.gather_base(
        tokens.query,
        scratch.query_base,
        scratch.rows,
        tokens.query_rotation,
        spec.sources,
        spec.query_group,
        spec.head_dim,
    )
    rotation, scale = weights.query_rotation, spec.score_scale
    tile.mix_heads(spec, tile.Mix(weights.query, scratch.query_base, rotation, scale, scratch.query, 0))


def query_columns(tokens: Tokens) -> tuple[Array, Array]:
    """Index and segment of the tile's pseudo-queries, int32 ``[rows, 1]``."""
    return tile.as_column(tokens.query_index[0, 0, 0:1]), tile.as_column(tokens.query_index[0, 0, 1:2])


def _kernel(spec: Spec, structure, *refs) -> None:
    count = structure.num_leaves
    tokens, weights = jax.tree.unflatten(structure, refs[:count])
    out_ref, scratch = refs[count], Scratch(*refs[count + 1 :])
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        # What was never written is multiplied by weights of 0 and must be finite.
        for ref in (scratch.key, scratch.value, scratch.query_base, scratch.key_base, scratch.value_base):
            tile.zero(ref)

    if spec.kind == "local":
        keep_mask(spec, step, tokens, scratch)
        tile.advance(spec, step, scratch.key, scratch.value)

    # Where every step does both there is no branch between them, and the compiler overlaps them.
    attends = step >= spec.delay if spec.delay else True
    when(step < spec.key_tiles if spec.key_tiles < spec.steps else True, arrive, spec, step, tokens, weights, scratch)
    when(attends, _attend, spec, step, tokens, weights, scratch, out_ref)


def when(condition, body, *args) -> None:
    """Calls ``body`` if the condition holds, which may be known beforehand."""
    if condition is True:
        body(*args)
    else:
        pl.when(condition)(lambda: body(*args))


def keep_mask(spec: Spec, step: Array, tokens: Tokens, scratch) -> None:
    """Local: writes the mask of a step's query tile unless it is that of the tile before."""

    def write():
        scratch.bias[...] = tile.mask_bias(spec, query_columns(tokens), tokens.key_index[0, 0])

    if spec.own_masks is None:
        write()
    else:
        first, last = spec.own_masks
        turn = step - spec.delay
        pl.when((turn <= first) | (turn >= last))(write)


def _attend(spec: Spec, step: Array, tokens: Tokens, weights: Weights, scratch: Scratch, out_ref) -> None:
    take_turn(spec, tokens, weights, scratch)
    if spec.across_heads:
        tile.zero(scratch.out)

    def keep(head, result):
        if spec.across_heads:
            size = spec.query_group * spec.pseudo
            for i in range(spec.query_groups):
                part = result[i * size : (i + 1) * size]
                scratch.out[i] += tile.dot(spec, weights.collapse[head], part)
        else:
            scratch.out[head] = result

    if spec.kind == "local":
        at = pl.ds(tile.window_start(spec, step)[1], spec.chunk)

        def score(head, slot):
            products = strips.products(spec, scratch.query.at[head], scratch.key.at[tile.kv_head(spec, head)], at)
            for part, scores in zip(spec.parts, products, strict=True):
                scores = tile.logits(spec, scores, scratch.bias[part.rows, part.columns])[0]
                scratch.scores[slot, part.rows, part.columns] = scores
                scratch.of_rows[slot, part.rows, :] = tile.all_lanes(tile.top_of(spec, scores))

        def exponentiate(head, slot):
            for part in spec.parts:
                top = tile.over_lanes(scratch.of_rows[slot, part.rows, :], part.width)
                scores = jnp.exp2(scratch.scores[slot, part.rows, part.columns] - top)
                scratch.scores[slot, part.rows, part.columns] = scores
                over = tile.all_lanes(
                    tile.reciprocal(jnp.sum(scores, axis=1, keepdims=True), spec.dtype, positive=spec.sees_itself)
                )
                if not spec.across_heads:
                    over = tile.by_span(over, weights.collapse[head])
                scratch.of_rows[slot, part.rows, :] = over

        def normalise(head, slot):
            del head
            found = []
            for part in spec.parts:
                scores, factor = scratch.scores[slot, part.rows, part.columns], scratch.of_rows[slot, part.rows, :]
                found.append(_weights(spec, scores, factor))
            scratch.weights[slot] = strips.to_whole(spec, found).astype(spec.dtype)

        def multiply(head, slot):
            value = scratch.value.at[tile.kv_head(spec, head)]
            keep(head, strips.by_strips(spec, spec.weight_strips, scratch.weights.at[slot], value, at))

        tile.pipeline(spec.heads, spec.turns(WRITTEN_OUT), score, exponentiate, normalise, multiply)
    else:
        columns = query_columns(tokens)
        tile.for_each(
            spec.heads,
            lambda head: keep(head, _sweep(spec, step - spec.delay, tokens, weights, scratch, columns, head)),
        )
    if spec.across_heads:
        tile.scatter_base(scratch.out, out_ref, scratch.rows, None, spec.out_heads, spec.query_group, spec.value_dim)
    else:
        _write_heads(spec, scratch, out_ref)


def _weights(spec: Spec, scores: Array, factor: Array) -> Array:
    """Probabilities in float32: collapsed ``[spans*unit, c]``, or across heads all ``[rows, c]``.

    Args:
      spec: static description.
      scores: unnormalised probabilities ``[rows, c]``.
      factor: ``[rows, 128]``, what normalises them, times the weight in a per-head collapse.
    """
    scores = scores * tile.over_lanes(factor, scores.shape[1])
    return scores if spec.across_heads else tile.per_unit(spec, scores)


def _sweep(spec: Spec, number: Array, tokens: Tokens, weights: Weights, scratch: Scratch, columns, head):
    """Global: statistics over all visible chunks, then the result from the same scores."""
    query, kv = scratch.query[head], tile.kv_head(spec, head)

    def scores_of(j, masked):
        at = pl.ds(pl.multiple_of(j * spec.chunk, 128), spec.chunk)
        bias = tile.mask_bias(spec, columns, tokens.key_index[0, j]) if masked else None
        return tile.logits(spec, tile.dot(spec, query, scratch.key[kv, at, :], (1, 1)), bias)[0], at

    def statistics(j, carry, masked):
        top, total = carry
        scores, _ = scores_of(j, masked)
        new = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        return new, total * jnp.exp2(top - new) + jnp.sum(jnp.exp2(scores - new), axis=1, keepdims=True)

    start = jnp.full((spec.rows, 1), tile.LOWEST, F32), jnp.zeros((spec.rows, 1), F32)
    top, total = tile.over_chunks(spec, number, statistics, start)
    factor = tile.all_lanes(tile.reciprocal(total, spec.dtype, positive=spec.sees_itself))
    if not spec.across_heads:
        factor = tile.by_span(factor, weights.collapse[head])

    def result(j, carry, masked):
        scores, at = scores_of(j, masked)
        found = _weights(spec, jnp.exp2(scores - top), factor)
        return carry + tile.dot(spec, found.astype(spec.dtype), scratch.value[kv, at, :])

    return tile.over_chunks(spec, number, result, jnp.zeros((spec.weight_rows, spec.value_dim), F32))


def _write_heads(spec: Spec, scratch: Scratch, out_ref) -> None:
    """Per head: adds up the parts of a unit that belong to one token and puts heads side by side."""
    g = spec.span
    for head in range(spec.heads):
        for i in range(spec.spans):
            parts = [
                scratch.out[head, i * spec.unit + part * g : i * spec.unit + (part + 1) * g, :]
                for part in range(spec.unit // g)
            ]
            scratch.rows[i * g : (i + 1) * g, : spec.value_dim] = functools.reduce(jnp.add, parts)
        at = slice(head * spec.value_dim, (head + 1) * spec.value_dim)
        out_ref[0, :, at] = scratch.rows[:, : spec.value_dim].astype(out_ref.dtype)
