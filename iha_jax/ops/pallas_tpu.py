"""IHA as one fused TPU operation: pseudo-heads live on chip only, forward and backward.

Base heads go in, collapsed heads come out. The residuals of the backward pass are its inputs: pseudo-heads, scores and
the softmax's statistics are computed again from the base heads. On a CPU the kernels run in Pallas' interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import pallas_tpu_prepare as prepare
from iha_jax.ops import tuning
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.forms import Problem
from iha_jax.ops.lowering import no_gradient, on_platform
from iha_jax.ops.pallas_tpu_backward import backward
from iha_jax.ops.pallas_tpu_forward import forward
from iha_jax.ops.pallas_tpu_plan import DoesNotFit, plan
from iha_jax.ops.pallas_tpu_prepare import Tokens, Weights
from iha_jax.ops.pallas_tpu_spec import Spec


def why_not(args: Arguments) -> str | None:
    """The reason why the fused kernels cannot serve these arguments, or None where they can."""
    if args.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the fused kernels compute in float32 or bfloat16, got {args.query.dtype}"
    try:
        spec_of(args)
    except DoesNotFit as reason:
        return str(reason)
    return None


def spec_of(args: Arguments) -> Spec:
    """The kernel call that serves the arguments.

    Raises:
      DoesNotFit: if on-chip memory is too small.
    """
    return plan(
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
        causal=args.causal,
        window=args.window,
        aligned=args.aligned,
        plain=args.default_positions and not args.segmented,
        across_heads=args.mixing.collapse.ndim == 3,
        scale=args.scale,
        logits_soft_cap=args.logits_soft_cap,
        precision=args.precision,
        dtype=str(args.query.dtype),
        sizes=tuning.sizes_for(Problem.of(args)),
    )


def pallas_tpu(args: Arguments) -> Array:
    """Serves whatever `why_not` has nothing against.

    Heads that do not fit on chip together run one group after the other; with the across-heads collapse their
    contributions are summed in float32.

    Returns:
      ``[B, T, N, Hv]``.
    """
    spec, args = spec_of(args), args.cleared()
    out: Any = fused(spec, prepare.tokens(args, spec), prepare.weights(args, spec))
    out_heads = args.mixing.collapse.shape[0]
    out = prepare.heads_from_lanes(out, args.query.shape[1], out_heads, args.value.shape[3])
    return out.astype(args.query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(spec: Spec, tokens: Tokens, weights: Weights) -> Array:
    """The kernels as a differentiable function of their operands: ``[B, T, N * Hv]``, T padded."""
    run = _alone(spec, functools.partial(on_platform, "tpu", functools.partial(forward, spec)))
    if spec.groups == 1:
        return run(tokens, weights)
    if spec.across_heads:
        zero = jnp.zeros((spec.batch, spec.query_tiles * spec.tile, spec.out_heads * spec.value_dim), jnp.float32)
        step = lambda total, part: (total + run(tokens, _with_part(weights, part)), None)  # noqa: E731
        return jax.lax.scan(step, zero, _matrices(weights))[0]
    out = jax.lax.map(lambda part: run(tokens, _with_part(weights, part)), _matrices(weights))
    return jnp.moveaxis(out, 0, 2).reshape(*out.shape[1:3], -1)


def _fused_forward(spec: Spec, tokens: Tokens, weights: Weights):
    return fused(spec, tokens, weights), (tokens, weights)


def _fused_backward(spec: Spec, residuals: tuple[Tokens, Weights], d_out: Array) -> tuple[Tokens, Weights]:
    tokens, weights = residuals
    run = _alone(spec, functools.partial(on_platform, "tpu", functools.partial(backward, spec)))
    d_out = prepare.output_gradient(d_out, spec).astype(spec.dtype)
    if spec.groups == 1:
        *d_heads, matrices = run(tokens, weights, d_out)
    else:
        # With the per-head collapse every part of the heads has its own outputs.
        d_parts = None
        if not spec.across_heads:
            d_parts = jnp.moveaxis(d_out.reshape(*d_out.shape[:2], spec.groups, -1), 2, 0)

        def step(total, xs):
            part, d_part = xs
            *d_heads, matrices = run(tokens, _with_part(weights, part), d_out if d_part is None else d_part)
            return [x + y for x, y in zip(total, d_heads, strict=True)], matrices

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (tokens.query, tokens.key, tokens.value)]
        d_heads, matrices = jax.lax.scan(step, zeros, (_matrices(weights), d_parts))
    query, key, value = (x.astype(spec.dtype) for x in d_heads)
    # Rotations follow from integers; nothing needs their gradients.
    d_tokens = jax.tree.map(no_gradient, tokens)._replace(query=query, key=key, value=value)
    return d_tokens, _with_part(jax.tree.map(no_gradient, weights), matrices)


fused.defvjp(_fused_forward, _fused_backward)


def _alone(spec: Spec, run: Callable) -> Callable:
    """Keeps the compiler from fusing the kernel with what the loop over parts of the heads does around it.

    A fusion forgets how much memory on chip its kernel was allowed (libtpu 0.0.42), and then has too little.
    """
    if spec.groups == 1:
        return run
    barrier = jax.lax.optimization_barrier
    return lambda *operands: barrier(run(*barrier(operands)))


def _matrices(weights: Weights) -> tuple[Array, Array, Array, Array]:
    return weights.query, weights.key, weights.value, weights.collapse


def _with_part(weights: Weights, part: tuple[Array, Array, Array, Array]) -> Weights:
    query, key, value, collapse = part
    return weights._replace(query=query, key=key, value=value, collapse=collapse)
