"""IHA as one fused GPU operation: pseudo-heads live on chip only, forward and backward.

Base heads go in, collapsed heads come out; the residuals of the backward pass are its inputs. Three kernels: forward,
gradient of queries with the softmax's statistics, gradient of keys and values. Lowered for a CPU they run in Pallas'
interpreter, which is how their values and gradients are tested; they are compiled ahead of time for H100 in the slow
tests. **On hardware they are unmeasured**: tile sizes come from the registers, spills and shared memory that the
compiler reports, and None in place of "pallas" takes blockwise on a GPU. ``benchmarks/gpu.py`` measures.

They are written in the primitives that Pallas shares between its backends and lowered through Triton, which jax 0.11
deprecates in favour of Mosaic GPU. Triton places the synchronisation itself, so what the interpreter computes is what
the hardware computes up to rounding; with Mosaic GPU barriers and asynchronous copies would be our own, of which a
CPU shows only a part; and its interface differs between jax 0.7, 0.10 and 0.12. The tiling would carry over.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import pallas_gpu_prepare as prepare
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.lowering import no_gradient, on_platform
from iha_jax.ops.pallas_gpu_backward import key_gradients, query_gradients
from iha_jax.ops.pallas_gpu_forward import forward
from iha_jax.ops.pallas_gpu_plan import HEAD_DIMS, PSEUDO_HEADS, Spec, Tiles, default_tiles
from iha_jax.ops.pallas_gpu_prepare import Tokens

Weights = tuple[Array, Array, Array, Array]
"""The tensors of `HeadMixing`: query, key, value, collapse."""

_forced: contextvars.ContextVar[Tiles | None] = contextvars.ContextVar("iha_jax_gpu_tiles", default=None)


@contextlib.contextmanager
def force(tiles: Tiles) -> Iterator[None]:
    """Within it these tiles are used instead of `default_tiles`."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


def why_not(args: Arguments) -> str | None:
    """The reason why the fused GPU kernels cannot serve these arguments, or None where they can."""
    if args.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the fused GPU kernels compute in float32 or bfloat16, got {args.query.dtype}"
    if args.mixing.collapse.ndim == 3:
        return "the fused GPU kernels have no across-heads collapse, only the one per head"
    if args.num_pseudo_heads not in PSEUDO_HEADS:
        return f"the fused GPU kernels need P in {PSEUDO_HEADS}, got P={args.num_pseudo_heads}"
    for name, dim in (("H", args.head_dim), ("Hv", args.value.shape[3])):
        if dim not in HEAD_DIMS:
            return f"the fused GPU kernels need {name} in {HEAD_DIMS}, got {name}={dim}"
    return None


def spec_of(args: Arguments) -> Spec:
    """The kernel calls that serve the arguments."""
    dtype = str(args.query.dtype)
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
        tiles=_forced.get() or default_tiles(max(args.head_dim, args.value.shape[3]), dtype),
        causal=args.causal,
        window=args.window,
        aligned=args.aligned,
        plain=args.default_positions and not args.segmented,
        rotated=args.rope is not None and args.rope.positions == "virtual" and args.num_pseudo_heads > 1,
        scale=float(args.scale),
        logits_soft_cap=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
        precision=args.precision,
        dtype=dtype,
    )


def pallas_gpu(args: Arguments) -> Array:
    """Serves whatever `why_not` has nothing against.

    Returns:
      ``[B, T, N, Hv]``.
    """
    spec, args = spec_of(args), args.cleared()
    mixing = args.mixing
    out: Any = fused(spec, prepare.tokens(args, spec), (mixing.query, mixing.key, mixing.value, mixing.collapse))
    return out[:, : spec.query_len]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(spec: Spec, tokens: Tokens, weights: Weights) -> Array:
    """The kernels as a differentiable function of their operands: ``[B, T, n, Hv]``, T padded."""
    return on_platform("cuda", functools.partial(_forward, spec), tokens, weights)


def _fused_forward(spec: Spec, tokens: Tokens, weights: Weights):
    return fused(spec, tokens, weights), (tokens, weights)


def _fused_backward(spec: Spec, residuals: tuple[Tokens, Weights], d_out: Array) -> tuple[Tokens, Weights]:
    tokens, weights = residuals
    (query, key, value), d_weights = on_platform("cuda", functools.partial(_backward, spec), tokens, weights, d_out)
    # Rotations by the pseudo-head's number follow from integers; nothing needs their gradients.
    d_tokens = jax.tree.map(no_gradient, tokens)._replace(query=query, key=key, value=value)
    return d_tokens, d_weights


fused.defvjp(_fused_forward, _fused_backward)


def _forward(spec: Spec, tokens: Tokens, weights: Weights, *, interpret: bool) -> Array:
    return forward(spec, tokens, prepare.matrices(spec, *weights), interpret=interpret)


def _backward(spec: Spec, tokens: Tokens, weights: Weights, d_out: Array, *, interpret: bool):
    matrices = prepare.matrices(spec, *weights)
    statistics, of_queries = query_gradients(spec, tokens, matrices, d_out, interpret=interpret)
    of_keys = key_gradients(spec, tokens, matrices, d_out, statistics, interpret=interpret)
    mean = statistics.mean.reshape(spec.batch, spec.heads, -1, spec.pseudo)
    d_weights = (
        prepare.tensor_gradient(spec, of_queries.mixing, spec.sources),
        prepare.tensor_gradient(spec, of_keys.mix_key, spec.key_sources),
        prepare.tensor_gradient(spec, of_keys.mix_value, spec.key_sources),
        mean.sum(axis=(0, 2)),  # of a pseudo-head: d_out times its output
    )
    d_heads = tuple(x.astype(spec.dtype) for x in (of_queries.query, of_keys.key, of_keys.value))
    return d_heads, tuple(x.astype(w.dtype) for x, w in zip(d_weights, weights, strict=True))
