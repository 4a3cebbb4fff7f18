"""Attention on a mesh: each device attends with its part of the rows, tokens and heads.

Base heads cross the mesh, pseudo-heads never do. Along the axes that split *heads*, every device gathers all base
heads (mixing reads them all) and makes only its own pseudo-heads from them; plain attention gathers nothing there.
Along those that split the *sequence*, window layers fetch a halo of base keys and values from their neighbours, global
layers gather them; causal global layers deal out their queries first, so that every device does the same share of the
half that is visible. Rows of the *batch* are independent. Transposed, a gather becomes a sum that leaves each device
its part.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from iha_jax import sharding
from iha_jax.ops.block_sizes import band_of
from iha_jax.ops.mixing import HeadMixing
from iha_jax.sharding import MeshAxes

Attend = Callable[..., Array]
"""``(query, key, value, mixing, positions and ids by keyword) -> [B, T, N, Hv]`` of one device's part."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes that split each axis of the heads, and the number of parts they make.

    Attributes:
      batch: axes over rows.
      sequence: axes over tokens.
      heads: axes over query heads.
      kv_heads: axes over key/value heads: those of the query heads, or none where K is too small to split.
      parts: of `heads`.
      shards: of `sequence`.
    """

    batch: MeshAxes
    sequence: MeshAxes
    heads: MeshAxes
    kv_heads: MeshAxes
    parts: int
    shards: int


def layout_of(query: Array, key: Array) -> Layout | None:
    """How the mesh and rules in force split the operation; None where they leave it whole.

    Raises:
      ValueError: if a size does not divide; both are named.
    """
    sizes = sharding.mesh_sizes()
    split = {name: sharding.mesh_axes(name) for name in ("batch", "sequence", "heads", "kv_heads")}
    if not any(split.values()):
        return None

    def parts_of(name: str) -> int:
        return math.prod(sizes[axis] for axis in split[name])

    for name, what, size in (
        ("batch", "batch size B", query.shape[0]),
        ("sequence", "number of query tokens T", query.shape[1]),
        ("sequence", "number of key tokens S", key.shape[1]),
        ("heads", "number of query heads N", query.shape[2]),
    ):
        if size % parts_of(name):
            raise ValueError(
                f"the {what}={size} must be divisible by {parts_of(name)}, the devices along mesh axes {split[name]}."
            )
    kv_heads, parts = key.shape[2], parts_of("heads")
    if kv_heads % parts and parts % kv_heads:
        raise ValueError(
            f"the number of key/value heads K={kv_heads} must divide or be divisible by {parts}, the devices along "
            f"mesh axes {split['heads']}."
        )
    if kv_heads % parts or split["kv_heads"] != split["heads"]:
        split["kv_heads"] = ()  # whole on every device: each takes the heads its queries need
    return Layout(**split, parts=parts, shards=parts_of("sequence"))


def attend_sharded(
    attend: Attend,
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    mixing: HeadMixing | None,
    *,
    causal: Any,
    window: int | None,
    query_positions: Array | None,
    key_positions: Array | None,
    query_segment_ids: Array | None,
    key_segment_ids: Array | None,
    whole: Any = None,
) -> Array:
    """Runs ``attend`` on every device's part; arguments and result are whole arrays laid out on the mesh.

    Without mixing it is plain attention: heads are independent of each other. ``whole``, where given, is a pytree of
    arrays that every device needs whole; ``attend`` gets it under this name.
    """
    aligned = query.shape[1] == key.shape[1] and (key_positions is None or key_positions is query_positions)
    if query_positions is not None and query_segment_ids is not None:
        # With ids of their own and positions that start again, a query and a key that see each other may lie anywhere.
        aligned = aligned and (key_segment_ids is None or key_segment_ids is query_segment_ids)
    band = band_of(causal, window)
    if not aligned or (band is not None and band.left + band.right >= key.shape[1]):
        band = None  # no halo: the window reaches everything
    integers = {
        "query_positions": query_positions,
        "key_positions": None if key_positions is query_positions else key_positions,
        "query_segment_ids": query_segment_ids,
        "key_segment_ids": None if key_segment_ids is query_segment_ids else key_segment_ids,
    }
    integers = {name: x for name, x in integers.items() if x is not None}
    batch, sequence = (axes or None for axes in (layout.batch, layout.sequence))
    heads, kv_heads = (axes or None for axes in (layout.heads, layout.kv_heads))
    across = mixing is not None and mixing.collapse.ndim == 3

    def local(
        query: Array, key: Array, value: Array, mixing: HeadMixing | None, integers: dict[str, Array], whole: Any
    ) -> Array:
        own_attend = attend if whole is None else functools.partial(attend, whole=whole)
        if mixing is None:
            key, value = (_own_kv_heads(x, 2, layout) for x in (key, value))
        else:
            own = (_own_kv_heads(x, 1, layout) for x in (mixing.key, mixing.value))
            mixing = dataclasses.replace(mixing, **dict(zip(("key", "value"), own, strict=True)))
            query = _gather(query, layout.heads, 2)
            key, value = (_gather(x, layout.kv_heads, 2) for x in (key, value))
        if layout.shards == 1:
            out = own_attend(query, key, value, mixing, **integers)
        else:
            integers = _filled(integers, layout, query, key)
            if band is not None:
                out = _with_halo(own_attend, layout, band.left, band.right, query, key, value, mixing, integers)
            else:
                for_keys = {k: _gather(x, layout.sequence, 1) for k, x in integers.items() if k.startswith("key")}
                key, value = (_gather(x, layout.sequence, 1) for x in (key, value))
                integers = {**integers, **for_keys}
                hands = _hands(query.shape[1], layout.shards) if aligned and causal is not None else 0
                if hands:
                    out = _dealt(own_attend, layout, hands, query, key, value, mixing, integers)
                else:
                    out = own_attend(query, key, value, mixing, **integers)
        if across and layout.parts > 1:
            # Every device's heads add to every output head; the sum leaves each device its own outputs.
            out = out.astype(jnp.promote_types(out.dtype, jnp.float32))
            out = jax.lax.psum_scatter(out, layout.heads, scatter_dimension=2, tiled=True)
        return out.astype(query.dtype)

    of_heads = PartitionSpec(batch, sequence, heads, None)
    of_kv_heads = PartitionSpec(batch, sequence, kv_heads, None)
    of_mixing = mixing and HeadMixing(
        query=PartitionSpec(None, heads, None),  # pyright: ignore[reportArgumentType]
        key=PartitionSpec(None, kv_heads, None),  # pyright: ignore[reportArgumentType]
        value=PartitionSpec(None, kv_heads, None),  # pyright: ignore[reportArgumentType]
        collapse=PartitionSpec(None, heads, None) if across else PartitionSpec(heads, None),  # pyright: ignore[reportArgumentType]
    )
    operands = (query, key, value, mixing, integers, whole)
    of_integers = dict.fromkeys(integers, PartitionSpec(batch, sequence))
    of_whole = jax.tree.map(lambda _: PartitionSpec(), whole)
    specs = (of_heads, of_kv_heads, of_kv_heads, of_mixing, of_integers, of_whole)
    operands = jax.tree.map(sharding.lay_out, operands, specs)
    # The kernels' interpreter does not say over which axes its results vary.
    return jax.shard_map(local, in_specs=specs, out_specs=of_heads, check_vma=False)(*operands)


def _gather(x: Array, axes: MeshAxes, axis: int) -> Array:
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _own_kv_heads(x: Array, axis: int, layout: Layout) -> Array:
    """Of key/value heads that are all at hand, those that serve this device's query heads."""
    if layout.parts == 1 or layout.kv_heads:
        return x
    heads = x.shape[axis]
    start = jax.lax.axis_index(layout.heads) * heads // layout.parts
    return jax.lax.dynamic_slice_in_dim(x, start, max(1, heads // layout.parts), axis)


def _filled(integers: dict[str, Array], layout: Layout, query: Array, key: Array) -> dict[str, Array]:
    """This device's positions and ids, with their defaults: positions count from the start of the sequence.

    The key's are the query's own arrays where they may be: only so work can be skipped by index.
    """
    filled = dict(integers)
    shard = jax.lax.axis_index(layout.sequence)

    def positions(x: Array) -> Array:
        own = shard * x.shape[1] + jnp.arange(x.shape[1], dtype=jnp.int32)
        return jnp.broadcast_to(own[None], x.shape[:2])

    def default(name: str, make: Callable[[Array], Array]) -> None:
        filled.setdefault(f"query_{name}", make(query))
        same = query.shape[1] == key.shape[1]
        filled.setdefault(f"key_{name}", filled[f"query_{name}"] if same else make(key))

    default("positions", positions)
    default("segment_ids", lambda x: jnp.ones(x.shape[:2], jnp.int32))
    return filled


_RANGES = 4
"""Ranges of a causal global layer's queries, at least: n of them compute (n + 1) / 2n of all pairs, and each is a
program of its own."""


def _hands(tokens: int, shards: int) -> int:
    """Into how many hands a device deals its tokens, each to all devices; 0 if they can't be dealt evenly."""
    return next((n for n in range(-(-_RANGES // shards), 0, -1) if tokens % (n * shards) == 0), 0)


def pieces_of_causal(tokens: int, shards: int) -> list[tuple[int, int]]:
    """What one device computes of a causal global layer: queries and keys of each piece.

    Args:
      tokens: of one device.
      shards: devices along the sequence.
    """
    hands = _hands(tokens, shards)
    if not hands:
        return [(tokens, tokens * shards)]
    ranges = hands * shards
    return [(tokens // ranges, (i + 1) * tokens // hands) for i in range(ranges)]


def _dealt(
    attend: Attend,
    layout: Layout,
    hands: int,
    query: Array,
    key: Array,
    value: Array,
    mixing: HeadMixing | None,
    integers: dict[str, Array],
) -> Array:
    """Causal self-attention of gathered keys, with the same work on every device and about half of the full square.

    Were every device to keep its own queries, the last one would need all keys and the first one hardly any; as all
    run one program, all would compute the whole square. So every range of the sequence, one hand of one device, is
    dealt out to all devices in order, and each of them attends with its piece to the keys up to the range's end.
    """
    shards, ranges = layout.shards, hands * layout.shards
    rows, tokens = query.shape[:2]
    piece, reach = tokens // ranges, tokens // hands

    def deal(x: Array) -> Array:
        """This device's pieces of all ranges in order: ``[B, ranges, piece, ...]``."""
        x = x.reshape(rows, hands, shards, piece, *x.shape[2:])
        return jax.lax.all_to_all(x, layout.sequence, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]

    query = deal(query)
    of_queries = {name: deal(x) for name, x in integers.items() if name.startswith("query")}
    keys = {"key": key, "value": value, **{name: x for name, x in integers.items() if name.startswith("key")}}
    outputs = []
    # Each range's keys are cut from those of the next one: cut from all of them, each cut would be transposed into
    # arrays of full length.
    for i in reversed(range(ranges)):
        keys = {name: x[:, : (i + 1) * reach] for name, x in keys.items()}
        operands = (query[:, i], keys["key"], keys["value"], mixing)
        for_keys = {name: x for name, x in keys.items() if name.startswith("key_")}
        outputs.append(attend(*operands, **{name: x[:, i] for name, x in of_queries.items()}, **for_keys))
    out = jnp.stack(outputs[::-1], axis=1)[:, :, None]
    out = jax.lax.all_to_all(out, layout.sequence, split_axis=1, concat_axis=2, tiled=True)
    return out.reshape(rows, tokens, *out.shape[4:])


def _with_halo(
    attend: Attend,
    layout: Layout,
    left: int,
    right: int,
    query: Array,
    key: Array,
    value: Array,
    mixing: HeadMixing | None,
    integers: dict[str, Array],
) -> Array:
    """Self-attention within this device's tokens and the neighbours' that the window reaches.

    The neighbours' queries are zeros: as many queries as keys make it ordinary banded self-attention, whose work
    is skipped by index. Beyond the ends of the sequence there are zeros of segment 0, which nothing sees.
    """
    length = query.shape[1]
    extend = functools.partial(_extend, layout, left, right)
    query = jnp.pad(query, ((0, 0), (left, right), (0, 0), (0, 0)))
    positions = extend(integers["query_positions"])
    ids = {"query_segment_ids": extend(integers["query_segment_ids"])}
    if integers["key_segment_ids"] is not integers["query_segment_ids"]:
        ids["key_segment_ids"] = extend(integers["key_segment_ids"])
    out = attend(query, extend(key), extend(value), mixing, query_positions=positions, **ids)
    return out[:, left : left + length]


def _extend(layout: Layout, left: int, right: int, x: Array) -> Array:
    """``[left + tokens + right]`` on axis 1: the neighbours' tokens on both sides, zeros beyond the ends."""
    length, shards = x.shape[1], layout.shards

    def from_distance(distance: int, part: Array) -> Array:
        """What the device so many shards before this one has (after, if negative)."""
        pairs = [(i, i + distance) for i in range(shards) if 0 <= i + distance < shards]
        return jax.lax.ppermute(part, layout.sequence, pairs)

    before, after = [], []
    for hop in range(1, -(-left // length) + 1):
        tokens = min(length, left - (hop - 1) * length)
        before.insert(0, from_distance(hop, x[:, length - tokens :]))
    for hop in range(1, -(-right // length) + 1):
        tokens = min(length, right - (hop - 1) * length)
        after.append(from_distance(-hop, x[:, :tokens]))
    return jnp.concatenate([*before, x, *after], axis=1)
