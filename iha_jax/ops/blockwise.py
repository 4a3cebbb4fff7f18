"""IHA in XLA without storing pseudo-heads: they exist for the block in hand only, forward and backward.

Two drivers share the arithmetic of `tiles.py`. *Narrow* windows put many small tiles side by side, all heads at
once, so that work is proportional to T*W. *Slabs* (global layers, wide windows, cross attention) take a few heads
at a time, form their pseudo-keys once, and run query tiles against all keys of the slab; causal layers are cut
into stripes that see only their prefix. Every tile holds all the keys its queries can see, so its probabilities
are final in one pass and no running maximum is needed. The backward pass recomputes a tile from base heads and
its rows' saved maxima and sums (`jax.checkpoint`); first- and higher-order, forward- and reverse-mode derivatives work.
Decoding over a long cache has a driver of its own, `streaming.py`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import forms, masks
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.block_sizes import UNROLL, NarrowPlan, Slab, SlabPlan
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.rope import apply_rope, rope_tables
from iha_jax.ops.streaming import streaming, streams
from iha_jax.ops.tiles import (
    NEVER_SEEN,
    SOFTMAX_ROWS,
    Form,
    Rotation,
    TileSpec,
    Visibility,
    mix_keys,
    mix_queries,
    tile_attention,
)


def blockwise(args: Arguments) -> Array:
    """Serves every argument of the contract."""
    if streams(args):
        return streaming(args)
    args = args.cleared()
    plan, form = forms.choose(forms.Problem.of(args))
    spec = TileSpec(
        form, args.scale, args.logits_soft_cap, args.precision, args.compute_dtype, args.causal, args.window
    )
    queries, keys, rotation = _prepare(args)
    if isinstance(plan, NarrowPlan):
        out = _narrow(args, queries, keys, rotation, plan, spec)
    elif plan.repeats is None:
        out = _stripes(args, queries, keys, rotation, plan, spec)
    else:
        out = _wide(args, queries, keys, rotation, plan, spec)
    return out.astype(args.query.dtype)


class Queries(NamedTuple):
    """Base queries ``[z,t,m,h]`` rotated by their token's index; mask indices ``[z|1,t,p]``; ids ``[z,t]`` or None."""

    heads: Array
    index: Array
    segment: Array | None


class Keys(NamedTuple):
    """Base keys ``[z,s,m,h]`` rotated likewise, base values ``[z,s,m,d]``; mask indices ``[z|1,s,r]``; ids or None."""

    heads: Array
    value: Array
    index: Array
    segment: Array | None


def _prepare(args: Arguments) -> tuple[Queries, Keys, Rotation]:
    """Rotates base heads; positions and ids get batch 1 where they are the same for every row."""
    rows = slice(1) if args.default_positions else slice(None)
    query_position, key_position = args.query_positions[rows], args.key_positions[rows]
    query, key, rotation = args.query, args.key, None
    if args.rope is not None:
        pseudo = args.num_pseudo_heads
        step = args.rope.tokens_to_index(pseudo)
        tables = functools.partial(
            rope_tables, rope=args.rope, head_dim=args.head_dim, num_pseudo_heads=pseudo, dtype=args.compute_dtype
        )
        query = apply_rope(query, *(table[:, :, None] for table in tables(query_position * step)))
        key = apply_rope(key, *(table[:, :, None] for table in tables(key_position * step)))
        if args.rope.positions == "virtual" and pseudo > 1:
            rotation = tables(jnp.arange(pseudo, dtype=jnp.int32), with_factor=False)
    pseudo = jnp.arange(args.num_pseudo_heads, dtype=jnp.int32)[None, None]

    def index(position: Array) -> Array:
        return masks.mask_index(position[:, :, None], pseudo, args.num_pseudo_heads, args.causal)

    query_ids = args.query_segment_ids if args.segmented else None
    key_ids = args.key_segment_ids if args.segmented else None
    return (
        Queries(query, index(query_position), query_ids),
        Keys(key, args.value, index(key_position), key_ids),
        rotation,
    )


# ------------------------------------------------------------------------------------------------ narrow windows


def _narrow(
    args: Arguments, queries: Queries, keys: Keys, rotation: Rotation, plan: NarrowPlan, spec: TileSpec
) -> Array:
    """Tiles of a window: ``group`` of them side by side, one group after the other."""
    tile, group, steps = plan.tile, plan.group, plan.steps
    tokens = args.query.shape[1]

    def query_groups(x: Array) -> Array:
        x = _fit(x, 0, plan.padded)
        return jnp.moveaxis(x.reshape(x.shape[0], steps, group, tile, *x.shape[2:]), 1, 0)

    def key_groups(x: Array, fill: int = 0) -> Array:
        """Overlapping slabs of key tiles, one a step: base-sized; the overlap is left + right tiles a group.

        Put together from whole shifted copies, not from one slice a step: slices would be transposed into one
        full-sized array each.
        """
        width = group + plan.left + plan.right
        shifts = -(-width // group)
        x = _fit(x, plan.left * tile, plan.padded + plan.right * tile, fill)
        x = _fit(x, 0, (steps + shifts) * group * tile, fill)
        x = x.reshape(x.shape[0], steps + shifts, group, tile, *x.shape[2:])
        parts = [x[:, i : i + steps, : min(group, width - i * group)] for i in range(shifts)]
        return jnp.moveaxis(jnp.concatenate(parts, axis=2), 1, 0)

    def bands(x: Array, axis: int) -> Array:
        """Each query tile's own keys: tiles i … i + left + right of the slab, joined along the token axis."""
        return jnp.concatenate([x[:, i : i + group] for i in range(plan.left + 1 + plan.right)], axis=axis)

    # Banded outside the loop: inside it, XLA would work every band's index out again for every score.
    key_index = jax.vmap(functools.partial(bands, axis=2))(key_groups(keys.index, NEVER_SEEN))
    key_index = _in_order(key_index, spec.form)
    key_ids = None if keys.segment is None else jax.vmap(functools.partial(bands, axis=2))(key_groups(keys.segment))

    def step(xs: tuple[Queries, Array, Array, Array, Array | None]) -> Array:
        query, key_heads, value, key_index, key_ids = xs
        query_heads = query.heads
        if spec.form.scores == "pseudo":
            query_heads = mix_queries(query_heads, args.mixing.query, rotation, spec)
            key_heads = bands(mix_keys(key_heads, args.mixing.key, rotation, spec), axis=5)
        else:
            key_heads = bands(key_heads, axis=2)
        if spec.form.values == "mixed":
            value = bands(mix_keys(value, args.mixing.value, None, spec), axis=5)
        else:
            value = bands(value, axis=2)
        visibility = Visibility(query.index, key_index, query.segment, key_ids)
        return tile_attention(query_heads, key_heads, value, args.mixing, visibility, spec)

    query, key_heads, value = jax.tree.map(query_groups, queries), key_groups(keys.heads), key_groups(keys.value)
    if spec.form.scores == "pseudo":
        query = query._replace(heads=_rows(query.heads))
        key_heads = _columns(key_heads)
    if spec.form.values == "mixed":
        value = _columns(value)
    xs = (query, key_heads, value, key_index, key_ids)
    out = _map(step, xs, UNROLL)  # [steps,z,g,t,n,d]
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], plan.padded, *out.shape[4:])[:, :tokens]


# ------------------------------------------------------------------------------------------------------- layouts
# What `mix_queries` and `mix_keys` want, laid out once outside their loops.


def _rows(x: Array) -> Array:
    """``[...,t,m,h] -> [...,m,t,h]``."""
    return jnp.swapaxes(x, -3, -2)


def _columns(x: Array) -> Array:
    """``[...,s,m,h] -> [...,m,h,s]``."""
    return jnp.moveaxis(x, -3, -1)


def _in_order(key_index: Array, form: Form) -> Array:
    """``[...,s,r] -> [...,j]``."""
    if form.pseudo_keys == "rs":
        key_index = jnp.swapaxes(key_index, -1, -2)
    return key_index.reshape(*key_index.shape[:-2], -1)


# --------------------------------------------------------------------------------------------------------- slabs


def _stripes(
    args: Arguments, queries: Queries, keys: Keys, rotation: Rotation, plan: SlabPlan, spec: TileSpec
) -> Array:
    """Ranges of queries, unrolled, each against the first so many keys."""
    return jnp.concatenate(_head_groups(args, queries, plan.slabs, keys, rotation, plan, spec), axis=1)


def _wide(args: Arguments, queries: Queries, keys: Keys, rotation: Rotation, plan: SlabPlan, spec: TileSpec) -> Array:
    """One range of queries after the other, each against its own range of keys, all of one shape."""
    (slab,) = plan.slabs
    assert plan.repeats is not None
    repeats, length, tokens = plan.repeats, slab.queries, args.query.shape[1]

    def ranges(x: Array) -> Array:
        x = _fit(x, 0, repeats * length)
        return jnp.moveaxis(x.reshape(x.shape[0], repeats, length, *x.shape[2:]), 1, 0)

    # One after the other along the padded keys.
    reach = (-slab.key_start, (repeats - 1) * length + slab.key_stop)
    padded = jax.tree.map(lambda x: _fit(x, *reach), keys)._replace(index=_fit(keys.index, *reach, NEVER_SEEN))

    def step(xs: tuple[Array, Queries]) -> Array:
        start, query = xs
        key = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, slab.keys, axis=1), padded)
        return _head_groups(args, query, (Slab(0, length, 0, slab.keys),), key, rotation, plan, spec)[0]

    starts = jnp.arange(repeats, dtype=jnp.int32) * length
    out = jnp.moveaxis(_map(step, (starts, jax.tree.map(ranges, queries))), 0, 1)
    return out.reshape(out.shape[0], repeats * length, *out.shape[3:])[:, :tokens]


def _head_groups(
    args: Arguments,
    queries: Queries,
    slabs: tuple[Slab, ...],
    keys: Keys,
    rotation: Rotation,
    plan: SlabPlan,
    spec: TileSpec,
) -> list[Array]:
    """Runs every slab (of keys from the first on) for one group of heads after the other: ``[z,t,n,d]`` each."""
    mixing = args.mixing
    groups = mixing.num_kv_heads // plan.kv_heads

    def group_last(x: Array, axis: int) -> Array:
        """Splits a head axis in groups and brings them to the front."""
        x = x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    grouped = HeadMixing(
        query=group_last(mixing.query, 1),
        key=group_last(mixing.key, 1),
        value=group_last(mixing.value, 1),
        collapse=group_last(mixing.collapse, mixing.collapse.ndim - 2),
    )

    # Laid out outside the loop: inside it, XLA would work every slab's indices out again for every score.
    key_index = [_in_order(keys.index[:, None, : slab.key_stop], spec.form) for slab in slabs]
    query_heads, key_heads, value = (x[:, None] for x in (queries.heads, keys.heads, keys.value))
    if spec.form.scores == "pseudo":
        query_heads, key_heads = _rows(query_heads), _columns(key_heads)
    if spec.form.values == "mixed":
        value = _columns(value)
    queries, keys = queries._replace(heads=query_heads), keys._replace(heads=key_heads, value=value)

    def body(mixing: HeadMixing) -> list[Array]:
        mixed = _mixed_queries(queries, mixing, rotation, spec).split([slab.queries for slab in slabs])
        seen = _mixed_keys(keys, mixing, rotation, spec)
        outputs = []
        # A slab's keys are cut from those of the next one: cut from all the keys, each cut would be transposed
        # into arrays of full length.
        for slab, part, index in zip(reversed(slabs), reversed(mixed), reversed(key_index), strict=True):
            seen = seen.first(slab.key_stop)
            outputs.append(_query_tiles(part, seen, index, mixing, plan.tile, spec))
        return outputs[::-1]

    if mixing.collapse.ndim == 2:
        out = _map(body, grouped)  # [groups,z,t,n,d]
        return [jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1]) for x in out]
    # Every group adds to every output head: a running sum, so that no group's contribution is kept.
    if groups == 1:
        return [x[0] for x in _map(body, grouped)]
    zeros = [
        jnp.zeros(
            (queries.heads.shape[0], slab.queries, mixing.collapse.shape[0], args.value.shape[3]), spec.compute_dtype
        )
        for slab in slabs
    ]
    step = _checkpoint(lambda total, mixing: (jax.tree.map(jnp.add, total, body(mixing)), None), in_loop=True)
    return jax.lax.scan(step, zeros, grouped)[0]


class Mixed(NamedTuple):
    """Queries or keys in the layouts of `tile_attention`, and on which axis each array has its tokens."""

    arrays: dict[str, Array]
    axes: dict[str, int]

    def first(self, count: int) -> "Mixed":
        """The first tokens."""
        cut = {name: jax.lax.slice_in_dim(x, 0, count, axis=self.axes[name]) for name, x in self.arrays.items()}
        return Mixed(cut, self.axes)

    def split(self, counts: list[int]) -> list["Mixed"]:
        """All tokens in ranges."""
        parts = {name: jax.lax.split(x, counts, axis=self.axes[name]) for name, x in self.arrays.items()}
        return [Mixed({name: x[i] for name, x in parts.items()}, self.axes) for i in range(len(counts))]

    def tiles(self, count: int, size: int) -> dict[str, Array]:
        """Tiles of ``size`` tokens on a new first axis, the last one padded."""

        def split(x: Array, axis: int) -> Array:
            x = _fit(x, 0, count * size, axis=axis)
            return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

        return {name: split(x, self.axes[name]) for name, x in self.arrays.items()}


def _mixed_queries(queries: Queries, mixing: HeadMixing, rotation: Rotation, spec: TileSpec) -> Mixed:
    pseudo = spec.form.scores == "pseudo"
    arrays = {
        "heads": mix_queries(queries.heads, mixing.query, rotation, spec) if pseudo else queries.heads,
        "index": queries.index[:, None],
    }
    if queries.segment is not None:
        arrays["segment"] = queries.segment[:, None]
    return Mixed(arrays, {"heads": 3 if pseudo else 2, "index": 2, "segment": 2})


def _mixed_keys(keys: Keys, mixing: HeadMixing, rotation: Rotation, spec: TileSpec) -> Mixed:
    pseudo, mixed_values = spec.form.scores == "pseudo", spec.form.values == "mixed"
    arrays = {
        "heads": mix_keys(keys.heads, mixing.key, rotation, spec) if pseudo else keys.heads,
        "value": mix_keys(keys.value, mixing.value, None, spec) if mixed_values else keys.value,
    }
    if keys.segment is not None:
        arrays["segment"] = keys.segment[:, None]
    axes = {"heads": 5 if pseudo else 2, "value": 5 if mixed_values else 2, "segment": 2}
    return Mixed(arrays, axes)


def _query_tiles(queries: Mixed, keys: Mixed, key_index: Array, mixing: HeadMixing, tile: int, spec: TileSpec) -> Array:
    """Tiles of queries against all the keys given: ``[z,t,n,d]`` (or ``[z,t,o,d]``)."""
    tokens = queries.arrays["index"].shape[2]
    tiles = -(-tokens // tile)
    key = keys.arrays

    def step(query: dict[str, Array]) -> Array:
        visibility = Visibility(query["index"], key_index, query.get("segment"), key.get("segment"))
        return tile_attention(query["heads"], key["heads"], key["value"], mixing, visibility, spec)[:, 0]

    out = jnp.moveaxis(_map(step, queries.tiles(tiles, tile), UNROLL), 0, 1)  # [z,tiles,t,n,d]
    return out.reshape(out.shape[0], tiles * tile, *out.shape[3:])[:, :tokens]


# --------------------------------------------------------------------------------------------------------- loops

X = TypeVar("X")
Y = TypeVar("Y")


def _checkpoint(step: Callable, in_loop: bool) -> Callable:
    """Recompute in the backward pass everything but two numbers a row of scores."""
    policy = jax.checkpoint_policies.save_only_these_names(SOFTMAX_ROWS)
    # Outside a loop body XLA would merge the recomputation with the forward pass and keep the pseudo-heads alive.
    return jax.checkpoint(step, policy=policy, prevent_cse=not in_loop)


def _map(step: Callable[[X], Y], xs: X, unroll: int = 1) -> Y:
    """`lax.map` of a checkpointed step, without a loop where there is one step only."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        out = _checkpoint(step, in_loop=False)(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda x: x[None], out)
    checkpointed = _checkpoint(step, in_loop=True)
    return jax.lax.scan(lambda _, x: (None, checkpointed(x)), None, xs, unroll=unroll)[1]


def _fit(x: Array, before: int, after: int, fill: int = 0, axis: int = 1) -> Array:
    """An axis padded with ``before`` entries and cut or padded to ``after`` entries behind them."""
    x = jax.lax.slice_in_dim(x, 0, min(after, x.shape[axis]), axis=axis)
    width = [(0, 0)] * x.ndim
    width[axis] = (before, after - x.shape[axis])
    return jnp.pad(x, width, constant_values=fill)
