"""The fused forward kernel for GPUs: base heads in, collapsed heads out."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from iha_jax.ops import pallas_gpu_tile as tile
from iha_jax.ops.pallas_gpu_plan import Spec
from iha_jax.ops.pallas_gpu_prepare import Mixing, Tokens

F32 = jnp.float32


def forward(spec: Spec, tokens: Tokens, mixing: Mixing, *, interpret: bool) -> Array:
    """Runs the kernel: ``[B, T, n, Hv]``, T padded.

    Each block of threads owns a tile of one head's pseudo-queries, goes once over the keys that they see and keeps
    the running maximum, sum and pseudo-outputs of every row; the collapse is its last step.
    """
    sizes = spec.tiles.forward
    rows, own = sizes.owner, sizes.owner // spec.pseudo
    query_len, key_len = tile.lengths(spec)
    reach = spec.reach(sizes, by_query=True)
    shared = spec.heads // spec.kv_heads
    grid = tile.Grid(spec.heads, spec.query_tokens // own, spec.batch, last_first=spec.causal is not None)

    def kernel(tokens: Tokens, mixing: Mixing, out):
        first = grid.split(pl.program_id(0))[1] * rows
        query = tile.queries(spec, tokens, mixing.query, 0, first, rows)

        def step(key_row, masked, carry):
            top, total, sums = carry
            key = tile.keys(spec, tokens, mixing.key, key_row, sizes.visitor)
            value = tile.values(spec, tokens, mixing.value, key_row, sizes.visitor)
            visible = tile.seen(spec, tokens, first, rows, key_row, sizes.visitor) if masked else None
            scores, _ = tile.logits(spec, query, key, visible)
            top, shrink, weights = tile.online(scores, top)
            total = total * shrink + weights.sum(axis=1)
            sums = sums * shrink[:, None] + tile.dot(spec, weights.astype(spec.dtype), value)
            return top, total, sums

        carry = tile.no_rows(rows), jnp.zeros(rows, F32), jnp.zeros((rows, spec.value_dim), F32)
        _, total, sums = tile.over_chunks(spec, sizes, reach, first, query_len, key_len, step, carry)
        weight = mixing.collapse[0, pl.ds(0, rows)] / jnp.where(total > 0, total, 1.0)
        collapsed = (sums * weight[:, None]).reshape(own, spec.pseudo, spec.value_dim).sum(axis=1)
        out[...] = collapsed.astype(out.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((spec.batch, spec.query_tokens, spec.heads, spec.value_dim), spec.dtype),
        grid=grid.shape,
        in_specs=[grid.tokens(tokens), grid.mixing(mixing, 1, lambda h: lax.div(h, jnp.int32(shared)))],
        out_specs=grid.block((None, own, None, spec.value_dim), lambda h, i, b: (b, i, h, 0)),
        compiler_params=tile.compiler_params(sizes),
        interpret=interpret,
        name="iha_gpu_forward",
    )(tokens, mixing)
