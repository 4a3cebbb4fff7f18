"""Which pseudo-key a pseudo-query may see: causality, window and segments (one rule for all implementations)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from iha_jax.ops.types import Causal

PADDED_QUERY, PADDED_KEY = -(2**31), 1 - 2**31
"""What the kernels, which only compare ids, put in place of padding's 0: they never agree, and are nobody's ids."""


def mask_index(position: Int[Array, "..."], pseudo: Int[Array, "..."], num_pseudo_heads: int, causal: Causal) -> Array:
    """The index that visibility compares: the virtual one ``n*P + p`` under virtual causality, else the position.

    It may wrap around; differences of indices are right all the same where they fit int32.
    """
    if causal == "virtual":
        return position * num_pseudo_heads + pseudo
    return position + jnp.zeros_like(pseudo)


def visible_by_index(
    query_index: Int[Array, "..."],
    key_index: Int[Array, "..."],
    *,
    num_pseudo_heads: int,
    causal: Causal,
    window: int | None,
) -> Bool[Array, "..."] | None:
    """Visibility from indices of `mask_index` (`design.md`, functional contract); None where all is visible.

    * ``causal="virtual"``: the key's virtual index must not exceed the query's; with a window W the virtual
      distance must be below ``W*P``.
    * ``causal="token"``: the key's position must not exceed the query's; with a window the distance is below W.
    * ``causal=None``: with a window the absolute token distance is below W.
    """
    if causal is None and window is None:
        return None
    distance = query_index - key_index
    if window is None:
        return distance >= 0
    # A window beyond every distance is no window, and must not overflow int32 either.
    if causal == "virtual":
        limit = min(window, 2**30 // num_pseudo_heads) * num_pseudo_heads
    else:
        limit = min(window, 2**31 - 1)
    if causal is None:
        return jnp.abs(distance) < limit
    return (distance >= 0) & (distance < limit)


def visible(
    query_position: Int[Array, "..."],
    query_pseudo: Int[Array, "..."],
    key_position: Int[Array, "..."],
    key_pseudo: Int[Array, "..."],
    *,
    num_pseudo_heads: int,
    causal: Causal,
    window: int | None,
) -> Bool[Array, "..."] | None:
    """`visible_by_index` from positions and pseudo-heads, integer arrays that broadcast to the result."""
    return visible_by_index(
        mask_index(query_position, query_pseudo, num_pseudo_heads, causal),
        mask_index(key_position, key_pseudo, num_pseudo_heads, causal),
        num_pseudo_heads=num_pseudo_heads,
        causal=causal,
        window=window,
    )


def same_segment(query_id: Int[Array, "..."], key_id: Int[Array, "..."]) -> Bool[Array, "..."]:
    """A key is visible only if its segment id equals the query's and is not 0 (padding)."""
    return (query_id == key_id) & (key_id != 0)
