"""What the fused TPU kernels are given: padded base heads, mixing tensors as products, rotations and indices.

All of it is plain differentiable `jax.numpy`, so gradients of the user's arguments follow from those of the operands.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import masks
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.pallas_tpu_spec import LANES, Spec, round_up
from iha_jax.ops.rope import rope_tables

# The same tuples hold arrays outside the kernels, block specs around them and refs inside: hence Any.


class Rotation(NamedTuple):
    """Tables of ``x * cos + roll(x, H/2) * sin``, float32: both halves of a row, the sine's sign included."""

    cos: Any
    sin: Any


class Tokens(NamedTuple):
    """Everything about tokens; base heads lie side by side in the last axis, as `Spec.copies`.

    Attributes:
      query: ``[B, T, M*H]``.
      key: ``[B, S, L*H]``.
      value: ``[B, S, L*Hv]``.
      query_rotation: by a token's index, ``[B|1, T, H]`` each, or None.
      key_rotation: likewise ``[B|1, S, H]``.
      query_index: int32 ``[B|1, query tiles, 2, rows]``: what distances are taken between, and segments.
      key_index: int32 ``[B|1, query tiles, 2, chunk]`` (local) or ``[B|1, chunks, 2, chunk]`` (global).
    """

    query: Any
    key: Any
    value: Any
    query_rotation: Rotation | None
    key_rotation: Rotation | None
    query_index: Any
    key_index: Any


class Weights(NamedTuple):
    """The mixing tensors as matrices that act on a group of tokens, and the rotation by the pseudo-head's number.

    All float32; mixing takes them in the dtype of the heads, the collapse as they are. Where the heads are attended
    with in parts, the four matrices have a first axis for the part.

    Attributes:
      query: ``[n, P*g, M*g]``, rows (span, pseudo-head, token), columns (source, token), padded.
      key: ``[k, g*P, L*g]``, rows (token, pseudo-head).
      value: likewise.
      collapse: per head float32 ``[n, P*span, 128]``, the weight of each pseudo-query, the same in all lanes; across
        heads ``[n, N*g, P*g]``, rows (output head, token), padded.
      query_rotation: ``[P*g, H]`` each, in the order of the query's rows, times `Spec.score_scale`, or None.
      key_rotation: likewise for the key's rows.
    """

    query: Any
    key: Any
    value: Any
    collapse: Any
    query_rotation: Rotation | None
    key_rotation: Rotation | None


def tokens(args: Arguments, spec: Spec) -> Tokens:
    """Operands that all groups of heads share."""
    batch_rows = slice(1) if args.default_positions else slice(None)
    rotations = [None, None]
    if args.rope is not None:
        step = args.rope.tokens_to_index(spec.pseudo)
        query_rotation = _rotation(args, args.query_positions[batch_rows] * step, spec, spec.query_tiles * spec.tile)
        if args.key_positions is args.query_positions or (
            args.default_positions and args.query.shape[1] == args.key.shape[1]
        ):
            rotations = [query_rotation, query_rotation]
        else:
            key_index = args.key_positions[batch_rows] * step
            rotations = [query_rotation, _rotation(args, key_index, spec, spec.key_tiles * spec.tile)]
    query_index, key_index = _indices(args, spec)
    return Tokens(
        query=_lanes(_halves(args.query, spec), spec.query_tiles * spec.tile),
        key=_lanes(_halves(args.key, spec), spec.key_tiles * spec.tile),
        value=_lanes(_copied(args.value, spec.value_dim, spec.value_copies), spec.key_tiles * spec.tile),
        query_rotation=rotations[0],
        key_rotation=rotations[1],
        query_index=query_index,
        key_index=key_index,
    )


def weights(args: Arguments, spec: Spec) -> Weights:
    """Operands from the mixing tensors."""
    if spec.groups == 1:
        query, key, value, collapse = _matrices(args.mixing, spec)
    else:

        def part_first(x: Array, axis: int) -> Array:
            x = x.reshape(*x.shape[:axis], spec.groups, x.shape[axis] // spec.groups, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        parts = HeadMixing(
            query=part_first(args.mixing.query, 1),
            key=part_first(args.mixing.key, 1),
            value=part_first(args.mixing.value, 1),
            collapse=part_first(args.mixing.collapse, args.mixing.collapse.ndim - 2),
        )
        query, key, value, collapse = jax.vmap(lambda x: _matrices(x, spec))(parts)
    query_rotation = key_rotation = None
    if args.rope is not None and args.rope.positions == "virtual" and spec.pseudo > 1:
        tables = rope_tables(
            jnp.arange(spec.pseudo, dtype=jnp.int32), args.rope, args.head_dim, spec.pseudo, with_factor=False
        )
        by_pseudo = _both_halves(*tables, spec)
        spans = spec.query_group // spec.span
        query_rotation = Rotation(
            *(jnp.tile(jnp.repeat(x, spec.span, axis=0), (spans, 1)) * spec.score_scale for x in by_pseudo)
        )
        key_rotation = Rotation(*(jnp.tile(x, (spec.key_group, 1)) for x in by_pseudo))
    return Weights(query, key, value, collapse, query_rotation, key_rotation)


def _matrices(mixing: HeadMixing, spec: Spec) -> tuple[Array, Array, Array, Array]:
    """The four matrices of `Weights` for some of the heads."""
    g = spec.query_group
    query = _kron(mixing.query, g)  # [m, s, n, p, t]
    query = query.reshape(*query.shape[:-1], g // spec.span, spec.span).transpose(2, 4, 3, 5, 0, 1)
    query = query.reshape(spec.heads, spec.pseudo * g, -1)
    keys = []
    for x in (mixing.key, mixing.value):
        x = _kron(x, spec.key_group).transpose(2, 4, 3, 0, 1)  # [k, t, r, l, s]
        x = x.reshape(spec.kv_heads, spec.key_group * spec.pseudo, -1)
        keys.append(_pad(x, 2, spec.key_base))
    if spec.across_heads:
        collapse = _kron(jnp.swapaxes(mixing.collapse, 1, 2), g)  # [o, s, p, n, t]
        collapse = collapse.transpose(3, 0, 1, 2, 4).reshape(spec.heads, -1, spec.pseudo * g)
        collapse = _pad(collapse, 1, spec.out_base)
    else:
        rows = spec.span * spec.pseudo
        collapse = jnp.repeat(mixing.collapse.astype(jnp.float32), spec.span, axis=1)
        collapse = jnp.broadcast_to(collapse[:, :, None], (spec.heads, rows, LANES))
    return _pad(query, 2, spec.query_base), *keys, collapse


def heads_from_lanes(x: Array, length: int, heads: int, dim: int) -> Array:
    """Undoes the layout of the base heads: ``[B, T, N*H]`` -> ``[B, T, N, H]`` without the padding."""
    x = x[:, :length]
    return x.reshape(*x.shape[:2], heads, -1)[..., :dim]


def _kron(weights: Array, group: int) -> Array:
    """``[m, n, p]`` -> ``[m, s, n, p, t]``: the same mixing for each token of a group, nothing between tokens."""
    eye = jnp.eye(group, dtype=jnp.float32)
    return weights.astype(jnp.float32)[:, None, :, :, None] * eye[None, :, None, None, :]


def _pad(x: Array, axis: int, size: int) -> Array:
    if x.shape[axis] == size:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width)


def output_gradient(x: Array, spec: Spec) -> Array:
    """Spreads the gradient of an output over its copies, of which the caller took the first: ``[B, T, n*Hv]``."""
    copies = spec.value_copies
    if copies == 1:
        return x
    parts = x.reshape(*x.shape[:2], -1, copies, spec.value_dim // copies)
    mean = jnp.sum(parts, axis=3, keepdims=True) / copies
    return jnp.broadcast_to(mean, parts.shape).reshape(x.shape)


def _halves(x: Array, spec: Spec) -> Array:
    """Fills each half of the lanes by itself, so that pairs (i, i + H/2) stay half the lanes apart."""
    x = _pad(x, x.ndim - 1, round_up(x.shape[-1], 2))
    x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    x = _copied(x, spec.head_dim // 2, spec.copies)
    return x.reshape(*x.shape[:-2], spec.head_dim)


def _copied(x: Array, lanes: int, copies: int) -> Array:
    """Fills the last axis with copies, each padded."""
    x = _pad(x, x.ndim - 1, lanes // copies)
    return x if copies == 1 else jnp.concatenate([x] * copies, axis=-1)


def _lanes(x: Array, length: int) -> Array:
    """``[B, T, N, H]`` -> ``[B, length, N*H]``."""
    return _pad(x, 1, length).reshape(x.shape[0], length, -1)


def _both_halves(cos: Array, sin: Array, spec: Spec) -> Rotation:
    return Rotation(
        _halves(jnp.concatenate([cos, cos], axis=-1), spec), _halves(jnp.concatenate([-sin, sin], axis=-1), spec)
    )


def _rotation(args: Arguments, index: Array, spec: Spec, length: int) -> Rotation:
    assert args.rope is not None
    cos, sin = rope_tables(_pad(index, 1, length), args.rope, args.head_dim, spec.pseudo)
    return _both_halves(cos, sin, spec)


def _indices(args: Arguments, spec: Spec) -> tuple[Array, Array]:
    """Indices and segments of pseudo-queries in their order, and of each chunk's pseudo-keys in theirs.

    Padding (id 0, or beyond the end) gets the segments of `masks` that never agree.
    """
    shared = args.default_positions and not args.segmented
    by_virtual = args.causal == "virtual"
    batch_rows = slice(1) if shared else slice(None)

    def of(positions: Array, ids: Array, token: Array, pseudo: Array, nothing: int) -> Array:
        length = positions.shape[1]
        inside = (token >= 0) & (token < length)
        at = jnp.clip(token, 0, length - 1)
        index = positions[batch_rows][:, at]
        if by_virtual:
            index = index * spec.pseudo + pseudo[None]
        ids = ids[batch_rows][:, at]
        ids = jnp.where(inside[None] & (ids != 0), ids, nothing)
        return jnp.stack([index, ids], axis=2)

    tile = jnp.arange(spec.query_tiles, dtype=jnp.int32)[:, None]
    row = jnp.arange(spec.rows, dtype=jnp.int32)[None]
    g = spec.span
    within = row % (g * spec.pseudo)
    token = tile * spec.tile + row // (g * spec.pseudo) * g + within % g
    pseudo = jnp.broadcast_to(within // g, token.shape)
    query_index = of(args.query_positions, args.query_segment_ids, token, pseudo, masks.PADDED_QUERY)

    column = jnp.arange(spec.chunk, dtype=jnp.int32)[None]
    if spec.kind == "local":
        row = tile * spec.rows + (spec.delay * spec.rows - spec.history) + column
    else:
        row = jnp.arange(spec.chunks, dtype=jnp.int32)[:, None] * spec.chunk + column
    # Floor division, also of the negative rows before the start.
    key_index = of(args.key_positions, args.key_segment_ids, row // spec.pseudo, row % spec.pseudo, masks.PADDED_KEY)
    return query_index, key_index
