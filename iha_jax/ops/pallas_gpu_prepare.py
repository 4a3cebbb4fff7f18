"""What the fused GPU kernels are given: base heads as rows, mixing tensors as block-diagonal matrices, indices.

All of it is plain differentiable `jax.numpy`, so gradients of the user's arguments follow from those of the operands.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import masks
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.pallas_gpu_plan import Spec
from iha_jax.ops.rope import apply_rope, rope_tables


class Tokens(NamedTuple):
    """Everything about tokens. Refs inside the kernels have no batch axis.

    Attributes:
      query: ``[B, (T, M), H]``, rotated by the tokens' positions, padded.
      key: ``[B, (S, L), H]``, likewise.
      value: ``[B, (S, L), Hv]``.
      query_index: int32 ``[B|1, 2, (T, P)]``: what distances are taken between, and segments.
      key_index: int32 ``[B|1, 2, (S, P)]``.
      cos: float32 ``[owner, H/2]``, rotation of a tile's rows by the pseudo-head's number, or None.
      sin: likewise.
    """

    query: Any
    key: Any
    value: Any
    query_index: Any
    key_index: Any
    cos: Any
    sin: Any


class Mixing(NamedTuple):
    """Mixing tensors, and the matrices they become. Refs inside the kernels are of the heads at hand.

    Attributes:
      query: ``[n, (t, p), (t, m)]``, block-diagonal over the tokens t of the largest owner.
      key: ``[k, (t, p), (t, m)]``.
      value: likewise.
      collapse: float32 ``[n, (t, p)]``.
    """

    query: Any
    key: Any
    value: Any
    collapse: Any


def tokens(args: Arguments, spec: Spec) -> Tokens:
    """Operands that follow from queries, keys, values and integers."""
    query, key = args.query, args.key
    cos = sin = None
    if args.rope is not None:
        step = args.rope.tokens_to_index(spec.pseudo)
        first_row = slice(1) if args.default_positions else slice(None)
        rotated = []
        for x, positions in ((query, args.query_positions), (key, args.key_positions)):
            tables = rope_tables(positions[first_row] * step, args.rope, spec.head_dim, spec.pseudo)
            rotated.append(apply_rope(x, *(table[:, :, None] for table in tables)))
        query, key = rotated
    if spec.rotated:
        assert args.rope is not None
        number = jnp.arange(spec.tiles.owner, dtype=jnp.int32) % spec.pseudo
        cos, sin = rope_tables(number, args.rope, spec.head_dim, spec.pseudo, with_factor=False)
    of = functools.partial(_index, args, spec)
    return Tokens(
        query=_rows(query, spec, spec.query_tokens),
        key=_rows(key, spec, spec.key_tokens),
        value=_rows(args.value, spec, spec.key_tokens),
        query_index=of(args.query_positions, args.query_segment_ids, spec.query_tokens, masks.PADDED_QUERY),
        key_index=of(args.key_positions, args.key_segment_ids, spec.key_tokens, masks.PADDED_KEY),
        cos=cos,
        sin=sin,
    )


def matrices(spec: Spec, query: Array, key: Array, value: Array, collapse: Array) -> Mixing:
    """The mixing tensors as the kernels take them, in the dtype of the heads; the collapse stays float32."""
    group = spec.tiles.owner // spec.pseudo

    def block_diagonal(weights: Array) -> Array:
        """``[m, n, p]`` -> ``[n, (t, p), (t, m)]``."""
        sources, heads, pseudo = weights.shape
        turned = weights.astype(spec.dtype).transpose(1, 2, 0)[:, None, :, None, :]
        matrix = turned * jnp.eye(group, dtype=spec.dtype)[None, :, None, :, None]
        matrix = matrix.reshape(heads, group * pseudo, group * sources)
        return _pad(matrix, 2, spec.mixing_columns(sources))

    rows = jnp.tile(collapse.astype(jnp.float32), (1, group))
    return Mixing(block_diagonal(query), block_diagonal(key), block_diagonal(value), rows)


def tensor_gradient(spec: Spec, gradient: Array, sources: int) -> Array:
    """From the kernels' ``[n, p, (t, m)]``, padded, to ``[m, n, p]``."""
    group = spec.tiles.owner // spec.pseudo
    gradient = gradient[:, :, : group * sources].reshape(*gradient.shape[:2], group, sources)
    return gradient.sum(axis=2).transpose(2, 0, 1)


def _rows(x: Array, spec: Spec, length: int) -> Array:
    """``[B, T, M, H]`` -> ``[B, (T, M), H]``, padded."""
    batch, _, sources, dim = x.shape
    rows = _pad(x, 1, length).reshape(batch, length * sources, dim)
    return _pad(rows, 1, spec.base_rows(length, sources))


def _index(args: Arguments, spec: Spec, positions: Array, ids: Array, length: int, nothing: int) -> Array:
    """Indices and segments of pseudo-rows. What is never seen gets a segment of its side only, ``nothing``."""
    batch_rows = slice(1) if args.default_positions and not args.segmented else slice(None)
    pseudo = jnp.arange(spec.pseudo, dtype=jnp.int32)[None, None]
    index = masks.mask_index(positions[batch_rows, :, None], pseudo, spec.pseudo, spec.causal)
    ids = ids[batch_rows]
    ids = jnp.where(ids == 0, nothing, ids)[:, :, None] + jnp.zeros_like(pseudo)
    index, ids = (x.reshape(x.shape[0], -1) for x in (index, ids))
    rows = length * spec.pseudo
    ids = jnp.pad(ids, ((0, 0), (0, rows - ids.shape[1])), constant_values=nothing)
    return jnp.stack([_pad(index, 1, rows), ids], axis=1)


def _pad(x: Array, axis: int, size: int) -> Array:
    if x.shape[axis] == size:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width)
