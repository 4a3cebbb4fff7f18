"""Talking-heads attention (arXiv 2003.02436): heads exchange logits before the softmax and weights after it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike

from iha_jax.nn.between_heads import TalkingMaps
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.parameters import Initializer, parameter, split_keys


class TalkingHeadsAttention(MultiHeadAttention):
    """Multi-head attention whose maps are mixed across heads, twice.

    With l the scaled logits of the base heads, head h attends with the weights

        w[h] = Σ_m talking_weights[m, h] · softmax(mask(Σ_g talking_logits[g, m] · l[g]))

    The mask comes after the first mixing, so mixed logits never see what is hidden, and so does the soft cap, which
    bounds what the softmax is given. Key/value heads that serve several query heads have one logit each in the
    mixing. All logits of a block must exist at once; memory still grows linearly with length, as blocks do.

    Beside MHA's parameters it has ``talking_logits`` and ``talking_weights``, both [N, N] indexed (source head, head).
    They start as identities, at which the layer is multi-head attention.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        talking_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | Array,
        **options: Any,
    ):
        """Makes the parameters.

        Args:
          num_heads: N.
          in_features: D.
          talking_init: of both mixing matrices, default the identity.
          param_dtype: of the parameters.
          rngs: a ``params`` stream, or a key.
          **options: every other option of `MultiHeadAttention`.

        Raises:
          ValueError: for options that contradict each other; both values are named.
        """
        keys = split_keys(rngs, "attention", "logits", "weights")
        super().__init__(num_heads, in_features, param_dtype=param_dtype, rngs=keys["attention"], **options)

        def matrix(name: str) -> nnx.Param:
            shape = (num_heads, num_heads)
            value = jnp.eye(num_heads, dtype=param_dtype)
            if talking_init is not None:
                value = talking_init(keys[name], shape, param_dtype)
            # Whole on every device: each mixes all heads.
            return parameter(value, ("source_heads", "source_heads"))

        self.talking_logits = matrix("logits")
        self.talking_weights = matrix("weights")

    def _between(self) -> TalkingMaps:
        return TalkingMaps(logits=self.talking_logits[...], weights=self.talking_weights[...])
