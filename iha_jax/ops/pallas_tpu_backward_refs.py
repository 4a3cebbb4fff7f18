"""What the backward kernel reads, writes and holds on chip: every reference, with its shape and role."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from iha_jax.ops import pallas_tpu_forward as fwd
from iha_jax.ops.pallas_tpu_spec import LANES, Spec

F32 = jnp.float32


class Extra(NamedTuple):
    """Operands that the forward pass has not: the departing key tile, and the mixing matrices transposed."""

    d_out: Any  # [B, T, out heads * Hv]
    key: Any  # [B, S, L*H], the tile that arrived `lag` steps ago
    value: Any  # [B, S, L*Hv]
    key_rotation: Any  # Rotation or None
    query_t: Any  # [M*g, n*P*g]
    key_t: Any  # [L*g, k*g*P]
    value_t: Any  # [L*g, k*g*P], or None where values are never mixed
    collapse_t: Any  # across heads [n, P*g, N*g], else None


class Outputs(NamedTuple):
    """Gradients: of base heads as they are laid out, of the mixing matrices in float32."""

    query: Any
    key: Any
    value: Any
    mix_query: Any
    mix_key: Any
    mix_value: Any  # where values are never mixed as the matrices are, otherwise transposed
    collapse: Any


class Scratch(NamedTuple):
    """On-chip memory of the backward kernel: the forward kernel's first entries, and gradients in float32.

    Shapes in parentheses are those where values are never mixed (`pallas_tpu_base`).
    """

    key: Any  # [k, buffer, H]
    value: Any  # [k, buffer, Hv] ([kept groups, L*g, Hv])
    query: Any  # [n, rows, H] pseudo-queries of the tile, then their gradients
    query_base: Any  # float32 [query groups, M*g, H]
    key_base: Any  # float32 [key groups, L*g, H]
    value_base: Any  # float32 [key groups, L*g, Hv]
    rows: Any  # float32 [tile, max(H, Hv)]
    d_key: Any  # float32 [k, buffer, H]
    d_value: Any  # float32 [k, buffer, Hv] ([kept groups, L*g, Hv])
    d_query_base: Any  # float32 [query groups, M*g, H]
    d_key_base: Any  # float32 [key groups, L*g, H]
    d_value_base: Any  # float32 [key groups, L*g, Hv], mixed only
    d_out: Any  # per head [n, spans*unit, Hv] ([n, tile, Hv]), across heads [groups, N*g, Hv], float32
    bias: Any  # float32 [rows, chunk], local only
    scores: Any  # float32 [2, rows, chunk], then their exponentials, local only
    of_rows: Any  # float32 [2, rows, 128]: their maxima, then what normalises them, local only
    means: Any  # float32 [2, rows, 128], of the gradients of probabilities, local only
    slope: Any  # float32 [2, rows, chunk], with a soft cap only
    d_weights: Any  # float32 [2, spans*unit or rows, chunk], local only
    weights: Any  # [2, spans*unit or rows, chunk] (float32 [2, pieces*tile, lanes]), local only
    d_scores: Any  # [2, rows, chunk], local only
    unmixed_key: Any  # [k, rows/sharing, H], gradients of a departing tile's pseudo-keys before their rotation
    unmixed_value: Any  # [k, rows/sharing, Hv], mixed only
    d_base_weights: Any  # float32 [n, pieces*tile, L*g], d_out times base values, never mixed only
    base_weights: Any  # likewise: all heads' weights of base values


def scratch_shapes(spec: Spec) -> list[Any]:
    """The memory behind `Scratch`, in its order."""
    h, v = spec.head_dim, spec.value_dim
    dtype = jnp.dtype(spec.dtype)
    mixes = spec.mixes_values
    if spec.across_heads:
        d_rows = (spec.query_groups, spec.out_base, v)
    else:
        d_rows = (spec.heads, spec.spans * spec.unit if mixes else spec.tile, v)
    pieces = 0 if mixes else len(spec.pieces) * spec.tile
    if mixes:
        of_weights = fwd.local_only(spec, 2, spec.weight_rows, spec.chunk, dtype=dtype)
    else:
        of_weights = pltpu.VMEM((2, pieces, spec.piece_lanes), F32)
    key_sharing, value_sharing = spec.sharing(spec.key_groups), spec.sharing(spec.key_groups, values=True)
    return [
        *fwd.buffers(spec),
        pltpu.VMEM((spec.kv_heads, spec.buffer, h), F32),
        pltpu.VMEM(fwd.kept_values(spec), F32),
        pltpu.VMEM((spec.query_groups, spec.query_base, h), F32),
        pltpu.VMEM((spec.key_groups, spec.key_base, h), F32),
        fwd.only_if(mixes, spec.key_groups, spec.key_base, v),
        pltpu.VMEM(d_rows, F32),
        fwd.local_only(spec, spec.rows, spec.chunk),
        fwd.local_only(spec, 2, spec.rows, spec.chunk),
        fwd.local_only(spec, 2, spec.rows, LANES),
        fwd.local_only(spec, 2, spec.rows, LANES),
        fwd.local_only(spec, *((2, 16, 128) if spec.logits_soft_cap is None else (2, spec.rows, spec.chunk))),
        fwd.local_only(spec, 2, spec.weight_rows, spec.chunk),
        of_weights,
        fwd.local_only(spec, 2, spec.rows, spec.chunk, dtype=dtype),
        pltpu.VMEM((spec.kv_heads, spec.rows // key_sharing.count, h), dtype),
        fwd.only_if(mixes, spec.kv_heads, spec.rows // value_sharing.count, v, dtype=dtype),
        fwd.only_if(not mixes, spec.heads, pieces, spec.key_base),
        fwd.only_if(not mixes, spec.heads, pieces, spec.key_base),
    ]
