"""Which pseudo-key a pseudo-query may see: causality, window and segments (one rule for all implementations)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from iha_jax.ops.types import Causal


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
    """Visibility by position (`design.md`, functional contract); None where everything is visible.

    The arguments are integer arrays of equal rank that broadcast to the result. Differences of positions are
    taken before anything is multiplied by P, so positions may use the whole int32 range that P allows.

    * ``causal="virtual"``: the key's virtual index ``n*P + p`` must not exceed the query's; with a window W the
      virtual distance must be below ``W*P``.
    * ``causal="token"``: the key's position must not exceed the query's; with a window the distance is below W.
    * ``causal=None``: with a window the absolute token distance is below W.
    """
    if causal is None and window is None:
        return None
    distance = query_position - key_position
    # A window beyond every distance is no window, and must not overflow int32 either.
    limit = None if window is None else min(window, 2**31 - 1)
    if causal is None:
        return jnp.abs(distance) < limit
    if causal == "virtual":
        distance = distance * num_pseudo_heads + (query_pseudo - key_pseudo)
        limit = None if window is None else min(window, 2**30 // num_pseudo_heads) * num_pseudo_heads
    seen = distance >= 0
    return seen if limit is None else seen & (distance < limit)


def same_segment(query_id: Int[Array, "..."], key_id: Int[Array, "..."]) -> Bool[Array, "..."]:
    """A key is visible only if its segment id equals the query's and is not 0 (padding)."""
    return (query_id == key_id) & (key_id != 0)
