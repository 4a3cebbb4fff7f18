"""Validation of the operation's arguments: everything an implementation may rely on is settled here."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.rope import Rope
from iha_jax.ops.types import Causal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Validated arguments with their defaults filled in.

    Attributes:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, Hv]``; all three in one dtype, rows of segment 0 set to zero where they are `cleared`.
      mixing: the four mixing tensors; within a shard those of its part of the heads.
      query_positions: int32 ``[B, T]``.
      key_positions: int32 ``[B, S]``.
      query_segment_ids: int32 ``[B, T]``.
      key_segment_ids: int32 ``[B, S]``.
      causal: which order visibility follows.
      window: W in tokens, or None.
      rope: rotary embedding, or None.
      scale: factor of the logits.
      logits_soft_cap: cap of the logits, or None.
      precision: of every contraction.
      aligned: key index j and query index i are comparable: wherever a key is visible, ``causal`` and
        ``window`` hold for indices as they do for positions, so work may be skipped by index.
      segmented: whether segment ids were given (otherwise all are 1).
      default_positions: whether positions are simply 0, 1, 2, …
    """

    query: Array
    key: Array
    value: Array
    mixing: HeadMixing
    query_positions: Array
    key_positions: Array
    query_segment_ids: Array
    key_segment_ids: Array
    causal: Causal
    window: int | None
    rope: Rope | None
    scale: float
    logits_soft_cap: float | None
    precision: jax.lax.PrecisionLike
    aligned: bool
    segmented: bool
    default_positions: bool

    def cleared(self) -> "Arguments":
        """Rows of segment 0 set to zero: weights of padding are 0, but 0 * inf is not."""
        if not self.segmented:
            return self

        def clear(x: Array, ids: Array) -> Array:
            return jnp.where((ids == 0)[:, :, None, None], jnp.zeros_like(x), x)

        return dataclasses.replace(
            self,
            query=clear(self.query, self.query_segment_ids),
            key=clear(self.key, self.key_segment_ids),
            value=clear(self.value, self.key_segment_ids),
        )

    @property
    def head_dim(self) -> int:
        """H of queries and keys."""
        return self.query.shape[3]

    @property
    def num_pseudo_heads(self) -> int:
        """P."""
        return self.mixing.num_pseudo_heads

    @property
    def compute_dtype(self) -> DTypeLike:
        """The dtype of softmax, sums and collapse: float32, or float64 for float64 inputs."""
        return jnp.promote_types(self.query.dtype, jnp.float32)


def validate(
    query,
    key,
    value,
    mixing,
    *,
    causal,
    window,
    rope,
    query_positions,
    key_positions,
    query_segment_ids,
    key_segment_ids,
    scale,
    logits_soft_cap,
    precision,
    part_of_heads: bool = False,
    clear_padding: bool = True,
) -> Arguments:
    """Checks everything that can be wrong and fills in defaults.

    With ``part_of_heads`` the mixing tensors may make fewer heads than they read from. Without ``clear_padding`` the
    heads are left as they are, for implementations that never let padding meet anything else.

    Raises:
      ValueError: naming what was given and what was expected.
    """
    if not isinstance(mixing, HeadMixing):
        raise ValueError(f"mixing must be an iha_jax.HeadMixing, got {type(mixing).__name__}.")
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_shapes(query, key, value, mixing, part_of_heads)
    if causal not in ("virtual", "token", None):
        raise ValueError(f'causal must be "virtual", "token" or None, got {causal!r}.')
    if window is not None:
        # NumPy's integers are welcome; True is a mistake.
        if isinstance(window, bool) or not isinstance(window, numbers.Integral) or window < 1:
            raise ValueError(f"window must be a whole number of tokens >= 1 or None, got {window!r}.")
        window = int(window)
    if rope is not None:
        if not isinstance(rope, Rope):
            raise ValueError(f"rope must be an iha_jax.Rope or None, got {type(rope).__name__}.")
        if query.shape[3] % 2:
            raise ValueError(f"rope rotates pairs and needs an even head dimension, got H={query.shape[3]}.")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap must be > 0 or None, got {logits_soft_cap}.")

    batch, query_len, key_len = query.shape[0], query.shape[1], key.shape[1]
    aligned = True
    default_positions = query_positions is None and key_positions is None
    if default_positions and causal is not None and query_len != key_len:
        raise ValueError(
            f"causal={causal!r} with T={query_len} query tokens and S={key_len} key tokens is ambiguous: give "
            "query_positions and key_positions, or causal=None."
        )
    shared_positions = key_positions is None or key_positions is query_positions
    shared_ids = key_segment_ids is None or key_segment_ids is query_segment_ids
    if not default_positions:
        # Index order stands for position order only where both come from one array, and only if a segment is
        # the same run of indices on both sides (see `design.md` on positions and ids).
        aligned = shared_positions and (shared_ids or query_segment_ids is None)
    query_positions, key_positions = _default_pair(
        "positions", query_positions, key_positions, batch, query_len, key_len
    )
    if query_positions is None:
        query_positions = _positions(batch, query_len)
    if key_positions is None:
        key_positions = _positions(batch, key_len)
    segmented = query_segment_ids is not None or key_segment_ids is not None
    query_segment_ids, key_segment_ids = _default_pair(
        "segment_ids", query_segment_ids, key_segment_ids, batch, query_len, key_len
    )
    if query_segment_ids is None:
        query_segment_ids = jnp.ones((batch, query_len), jnp.int32)
    if key_segment_ids is None:
        key_segment_ids = jnp.ones((batch, key_len), jnp.int32)

    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        mixing=mixing,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        causal=causal,
        window=window,
        rope=rope,
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        logits_soft_cap=logits_soft_cap,
        precision=precision,
        aligned=aligned,
        segmented=segmented,
        default_positions=default_positions,
    )
    return arguments.cleared() if clear_padding else arguments


def _check_shapes(query: Array, key: Array, value: Array, mixing: HeadMixing, part_of_heads: bool) -> None:
    for name, x, letters in (("query", query, "BTNH"), ("key", key, "BSKH"), ("value", value, "BSKH")):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [{', '.join(letters)}], got shape {x.shape}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be a floating array, got {x.dtype}.")
        if 0 in x.shape:
            raise ValueError(f"{name} must have no empty axis, got shape {x.shape}.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must share a dtype, got {query.dtype}, {key.dtype} and {value.dtype}.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value must agree in batch, length and heads, got {key.shape} and {value.shape}.")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch size, got {query.shape[0]} and {key.shape[0]}.")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have the same head dimension, got {query.shape[3]} and {key.shape[3]}.")
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"the number of key/value heads K={kv_heads} must divide that of query heads N={heads}.")
    if mixing.query.ndim != 3:
        raise ValueError(f"mixing.query must be [N, N, P], got shape {mixing.query.shape}.")
    pseudo = mixing.query.shape[2]
    made = mixing.num_heads if part_of_heads else heads
    kv_made = mixing.num_kv_heads if part_of_heads else kv_heads
    expected = {
        "query": [(heads, made, pseudo)],
        "key": [(kv_heads, kv_made, pseudo)],
        "value": [(kv_heads, kv_made, pseudo)],
        "collapse": [(made, pseudo), (heads, made, pseudo)],
    }
    for name, shapes in expected.items():
        shape = getattr(mixing, name).shape
        if shape not in shapes or pseudo < 1:
            allowed = " or ".join(str(list(s)) for s in shapes)
            raise ValueError(
                f"mixing.{name} must have shape {allowed} for N={heads} query heads, K={kv_heads} key/value heads "
                f"and P={pseudo} pseudo-heads, got {list(shape)}."
            )


def _default_pair(what: str, for_query, for_key, batch: int, query_len: int, key_len: int):
    """Checks one (query, key) pair of integer arrays; the key's default to the query's where S = T."""
    if for_query is not None and for_key is None:
        if query_len != key_len:
            raise ValueError(
                f"query_{what} given without key_{what} needs as many key tokens as query tokens, "
                f"got T={query_len} and S={key_len}: give key_{what} too."
            )
        for_key = for_query
    elif for_query is None and for_key is not None and what == "positions":
        raise ValueError("key_positions given without query_positions: give both, or neither.")
    checked = []
    for side, x, length in (("query", for_query, query_len), ("key", for_key, key_len)):
        if x is None:
            checked.append(None)
            continue
        x = jnp.asarray(x)
        if x.shape != (batch, length):
            raise ValueError(f"{side}_{what} must have shape {(batch, length)}, got {x.shape}.")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{side}_{what} must be integers, got {x.dtype}.")
        checked.append(x.astype(jnp.int32))
    return checked


def _positions(batch: int, length: int) -> Array:
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
