"""What has become of the mixing tensors: how far they are from copying, and how pseudo-heads differ."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from iha_jax.training.state import Params


@jax.jit
def mixing_statistics(params: Params) -> dict[str, Float[Array, ""]]:
    """Root-mean-square distances per tensor kind, over all layers; empty for a model without mixing.

    "mixing/<tensor>/from_copy" is the distance of a mixing tensor's entries from ``mix[m,h,p] = 1(m == h)``;
    "mixing/<tensor>/spread" the standard deviation over p, 0 as long as all pseudo-heads are alike.

    Args:
      params: path → parameter; a leading axis of layers is allowed.
    """
    found: dict[str, list[tuple[Array, Array]]] = {}
    for path, value in params.items():
        name = path.rsplit(".", 1)[-1]
        if not name.startswith("mixing_") and name != "collapse":
            continue
        value = value.astype(jnp.float32)
        spread = jnp.mean(jnp.var(value, axis=-1))
        distance = jnp.float32(jnp.nan)
        if name.startswith("mixing_"):
            eye = jnp.eye(value.shape[-2], dtype=jnp.float32)
            copy = jnp.broadcast_to(eye[..., None], value.shape[-3:])
            distance = jnp.mean(jnp.square(value - jnp.broadcast_to(copy, value.shape)))
        found.setdefault(name, []).append((distance, spread))
    statistics = {}
    for name, pairs in found.items():
        if name != "collapse":
            statistics[f"mixing/{name}/from_copy"] = jnp.sqrt(jnp.mean(jnp.stack([d for d, _ in pairs])))
        statistics[f"mixing/{name}/spread"] = jnp.sqrt(jnp.mean(jnp.stack([s for _, s in pairs])))
    return statistics
