"""IHA as one fused GPU operation."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from iha_jax.ops import pallas_gpu_prepare as prepare
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.pallas_gpu_forward import forward
from iha_jax.ops.pallas_gpu_plan import HEAD_DIMS, Spec, Tile, Tiles


def spec_of(args: Arguments, tiles: Tiles) -> Spec:
    return Spec(
        batch=args.query.shape[0],
        query_len=args.query.shape[1],
        key_len=args.key.shape[1],
        sources=args.query.shape[2],
        key_sources=args.key.shape[2],
        heads=args.mixing.num_heads,
        kv_heads=args.mixing.num_kv_heads,
        head_dim=args.head_dim,
        value_dim=args.value.shape[3],
        pseudo=args.num_pseudo_heads,
        tiles=tiles,
        causal=args.causal,
        window=args.window,
        aligned=args.aligned,
        plain=args.default_positions and not args.segmented,
        rotated=args.rope is not None and args.rope.positions == "virtual" and args.num_pseudo_heads > 1,
        scale=float(args.scale),
        logits_soft_cap=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
        precision=args.precision,
        dtype=str(args.query.dtype),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused(spec: Spec, interpret: bool, tokens, weights):
    return forward(spec, tokens, prepare.matrices(spec, *weights), interpret=interpret)


def _fused_forward(spec, interpret, tokens, weights):
    return fused(spec, interpret, tokens, weights), (tokens, weights)


def _fused_backward(spec, interpret, residuals, d_out):
    from iha_jax.ops.pallas_gpu_backward import key_gradients, query_gradients

    tokens, weights = residuals
    matrices = prepare.matrices(spec, *weights)
    statistics, of_queries = query_gradients(spec, tokens, matrices, d_out, interpret=interpret)
    of_keys = key_gradients(spec, tokens, matrices, d_out, statistics, interpret=interpret)
    mean = statistics.mean.reshape(spec.batch, spec.heads, -1, spec.pseudo)
    d_weights = (
        prepare.tensor_gradient(spec, of_queries.mixing, spec.sources),
        prepare.tensor_gradient(spec, of_keys.mix_key, spec.key_sources),
        prepare.tensor_gradient(spec, of_keys.mix_value, spec.key_sources),
        mean.sum(axis=(0, 2)),
    )
    d_weights = tuple(x.astype(w.dtype) for x, w in zip(d_weights, weights, strict=True))

    def no_gradient(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros_like(x)
        return np.zeros(x.shape, jax.dtypes.float0)

    d_tokens = jax.tree.map(no_gradient, tokens)._replace(
        query=of_queries.query.astype(spec.dtype),
        key=of_keys.key.astype(spec.dtype),
        value=of_keys.value.astype(spec.dtype),
    )
    return d_tokens, d_weights


fused.defvjp(_fused_forward, _fused_backward)
