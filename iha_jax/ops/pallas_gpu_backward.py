"""The fused backward kernels for GPUs: gradients of base heads and mixing tensors, all else computed again.

Two kernels. The first owns queries: one sweep over the keys they see gives the softmax's statistics, the gradient of
the collapse and that of queries. The gradient of the logits is ``p (dp - mean)``, p probabilities, dp their gradients
``d_out · pseudo-value`` and ``mean = Σ p dp`` known only at the end; so ``Σ p dp k`` and ``Σ p k`` are summed side by
side. The second owns keys and is visited by queries, with the statistics at hand. Nothing but base heads is kept from
the forward pass, and beside base heads nothing leaves the chip but two numbers per pseudo-query.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from iha_jax.ops import pallas_gpu_tile as tile
from iha_jax.ops.pallas_gpu_plan import Spec
from iha_jax.ops.pallas_gpu_prepare import Mixing, Tokens

F32 = jnp.float32


# Arrays outside the kernels, block specs around them and refs inside: hence Any.


class Statistics(NamedTuple):
    """Of every pseudo-query ``[B, n, (T, p)]``, float32."""

    total: Any
    """Logarithm (base 2) of the softmax's sum."""
    mean: Any
    """The probabilities' mean of their gradients ``d_out · pseudo-value``, which is ``d_out · pseudo-output``."""


class QueryGradients(NamedTuple):
    """Of the first kernel, float32: base queries ``[B, (T, M), H]`` and mixing ``[n, p, (t, m)]``."""

    query: Any
    mixing: Any


class KeyGradients(NamedTuple):
    """Of the second kernel: base keys and values, and their mixing ``[k, p, (t, m)]``."""

    key: Any
    value: Any
    mix_key: Any
    mix_value: Any


def query_gradients(
    spec: Spec, tokens: Tokens, mixing: Mixing, d_out: Array, *, interpret: bool
) -> tuple[Statistics, QueryGradients]:
    """Runs the first kernel. ``d_out`` is ``[B, T, n, Hv]``, T padded, in the heads' dtype."""
    sizes = spec.tiles.query
    rows, own = sizes.owner, sizes.owner // spec.pseudo
    query_len, key_len = tile.lengths(spec)
    reach = spec.reach(sizes, by_query=True)
    shared = spec.heads // spec.kv_heads
    grid = tile.Grid(spec.heads, spec.query_tokens // own, spec.batch, last_first=spec.causal is not None)

    def kernel(tokens: Tokens, mixing: Mixing, d_out, zeros, statistics: Statistics, gradients: QueryGradients):
        del zeros  # they are the gradients' start, in place
        first = grid.split(pl.program_id(0))[1] * rows
        query = tile.queries(spec, tokens, mixing.query, 0, first, rows)
        d_pseudo = tile.per_pseudo(spec, d_out[...])

        def step(key_row, masked, carry):
            top, total, mean, with_gradient, without = carry
            key = tile.keys(spec, tokens, mixing.key, key_row, sizes.visitor)
            value = tile.values(spec, tokens, mixing.value, key_row, sizes.visitor)
            visible = tile.seen(spec, tokens, first, rows, key_row, sizes.visitor) if masked else None
            scores, slope = tile.logits(spec, query, key, visible)
            top, shrink, weights = tile.online(scores, top)
            product = weights * tile.dot(spec, d_pseudo, value, (1, 1))
            total = total * shrink + weights.sum(axis=1)
            mean = mean * shrink + product.sum(axis=1)
            if slope is not None:
                weights, product = weights * slope, product * slope
            weights, product = weights.astype(spec.dtype), product.astype(spec.dtype)
            shrink = shrink[:, None]
            with_gradient = tuple(
                x * shrink + tile.dot(spec, product, k) for x, k in zip(with_gradient, key, strict=True)
            )
            without = tuple(x * shrink + tile.dot(spec, weights, k) for x, k in zip(without, key, strict=True))
            return top, total, mean, with_gradient, without

        nothing = jnp.zeros(rows, F32)
        sums = tuple(jnp.zeros((rows, size), F32) for _, size in spec.pieces)
        carry = tile.no_rows(rows), nothing, nothing, sums, sums
        carry = tile.over_chunks(spec, sizes, reach, first, query_len, key_len, step, carry)
        top, total, mean, with_gradient, without = carry
        over = 1.0 / jnp.where(total > 0, total, 1.0)
        mean = mean * over
        statistics.total[...] = jnp.where(total > 0, top - jnp.log2(over), tile.NOTHING_SEEN)
        statistics.mean[...] = mean
        factor = (spec.scale * over * mixing.collapse[0, pl.ds(0, rows)])[:, None]
        mean = mean[:, None]
        gradient = tuple(factor * (x - mean * y) for x, y in zip(with_gradient, without, strict=True))
        if spec.rotated:
            cos, sin = tile.rotation(tokens, rows)
            gradient = tile.rotate(gradient, cos, -sin)
        into = gradients.query, gradients.mixing
        tile.unmix(spec, gradient, tokens.query, mixing.query, *into, first, rows, spec.sources, spec.pieces)

    zeros = QueryGradients(
        jnp.zeros(tokens.query.shape, F32),
        jnp.zeros((spec.heads, spec.pseudo, mixing.query.shape[2]), F32),
    )
    per_row = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.query_tokens * spec.pseudo), F32)
    row_block = grid.block((None, None, rows), lambda h, i, b: (b, h, i))
    zero_specs = QueryGradients(grid.row(zeros.query), grid.head(zeros.mixing))
    operands = tokens, mixing, d_out
    return pl.pallas_call(
        kernel,
        out_shape=(Statistics(per_row, per_row), tile.shapes(zeros)),
        grid=grid.shape,
        in_specs=[
            grid.tokens(tokens),
            grid.mixing(mixing, 1, lambda h: lax.div(h, jnp.int32(shared))),
            grid.block((None, own, None, spec.value_dim), lambda h, i, b: (b, i, h, 0)),
            zero_specs,
        ],
        out_specs=(Statistics(row_block, row_block), zero_specs),
        input_output_aliases=tile.in_place(operands, zeros, 2),
        compiler_params=tile.compiler_params(sizes),
        interpret=interpret,
        name="iha_gpu_query_gradients",
    )(*operands, zeros)


def key_gradients(
    spec: Spec, tokens: Tokens, mixing: Mixing, d_out: Array, statistics: Statistics, *, interpret: bool
) -> KeyGradients:
    """Runs the second kernel, on the first one's statistics."""
    sizes = spec.tiles.key
    rows, visit = sizes.owner, sizes.visitor
    query_len, key_len = tile.lengths(spec)
    reach = spec.reach(sizes, by_query=False)
    shared = spec.heads // spec.kv_heads
    grid = tile.Grid(spec.kv_heads, spec.key_tokens * spec.pseudo // rows, spec.batch)

    def kernel(tokens: Tokens, mixing: Mixing, d_out, statistics: Statistics, zeros: KeyGradients, *outputs):
        del zeros
        gradients = KeyGradients(*outputs)
        first = grid.split(pl.program_id(0))[1] * rows
        key = tile.keys(spec, tokens, mixing.key, first, rows)
        value = tile.values(spec, tokens, mixing.value, first, rows)

        def visits(head, carry):
            def step(query_row, masked, carry):
                d_key, d_value = carry
                query = tile.queries(spec, tokens, mixing.query, head, query_row, visit)
                token = pl.ds(lax.div(query_row, jnp.int32(spec.pseudo)), visit // spec.pseudo)
                d_pseudo = tile.per_pseudo(spec, d_out[token, head, :])
                visible = tile.seen(spec, tokens, query_row, visit, first, rows) if masked else None
                scores, slope = tile.logits(spec, query, key, visible)
                at = pl.ds(query_row, visit)
                weights = jnp.exp2(scores - statistics.total[head, at][:, None])
                weights = weights * mixing.collapse[head, pl.ds(0, visit)][:, None]
                d_probabilities = tile.dot(spec, d_pseudo, value, (1, 1))
                d_scores = weights * (d_probabilities - statistics.mean[head, at][:, None])
                if slope is not None:
                    d_scores = d_scores * slope
                weights, d_scores = weights.astype(spec.dtype), d_scores.astype(spec.dtype)
                d_value = d_value + tile.dot(spec, weights, d_pseudo, (0, 0))
                d_key = tuple(x + tile.dot(spec, d_scores, q, (0, 0)) for x, q in zip(d_key, query, strict=True))
                return d_key, d_value

            return tile.over_chunks(spec, sizes, reach, first, key_len, query_len, step, carry)

        d_key = tuple(jnp.zeros((rows, size), F32) for _, size in spec.pieces)
        carry = d_key, jnp.zeros((rows, spec.value_dim), F32)
        d_key, d_value = visits(0, carry) if shared == 1 else lax.fori_loop(0, shared, visits, carry)
        # Scaled queries hold the factor of the logits, in base 2 (or over the cap): d_scores is by natural logits.
        factor = 1 / tile.LOG2_E if spec.logits_soft_cap is None else spec.logits_soft_cap
        d_key = tuple(x * factor for x in d_key)
        if spec.rotated:
            cos, sin = tile.rotation(tokens, rows)
            d_key = tile.rotate(d_key, cos, -sin)
        into = gradients.key, gradients.mix_key
        tile.unmix(spec, d_key, tokens.key, mixing.key, *into, first, rows, spec.key_sources, spec.pieces)
        into = gradients.value, gradients.mix_value
        pieces = ((0, spec.value_dim),)
        tile.unmix(spec, (d_value,), tokens.value, mixing.value, *into, first, rows, spec.key_sources, pieces)

    columns = mixing.key.shape[2]
    zeros = KeyGradients(
        jnp.zeros(tokens.key.shape, F32),
        jnp.zeros(tokens.value.shape, F32),
        *[jnp.zeros((spec.kv_heads, spec.pseudo, columns), F32)] * 2,
    )
    zero_specs = KeyGradients(
        grid.row(zeros.key), grid.row(zeros.value), grid.head(zeros.mix_key), grid.head(zeros.mix_value)
    )
    row_block = grid.block((None, shared, statistics.total.shape[2]), lambda h, i, b: (b, h, 0))
    operands = tokens, mixing, d_out, statistics
    gradients = pl.pallas_call(
        kernel,
        out_shape=tile.shapes(zeros),
        grid=grid.shape,
        in_specs=[
            grid.tokens(tokens),
            grid.mixing(mixing, shared, lambda h: h),
            grid.block((None, spec.query_tokens, shared, spec.value_dim), lambda h, i, b: (b, 0, h, 0)),
            Statistics(row_block, row_block),
            zero_specs,
        ],
        out_specs=zero_specs,
        input_output_aliases=tile.in_place(operands, zeros, 0),
        compiler_params=tile.compiler_params(sizes),
        interpret=interpret,
        name="iha_gpu_key_gradients",
    )(*operands, zeros)
    return KeyGradients(*gradients)
