"""Head mixing: the learned combinations that turn N heads into N*P pseudo-heads and back (paper section 1)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Collapse = Literal["per_head", "across_heads"]
Select = Literal["last", "first", "mean"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadMixing:
    """The four mixing tensors of one IHA layer, a pytree.

    Attributes:
      query: ``[N, N, P]``, indexed (source head, head, pseudo-head).
      key: ``[K, K, P]``, likewise over key/value heads.
      value: ``[K, K, P]``, likewise.
      collapse: ``[N, P]`` (Algorithm 1, per head) indexed (head, pseudo-head), or ``[N, N, P]`` (Definition 3,
        across heads) indexed (output head, source head, pseudo-head).
    """

    # Annotated more widely than the operation accepts: as a pytree it also carries a stack of layers, or the part
    # of the heads (out of M source heads) that a block or a shard works on.
    query: Float[Array, "*stack M N P"]
    key: Float[Array, "*stack L K P"]
    value: Float[Array, "*stack L K P"]
    collapse: Float[Array, "*stack N P"] | Float[Array, "*stack O N P"]

    @property
    def num_heads(self) -> int:
        """N, the number of query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """K, the number of key/value heads."""
        return self.key.shape[1]

    @property
    def num_pseudo_heads(self) -> int:
        """P, the number of pseudo-heads of each head."""
        return self.query.shape[2]

    @classmethod
    def copy(
        cls,
        num_heads: int,
        num_pseudo_heads: int,
        num_kv_heads: int | None = None,
        collapse: Collapse = "per_head",
        select: Select = "last",
        dtype=jnp.float32,
    ) -> "HeadMixing":
        """Plain copies: every pseudo-head equals its base head, and the collapse takes one of them.

        Args:
          num_heads: N.
          num_pseudo_heads: P.
          num_kv_heads: K, default N; must divide N.
          collapse: ``"per_head"`` for ``[N, P]``, ``"across_heads"`` for ``[N, N, P]``.
          select: which pseudo-head the collapse takes: ``"last"`` (the one that sees all P copies of its own
            token, hence exact MHA under virtual causality and token RoPE), ``"first"``, or their ``"mean"``.
          dtype: of all four tensors.

        Raises:
          ValueError: for sizes below 1, K that does not divide N, or unknown names.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (
            ("num_heads", num_heads),
            ("num_pseudo_heads", num_pseudo_heads),
            ("num_kv_heads", kv_heads),
        ):
            if size < 1:
                raise ValueError(f"HeadMixing.copy needs {name} >= 1, got {name}={size}.")
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={num_heads}.")
        if select == "mean":
            weights = jnp.full((num_pseudo_heads,), 1 / num_pseudo_heads, dtype)
        elif select in ("last", "first"):
            weights = jnp.zeros((num_pseudo_heads,), dtype).at[-1 if select == "last" else 0].set(1)
        else:
            raise ValueError(f'select must be "last", "first" or "mean", got {select!r}.')
        if collapse == "per_head":
            r = jnp.broadcast_to(weights[None, :], (num_heads, num_pseudo_heads))
        elif collapse == "across_heads":
            r = jnp.eye(num_heads, dtype=dtype)[:, :, None] * weights[None, None, :]
        else:
            raise ValueError(f'collapse must be "per_head" or "across_heads", got {collapse!r}.')

        def eye(heads: int) -> Array:
            copies = jnp.broadcast_to(jnp.eye(heads, dtype=dtype)[:, :, None], (heads, heads, num_pseudo_heads))
            return copies

        return cls(query=eye(num_heads), key=eye(kv_heads), value=eye(kv_heads), collapse=r)


def mix(
    x: Float[Array, "*batch T M H"], weights: Float[Array, "M N P"], precision=None
) -> Float[Array, "*batch T N P H"]:
    """Pseudo-heads as linear combinations of all heads (paper section 1, step 2).

    Accumulates in at least float32 and rounds to x's dtype.
    """
    compute = jnp.promote_types(x.dtype, jnp.float32)
    mixed = jnp.einsum("...tmh,mnp->...tnph", x.astype(compute), weights.astype(compute), precision=precision)
    return mixed.astype(x.dtype)


def interleave(x: Float[Array, "*batch T N P H"]) -> Float[Array, "*batch TP N H"]:
    """Token t, pseudo-head p becomes virtual token ``t*P + p`` (paper section 1, step 3)."""
    *batch, tokens, heads, pseudo, dim = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(*batch, tokens * pseudo, heads, dim)


def collapse(
    x: Float[Array, "*batch TP N H"],
    weights: Float[Array, "N P"] | Float[Array, "N N P"],
    precision=None,
) -> Float[Array, "*batch T N H"]:
    """Combines the P outputs of each head into one, per head or across heads (paper section 1, step 5)."""
    pseudo = weights.shape[-1]
    *batch, virtual, heads, dim = x.shape
    x = x.reshape(*batch, virtual // pseudo, pseudo, heads, dim)
    compute = jnp.promote_types(x.dtype, jnp.float32)
    spec = "...tpnh,np->...tnh" if weights.ndim == 2 else "...tpgh,ngp->...tnh"
    return jnp.einsum(spec, x.astype(compute), weights.astype(compute), precision=precision)
