"""The fused backward kernel: gradients of base heads and mixing tensors, everything in between computed again.

Query tiles take their turns as in the forward pass; gradients of the kept pseudo-keys and -values gather beside them
and are turned into gradients of base heads and of the mixing tensors when the last query that sees them is done.
With the per-head collapse, the gradient of probabilities ``d_out · pseudo-value`` is the same for all P
pseudo-queries of a token, and one number for each of them serves both the softmax's and the collapse's gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_base as base
from iha_jax.ops import pallas_tpu_forward as fwd
from iha_jax.ops import pallas_tpu_strips as strips
from iha_jax.ops import pallas_tpu_tile as tile
from iha_jax.ops import pallas_tpu_unmix as unmix
from iha_jax.ops.pallas_tpu_backward_refs import F32, Extra, Outputs, Scratch, scratch_shapes
from iha_jax.ops.pallas_tpu_chain import HeadChain, sweep
from iha_jax.ops.pallas_tpu_cost import cost_estimate
from iha_jax.ops.pallas_tpu_memory import VMEM_LIMIT
from iha_jax.ops.pallas_tpu_prepare import Rotation, Tokens, Weights
from iha_jax.ops.pallas_tpu_spec import LANES, Spec

WRITTEN_OUT = 800
"""As in the forward kernel: four turns in a row at the paper's layer; with eight it takes 3 percent longer."""


def backward(spec: Spec, tokens: Tokens, weights: Weights, d_out: Array, *, interpret: Any):
    """Runs the kernel for one part of the heads.

    Returns:
      Gradients of `Tokens.query`, `key` and `value`, and those of the four matrices of `Weights` (float32).
    """
    weights = fwd.in_dtype(spec, weights)
    pseudo_rows = weights.value.shape[1]
    if not spec.mixes_values:
        padding = (0, 0), (0, spec.piece_lanes - pseudo_rows), (0, 0)
        weights = weights._replace(value=jnp.pad(weights.value, padding))
    turn = lambda x: x.transpose(2, 0, 1).reshape(x.shape[2], -1)  # noqa: E731
    extra = Extra(
        d_out, tokens.key, tokens.value, tokens.key_rotation,
        turn(weights.query), turn(weights.key), turn(weights.value) if spec.mixes_values else None,
        jnp.swapaxes(weights.collapse, 1, 2) if spec.across_heads else None,
    )  # fmt: skip
    arrays, structure = jax.tree.flatten((tokens, weights, extra))
    in_specs = jax.tree.leaves((fwd.input_specs(spec, tokens, weights), _extra_specs(spec, extra)))
    queries, keys = spec.query_tiles * spec.tile, spec.key_tiles * spec.tile
    head_shapes = [
        (spec.batch, queries, spec.sources * spec.head_dim),
        (spec.batch, keys, spec.key_sources * spec.head_dim),
        (spec.batch, keys, spec.key_sources * spec.value_dim),
    ]
    matrices = [unmix.side_by_side(*x.shape) for x in (weights.query, weights.key, weights.value)]
    if not spec.mixes_values:
        matrices[2] = weights.value.shape
    matrices.append(weights.collapse.shape)
    out_shape = Outputs(
        *(jax.ShapeDtypeStruct(shape, spec.gradient_dtype) for shape in head_shapes),
        *(jax.ShapeDtypeStruct(shape, F32) for shape in matrices),
    )
    departing = functools.partial(fwd.key_tile, spec, lag=spec.lag)
    out_specs = Outputs(
        pl.BlockSpec((1, spec.tile, head_shapes[0][2]), lambda b, s: (b, fwd.query_tile(spec, s), 0)),
        pl.BlockSpec((1, spec.tile, head_shapes[1][2]), lambda b, s: (b, departing(s), 0)),
        pl.BlockSpec((1, spec.tile, head_shapes[2][2]), lambda b, s: (b, departing(s), 0)),
        *(pl.BlockSpec(shape, lambda b, s: (0, 0, 0)) for shape in matrices),
    )
    blocks = zip([*in_specs, *out_specs], (x.dtype for x in [*arrays, *out_shape]), strict=True)
    found = pl.pallas_call(
        functools.partial(_kernel, spec, structure),
        grid=(spec.batch, spec.backward_steps),
        in_specs=in_specs,
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        scratch_shapes=scratch_shapes(spec),
        # Gradients of the mixing tensors gather over the whole grid.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=cost_estimate(spec, backward=True, blocks=blocks),
        interpret=interpret,
        name=f"iha_backward_{spec.kind}",
    )(*arrays)
    found = Outputs(*found)
    mixing = [
        unmix.not_side_by_side(x, heads)
        for x, heads in (
            (found.mix_query, spec.heads),
            (found.mix_key, spec.kv_heads),
            (found.mix_value, spec.kv_heads),
        )[: 3 if spec.mixes_values else 2]
    ]
    if not spec.mixes_values:
        mixing.append(found.mix_value[:, :pseudo_rows])
    # Per head every lane has the whole sum: equal parts of it.
    collapse = found.collapse if spec.across_heads else found.collapse / LANES
    return found.query, found.key, found.value, (*mixing, collapse)


def _extra_specs(spec: Spec, extra: Extra) -> Extra:
    def departing(x: Array) -> pl.BlockSpec:
        one = x.shape[0] == 1
        return pl.BlockSpec(
            (1, spec.tile, x.shape[2]), lambda b, s: (0 if one else b, fwd.key_tile(spec, s, spec.lag), 0)
        )

    lanes = extra.d_out.shape[2]
    return Extra(
        pl.BlockSpec((1, spec.tile, lanes), lambda b, s: (b, fwd.query_tile(spec, s), 0)),
        departing(extra.key),
        departing(extra.value),
        jax.tree.map(departing, extra.key_rotation),
        fwd.whole(extra.query_t),
        fwd.whole(extra.key_t),
        None if extra.value_t is None else fwd.whole(extra.value_t),
        None if extra.collapse_t is None else fwd.whole(extra.collapse_t),
    )


def _kernel(spec: Spec, structure, *refs) -> None:
    count = structure.num_leaves
    tokens, weights, extra = jax.tree.unflatten(structure, refs[:count])
    out = Outputs(*refs[count : count + len(Outputs._fields)])
    scratch = Scratch(*refs[count + len(Outputs._fields) :])
    row, step = pl.program_id(0), pl.program_id(1)

    @pl.when((row == 0) & (step == 0))
    def _():
        for ref in (out.mix_query, out.mix_key, out.mix_value, out.collapse):
            tile.zero(ref)

    @pl.when(step == 0)
    def _():
        for ref in (scratch.key, scratch.value, scratch.query_base, scratch.key_base, scratch.value_base):
            tile.zero(ref)
        tile.zero(scratch.d_key)
        tile.zero(scratch.d_value)
        tile.zero(scratch.d_out)
        # What no part writes; the gradients of keys and values are products with all of it.
        tile.zero(scratch.weights)
        tile.zero(scratch.d_scores)

    if spec.kind == "local":
        fwd.keep_mask(spec, step, tokens, scratch)
        if spec.mixes_values:
            tile.advance(spec, step, scratch.key, scratch.value, scratch.d_key, scratch.d_value)
        else:
            tile.advance(spec, step, scratch.key, scratch.d_key)
            base.advance(spec, step, scratch.value, scratch.d_value)
            base.clear_newest(spec, step, scratch.d_value)
        newest = tile.window_start(spec, step)[2]

        def fresh(head):
            scratch.d_key[head, pl.ds(newest, spec.rows), :] = jnp.zeros((spec.rows, spec.head_dim), F32)
            if spec.mixes_values:
                scratch.d_value[head, pl.ds(newest, spec.rows), :] = jnp.zeros((spec.rows, spec.value_dim), F32)

        # Where queries attend, each with keys of its own, they write and do not add (`HeadChain.spread`).
        attends = (step >= spec.delay) & (step < spec.steps) & (spec.heads == spec.kv_heads)
        pl.when(jnp.logical_not(attends))(lambda: tile.for_each(spec.kv_heads, fresh))

    def arrive():
        fwd.arrive(spec, step, tokens, weights, scratch)

    def attend():
        _attend(spec, step, tokens, weights, extra, scratch, out)

    def depart():
        if spec.kind == "local":
            start = tile.window_start(spec, step)[0]
        else:
            start = pl.multiple_of((step - spec.lag) * spec.rows, 16)
        _depart(spec, step, start, weights, extra, scratch, out)

    if spec.in_step:
        # Without branches in between the compiler overlaps them. What departs in the first steps is rows of zeros, and
        # their outputs are those of the first tile, which are written again.
        @pl.when(step < spec.steps)
        def _():
            arrive()
            attend()
            depart()

        pl.when(step >= spec.steps)(depart)
    else:
        pl.when(step < spec.key_tiles)(arrive)
        pl.when((step >= spec.delay) & (step < spec.steps))(attend)
        pl.when((step >= spec.lag) & (step < spec.lag + spec.key_tiles))(depart)


def _attend(
    spec: Spec, step: Array, tokens: Tokens, weights: Weights, extra: Extra, scratch: Scratch, out: Outputs
) -> None:
    g = spec.query_group
    fwd.take_turn(spec, tokens, weights, scratch)
    if spec.across_heads:
        tile.gather_base(extra.d_out, scratch.d_out, scratch.rows, None, spec.out_heads, g, spec.value_dim)
    elif spec.mixes_values:
        _gather_units(spec, extra.d_out, scratch)
    else:
        d_out = base.gather_heads(spec, extra.d_out, scratch.d_out)
        base.meet(spec, step, d_out, scratch.value, scratch.d_base_weights)
    size = g * spec.pseudo

    sharing = spec.sharing(spec.query_groups)

    def keep(head, d_query, pseudo_out):
        groups = [slice(i * size, (i + 1) * size) for i in range(spec.query_groups)]
        if pseudo_out is not None:
            for i, part in enumerate(groups):
                out.collapse[head] += tile.dot(spec, scratch.d_out[i], pseudo_out[part], (1, 1))
        for k in range(spec.query_groups // sharing.count):
            some = groups[k * sharing.count : (k + 1) * sharing.count]
            d_mixed = unmix.share_lanes([d_query[part] for part in some], sharing)
            d_mixed = _unrotated(d_mixed, weights.query_rotation, spec.score_scale)
            scratch.query[head, groups[k], :] = d_mixed.astype(spec.dtype)

    def keep_means(head, mean):
        if not spec.across_heads:
            out.collapse[head] += jnp.sum(mean.reshape(spec.spans, *out.collapse.shape[1:]), axis=0)

    def one_head(head):
        chain = HeadChain(spec, head, weights, extra, scratch)
        columns = fwd.query_columns(tokens)
        d_query, pseudo_out, mean = sweep(spec, step - spec.delay, tokens, scratch, columns, chain)
        keep_means(head, mean)
        keep(head, d_query, pseudo_out)

    if spec.kind == "local":
        at = pl.ds(tile.window_start(spec, step)[1], spec.chunk)

        def score(head, slot):
            chain = HeadChain(spec, head, weights, extra, scratch)
            products = strips.products(spec, scratch.query.at[head], scratch.key.at[chain.kv], at)
            for part, scores in zip(spec.parts, products, strict=True):
                rows, columns = part.rows, part.columns
                scores, slope = tile.logits(spec, scores, scratch.bias[rows, columns])
                scratch.scores[slot, rows, columns] = scores
                scratch.of_rows[slot, rows, :] = tile.all_lanes(tile.top_of(spec, scores))
                if slope is not None:
                    scratch.slope[slot, rows, columns] = slope
            if spec.mixes_values:
                scratch.d_weights[slot] = chain.d_probabilities(at)
            else:
                products = scratch.d_base_weights[head].astype(spec.dtype)
                d_pieces = tile.dot(spec, products, weights.value[chain.kv], (1, 1))
                scratch.d_weights[slot] = base.from_pieces(spec, d_pieces)

        def exponentiate(head, slot):
            chain, means = HeadChain(spec, head, weights, extra, scratch), []
            for part in spec.parts:
                rows, columns = part.rows, part.columns
                top = tile.over_lanes(scratch.of_rows[slot, rows, :], part.width)
                weight = jnp.exp2(scratch.scores[slot, rows, columns] - top)
                scratch.scores[slot, rows, columns] = weight
                over = tile.reciprocal(jnp.sum(weight, axis=1, keepdims=True), spec.dtype, positive=spec.sees_itself)
                scratch.of_rows[slot, rows, :] = tile.all_lanes(over)
                product = chain.times(weight, scratch.d_weights[slot, part.weight_rows, columns])
                mean = tile.all_lanes(jnp.sum(product, axis=1, keepdims=True) * over)
                scratch.means[slot, rows, :] = mean
                means.append(mean)
            keep_means(head, means[0] if len(means) == 1 else jnp.concatenate(means, axis=0))

        def reduce(head, slot):
            chain, found, d_scores = HeadChain(spec, head, weights, extra, scratch), [], []
            for part in spec.parts:
                rows, columns, weight_rows = part.rows, part.columns, part.weight_rows
                probabilities, d_part = chain.reduce(
                    scratch.scores[slot, rows, columns],
                    scratch.d_weights[slot, weight_rows, columns],
                    scratch.means[slot, rows, :],
                    scratch.of_rows[slot, rows, :],
                    None if spec.logits_soft_cap is None else scratch.slope[slot, rows, columns],
                )
                found.append(probabilities)
                d_scores.append(d_part)
            for (rows, columns), x in zip(spec.strips, strips.to_strips(spec, d_scores), strict=True):
                scratch.d_scores[slot, rows, columns] = x.astype(spec.dtype)
            if spec.mixes_values:
                scratch.weights[slot] = strips.to_whole(spec, found).astype(spec.dtype)
            else:
                scratch.weights[slot] = base.to_pieces(spec, found)

        def spread(head, slot):
            chain = HeadChain(spec, head, weights, extra, scratch)
            if not spec.mixes_values:
                pieces = scratch.weights[slot].astype(spec.dtype)
                scratch.base_weights[head] = tile.dot(spec, pieces, weights.value[chain.kv])
                products = scratch.d_base_weights[head].astype(spec.dtype)
                out.mix_value[chain.kv] += tile.dot(spec, pieces, products, (0, 0))
            keep(head, *chain.spread(at, scratch.weights[slot], scratch.d_scores[slot]))

        tile.pipeline(spec.heads, spec.turns(WRITTEN_OUT), score, exponentiate, reduce, spread)
        if not spec.mixes_values:
            base.add_gradients(spec, step, scratch.base_weights, d_out, scratch.d_value)
    else:
        tile.for_each(spec.heads, one_head)
    h = spec.head_dim
    unmix.unmix_heads(
        spec,
        scratch.query,
        size,
        extra.query_t,
        scratch.query_base,
        scratch.d_query_base,
        out.mix_query,
        sharing,
    )
    tile.scatter_base(scratch.d_query_base, out.query, scratch.rows, tokens.query_rotation, spec.sources, g, h)


def _depart(spec: Spec, step: Array, start, weights: Weights, extra: Extra, scratch: Scratch, out: Outputs) -> None:
    """Turns the oldest tile's gradients into those of base heads and of mixing tensors."""
    h, v = spec.head_dim, spec.value_dim
    sizes, size = (spec.key_sources, spec.key_group), spec.key_group * spec.pseudo
    tile.gather_base(extra.key, scratch.key_base, scratch.rows, extra.key_rotation, *sizes, h)
    if spec.mixes_values:
        tile.gather_base(extra.value, scratch.value_base, scratch.rows, None, *sizes, v)

    sharing, value_sharing = spec.sharing(spec.key_groups), spec.sharing(spec.key_groups, values=True)

    def shared(ref, head, sharing):
        for k in range(spec.key_groups // sharing.count):
            groups = range(k * sharing.count, (k + 1) * sharing.count)
            yield k, unmix.share_lanes([ref[head, tile.rows_at(start, i * size, size), :] for i in groups], sharing)

    def unrotate(head):
        for k, d_mixed in shared(scratch.d_key, head, sharing):
            d_mixed = _unrotated(d_mixed, weights.key_rotation, 1.0)
            scratch.unmixed_key[head, k * size : (k + 1) * size, :] = d_mixed.astype(spec.dtype)
        if spec.mixes_values:
            for k, d_mixed in shared(scratch.d_value, head, value_sharing):
                scratch.unmixed_value[head, k * size : (k + 1) * size, :] = d_mixed.astype(spec.dtype)

    tile.for_each(spec.kv_heads, unrotate, together=spec.kv_heads)
    unmix.unmix_heads(
        spec,
        scratch.unmixed_key,
        size,
        extra.key_t,
        scratch.key_base,
        scratch.d_key_base,
        out.mix_key,
        sharing,
    )
    tile.scatter_base(scratch.d_key_base, out.key, scratch.rows, extra.key_rotation, *sizes, h)
    if spec.mixes_values:
        unmix.unmix_heads(
            spec,
            scratch.unmixed_value,
            size,
            extra.value_t,
            scratch.value_base,
            scratch.d_value_base,
            out.mix_value,
            value_sharing,
        )
        d_value = scratch.d_value_base
    else:
        d_value = scratch.d_value.at[pl.ds(base.first_group(spec, step), spec.key_groups)]
    tile.scatter_base(d_value, out.value, scratch.rows, None, *sizes, v)


def _unrotated(d_mixed: Array, rotation: Rotation | None, scale: float) -> Array:
    """Behind the rotation, whose tables hold the scale where there are any."""
    if rotation is not None:
        return tile.unrotate(d_mixed, rotation.cos[...], rotation.sin[...])
    return d_mixed * scale if scale != 1.0 else d_mixed


def _gather_units(spec: Spec, d_out_ref, scratch: Scratch) -> None:
    """Per head: the outputs' gradients, repeated until they fill a unit."""
    g, v = spec.span, spec.value_dim
    for head in range(spec.heads):
        scratch.rows[:, :v] = d_out_ref[0, :, head * v : (head + 1) * v].astype(F32)
        for i in range(spec.spans):
            for part in range(spec.unit // g):
                at = i * spec.unit + part * g
                scratch.d_out[head, at : at + g, :] = scratch.rows[i * g : (i + 1) * g, :v]
