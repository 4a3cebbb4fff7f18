"""The decoding cache: base keys and values only, so that IHA's is exactly as large as MHA's (`paper.md` section 7)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from iha_jax import compat
from iha_jax.nn.parameters import require_positive


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "positions", "segment_ids", "lengths"),
    meta_fields=("max_length", "window"),
)
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys and values of the tokens seen so far, a pytree.

    A layer without a window has one slot for each of ``max_length`` tokens. A layer with a window of W tokens is a
    ring of ``min(W, max_length)`` slots: token number n lies in slot ``n % slots``. W slots are enough for every
    causality: a query sees at most W - 1 earlier tokens with token causality, and with virtual causality part of
    the W-th. (Positions grow at least as fast as the index, so gaps in them only make fewer tokens visible.)

    Positions and segment ids lie beside every slot, because a ring forgets order, and because callers may give
    positions of their own; they cost 8 bytes a token. An empty slot has segment id 0, so it is never visible.

    Attributes:
      key: ``[B, C, K, H]``, as the layer stores them (see its `decode`).
      value: ``[B, C, K, H]``.
      positions: int32 ``[B, C]``.
      segment_ids: int32 ``[B, C]``; 0 is empty.
      lengths: int32 ``[B]``, tokens written so far in each row (more than C in a ring that has turned).
      max_length: the most tokens a row may take, also where the ring is shorter.
      window: W, or None.
    """

    key: Float[Array, "B C K H"]
    value: Float[Array, "B C K H"]
    positions: Int[Array, "B C"]
    segment_ids: Int[Array, "B C"]
    lengths: Int[Array, "B"]
    max_length: int
    window: int | None

    @classmethod
    def create(
        cls,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        window: int | None = None,
    ) -> "AttentionCache":
        """An empty cache.

        Raises:
          ValueError: for sizes below 1.
        """
        require_positive(
            "AttentionCache",
            batch_size=batch_size,
            max_length=max_length,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        slots = max_length if window is None else min(window, max_length)
        heads = (batch_size, slots, num_kv_heads, head_dim)
        return cls(
            # Arrays of their own, not one shared array: a donated cache must not be given away twice.
            key=jnp.zeros(heads, dtype),
            value=jnp.zeros(heads, dtype),
            positions=jnp.zeros(heads[:2], jnp.int32),
            segment_ids=jnp.zeros(heads[:2], jnp.int32),
            lengths=jnp.zeros((batch_size,), jnp.int32),
            max_length=max_length,
            window=window,
        )

    @property
    def num_slots(self) -> int:
        """C, slots of one row."""
        return self.key.shape[1]

    def plan(
        self, num_tokens: int, positions: Int[Array, "B t"] | None, segment_ids: Int[Array, "B t"] | None
    ) -> "Chunk":
        """Settles where a chunk of tokens goes.

        Args:
          num_tokens: t, tokens in the chunk, padding included.
          positions: default continue the row: tokens that are not padding are numbered from ``lengths``.
          segment_ids: 0 is padding, which is not written. Default the id of the row's last token, 1 in an empty row.

        Raises:
          ValueError: for wrong shapes or dtypes; if a row would pass ``max_length`` and all values are concrete.
        """
        shape = (self.lengths.shape[0], num_tokens)
        for name, x in (("positions", positions), ("segment_ids", segment_ids)):
            if x is not None and (x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer)):
                raise ValueError(f"{name} must be integers of shape {shape}, got {x.dtype} {x.shape}.")
        if segment_ids is None:
            last = jnp.take_along_axis(self.segment_ids, ((self.lengths - 1) % self.num_slots)[:, None], axis=1)
            last = jnp.where((self.lengths > 0)[:, None], last, 1)
            segment_ids = jnp.broadcast_to(last, shape)
        segment_ids = segment_ids.astype(jnp.int32)
        real = segment_ids != 0
        number = self.lengths[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        lengths = self.lengths + jnp.sum(real, axis=1, dtype=jnp.int32)
        overflow = lengths > self.max_length
        check_room(self.lengths, lengths, self.max_length)
        # In a ring only a chunk's last C tokens remain; writing the others too would let them race for a slot.
        keep = real & ~overflow[:, None] & (number >= (lengths - self.num_slots)[:, None])
        return Chunk(
            positions=number if positions is None else positions.astype(jnp.int32),
            segment_ids=segment_ids,
            slots=jnp.where(keep, number % self.num_slots, self.num_slots),
            lengths=jnp.where(overflow, self.lengths, lengths),
            overflow=overflow,
        )

    def write(self, chunk: "Chunk", key: Float[Array, "B t K H"], value: Float[Array, "B t K H"]) -> "AttentionCache":
        """The cache with a chunk's tokens in it; padding and rows that overflow leave it as it was."""
        rows = jnp.arange(key.shape[0], dtype=jnp.int32)[:, None]

        def put(buffer: Array, x: Array) -> Array:
            # Slot C does not exist: mode="drop" is how a token is not written.
            return buffer.at[rows, chunk.slots].set(x.astype(buffer.dtype), mode="drop")

        return dataclasses.replace(
            self,
            key=put(self.key, key),
            value=put(self.value, value),
            positions=put(self.positions, chunk.positions),
            segment_ids=put(self.segment_ids, chunk.segment_ids),
            lengths=chunk.lengths,
        )

    def oldest_first(self) -> "AttentionCache":
        """The slots in order of age (empty ones first), as implementations that skip by index need them."""
        order = (self.lengths[:, None] + jnp.arange(self.num_slots, dtype=jnp.int32)[None]) % self.num_slots

        def sort(x: Array) -> Array:
            return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)

        return dataclasses.replace(
            self,
            key=sort(self.key),
            value=sort(self.value),
            positions=sort(self.positions),
            segment_ids=sort(self.segment_ids),
        )


def check_room(before: Int[Array, "B"], after: Int[Array, "B"], max_length: int) -> None:
    """Raises ValueError if a row would pass the end of its cache, as far as that can be known: not while tracing."""
    if not (compat.is_concrete(before) and compat.is_concrete(after)):
        return
    overflow = after > max_length
    if bool(overflow.any()):
        row = int(jnp.argmax(overflow))
        raise ValueError(
            f"the cache holds max_length={max_length} tokens a row, but row {row} has {int(before[row])} and was given "
            f"{int(after[row] - before[row])} more: make it longer with init_cache."
        )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Where the tokens of one decoding call belong.

    Attributes:
      positions: int32 ``[B, t]``.
      segment_ids: int32 ``[B, t]``; 0 is padding.
      slots: int32 ``[B, t]``; the number of slots where a token is not written.
      lengths: int32 ``[B]`` after the chunk.
      overflow: ``[B]``, rows that would pass the cache's end.
    """

    positions: Int[Array, "B t"]
    segment_ids: Int[Array, "B t"]
    slots: Int[Array, "B t"]
    lengths: Int[Array, "B"]
    overflow: Bool[Array, "B"]
