"""Token embeddings and the logits over the vocabulary, from one table or two."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax import sharding
from iha_jax.nn.parameters import Initializer, compute_dtype, kernel, parameter, require_positive, split_keys


class Embedding(nnx.Module):
    """A table ``[V, D]`` read by token, and read again as the output projection where embeddings are tied."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        tied: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        embedding_init: Initializer | None = None,
        rngs: nnx.Rngs | Array,
    ):
        """Makes ``table`` [V, D] and, unless tied, ``head_kernel`` [D, V].

        Args:
          vocab_size: V.
          features: D.
          tied: whether `logits` uses the embedding table.
          dtype: of embeddings and of the logits' operands, default the parameters'.
          param_dtype: of the parameters.
          precision: of the logits' contraction.
          embedding_init: of both. Default for the head, and for a tied table: normal with standard deviation
            ``D**-0.5``, at which a normalised state of unit root mean square gives logits of unit variance; a
            larger tied table would start by predicting the token just read. Default for an untied table:
            standard deviation 1, so that the token itself isn't lost among what the first layers add to it.
          rngs: a ``params`` stream.
        """
        require_positive("Embedding", vocab_size=vocab_size, features=features)
        self.vocab_size, self.dtype, self.precision = vocab_size, dtype, precision
        keys = split_keys(rngs, "table", "head")
        head_init = nnx.initializers.normal(features**-0.5) if embedding_init is None else embedding_init
        table_init = nnx.initializers.normal(1.0) if embedding_init is None and not tied else head_init
        table = table_init(keys["table"], (vocab_size, features), param_dtype)
        self.table = parameter(table, ("vocab", "embed"))
        # One assignment: an attribute that is first None is static to flax and takes no parameter later.
        head = None
        if not tied:
            head = kernel(keys["head"], head_init, (features,), (vocab_size,), ("embed", "vocab"), param_dtype)
        self.head_kernel = head

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeds tokens; one outside ``0 … V-1`` gives NaN rather than a neighbour's row."""
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}.")
        table = self.table[...]
        table = table.astype(compute_dtype(self.dtype, table))
        # Whole rows first: split within a row, what is looked up would have to change its layout entirely.
        table = sharding.constrain(table, ("vocab", None))
        # A negative index would count from the end; send it out of range instead.
        tokens = jnp.where(tokens < 0, self.vocab_size, tokens)
        return sharding.take(table, tokens, ("batch", "sequence", None))

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32 (accumulated there too), whatever the dtype of the operands."""
        weight = self.table[...] if self.head_kernel is None else self.head_kernel[...]
        equation = "btd,vd->btv" if self.head_kernel is None else "btd,dv->btv"
        dtype = compute_dtype(self.dtype, weight)
        return sharding.einsum(
            equation,
            x.astype(dtype),
            weight.astype(dtype),
            axes=("batch", "sequence", "vocab"),
            precision=self.precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
