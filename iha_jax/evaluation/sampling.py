"""How the next token is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are made.

    Attributes:
      max_new_tokens: the most tokens of a completion.
      temperature: 0 takes the likeliest token every time; otherwise logits are divided by it.
      top_k: only the k likeliest tokens may be drawn (more where they tie); None, all.
      top_p: only the fewest likeliest tokens whose probabilities reach this sum; 1, all. After `top_k`.
      stop: texts before which a completion ends.
      seed: of the draws. One completion's depend on it, the number of the prompt and that of the sample alone:
        not on the batch, nor on how many others there are.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        """Checks ranges."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 or None, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}")


def choose(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: float | Float[Array, ""],
    top_k: int | None,
    top_p: float | Float[Array, ""] | None,
) -> Int[Array, "B"]:
    """A token for every row, int32 ``[B]``.

    Args:
      logits: float32 ``[B, V]``.
      keys: ``[B]``; not used where the likeliest is taken.
      temperature: above 0, or exactly the number 0.
      top_k: static.
      top_p: None for all.
    """
    if isinstance(temperature, int | float) and temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, restrict(logits / temperature, top_k, top_p)).astype(jnp.int32)


def restrict(
    logits: Float[Array, "B V"], top_k: int | None, top_p: float | Float[Array, ""] | None
) -> Float[Array, "B V"]:
    """Logits with ``-inf`` for what may not be drawn; see `Sampling`."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        # A token stays if those before it do not yet reach the sum: the likeliest always does.
        stays = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
        rows = jnp.arange(logits.shape[0])[:, None]
        kept = jnp.zeros_like(stays).at[rows, order].set(stays)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits
