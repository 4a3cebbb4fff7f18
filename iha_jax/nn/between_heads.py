"""What some attentions do to their maps between the heads: before the softmax, and after it.

Each is a pytree with the learned numbers it needs and three things that `dot_product_attention` asks for: how many maps
a head has, whether its maps must see those of all heads, and what becomes of logits and of weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Protocol

import jax
from jaxtyping import Array, Float

Contract = Callable[..., Array]
"""`jnp.einsum` with precision and accumulation settled."""


class BetweenHeads(Protocol):
    """Of N heads with M maps each: logits ``[…, N·M, T, S]``, head-major, and the weights the values are read with.

    Attributes:
      num_maps: M; queries and keys are M vectors side by side.
      needs_all_heads: whether logits or weights of one head depend on other heads.
    """

    num_maps: ClassVar[int]
    needs_all_heads: ClassVar[bool]

    def of_logits(self, logits: Float[Array, "*B NM T S"], contract: Contract) -> Float[Array, "*B NM T S"]:
        """Scaled logits, before soft cap and mask."""
        ...

    def of_weights(self, weights: Float[Array, "*B NM T S"], contract: Contract) -> Float[Array, "*B N T S"]:
        """Weights after the softmax, 0 where nothing is seen."""
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=("logits", "weights"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class TalkingMaps:
    """Talking heads (arXiv 2003.02436): heads exchange logits, and then weights.

    Attributes:
      logits: ``[N, N]`` indexed (source head, head).
      weights: likewise.
    """

    num_maps: ClassVar[int] = 1
    needs_all_heads: ClassVar[bool] = True

    logits: Float[Array, "N N"]
    weights: Float[Array, "N N"]

    def of_logits(self, logits: Float[Array, "*B N T S"], contract: Contract) -> Float[Array, "*B N T S"]:
        """``Σ_m logits[m, h] · l[m]``."""
        return contract("...mts,mh->...hts", logits, self.logits.astype(logits.dtype))

    def of_weights(self, weights: Float[Array, "*B N T S"], contract: Contract) -> Float[Array, "*B N T S"]:
        """``Σ_m weights[m, h] · w[m]``."""
        return contract("...mts,mh->...hts", weights, self.weights.astype(weights.dtype))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("factor",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class MapDifference:
    """Differential attention (arXiv 2410.05258): of a head's two maps, the first less λ times the second.

    Attributes:
      factor: λ, a scalar.
    """

    num_maps: ClassVar[int] = 2
    needs_all_heads: ClassVar[bool] = False

    factor: Float[Array, ""]

    def of_logits(self, logits: Float[Array, "*B NM T S"], contract: Contract) -> Float[Array, "*B NM T S"]:
        """As they are."""
        del contract
        return logits

    def of_weights(self, weights: Float[Array, "*B NM T S"], contract: Contract) -> Float[Array, "*B N T S"]:
        """``w[0] - λ w[1]`` of every head."""
        del contract
        *lead, maps, tokens, keys = weights.shape
        pairs = weights.reshape(*lead, maps // 2, 2, tokens, keys)
        return pairs[..., 0, :, :] - self.factor.astype(weights.dtype) * pairs[..., 1, :, :]
