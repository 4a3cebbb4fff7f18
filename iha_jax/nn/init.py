"""How mixing and collapse start. The paper does not say; plain copies are dead or unequal to MHA, so we choose.

Two schemes, by name (`MixingScheme`), made by `initial_mixing`:

``"live"`` (default): every pseudo-head is its base head plus a little of all heads, and the collapse averages.

* *It lives.* Copies alone are symmetric: with token causality (or none), a per-head collapse and no RoPE the P
  gradients are equal for ever; a one-hot collapse hands no gradient to the other pseudo-queries. Here the noise
  differs over p in queries, keys and values, and every pseudo-head has the same share in the output, so every
  gradient is there at the first step and none equals another.
* *It starts at MHA's size.* The noise is centred over p, so that the mean pseudo-head is the base head. The rows of
  the collapse do not sum to 1 but to a gain (`collapse_gain`), because the P copies of a token, turned by different
  virtual positions and perturbed by noise, average each other out a little; and under virtual causality a short
  window is blurred by a token. The gain restores the root mean square that MHA has with the same base weights.

``"exact"``: the layer equals MHA (`paper.md` section 7), so that a trained one can be continued. Keys are copies;
the collapse takes the last pseudo-head, whose query is a copy. What cannot matter yet is free and therefore
noisy: the other queries, and the values around their mean (a token's P keys weigh the same, so only their mean
enters). So the first step already tells pseudo-heads apart in the keys and the collapse; the other queries,
weighted by zero, follow at the second step.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from iha_jax.ops.mixing import Collapse, HeadMixing
from iha_jax.ops.rope import Rope
from iha_jax.ops.types import Causal

MixingScheme = Literal["live", "exact"]

# Energy of the noise relative to the copy is its square, 4%: enough to tell pseudo-heads apart from the first
# step, too little to blur a head's own pattern.
NOISE = 0.2
# The model of `collapse_gain` takes logits of unit variance, but a ratio of expectations overstates how unequal the
# weights of a few dozen keys are; this part of the variance fits what random inputs show from 2 to 1000 keys.
_EFFECTIVE_VARIANCE = 0.7
# Keys in view where there is no window; the gain hardly depends on it above a few dozen.
_TYPICAL_CONTEXT = 64


def copy_with_noise(key: Array, shape: tuple[int, int, int], dtype: DTypeLike, noise: float = NOISE) -> Array:
    """``[M, M, P]``: the identity for every p, plus noise that is centred over p.

    Args:
      key: PRNG key.
      shape: (source heads, heads, pseudo-heads); the first two equal.
      dtype: of the result.
      noise: norm of the noise in one pseudo-head relative to its copy; its elements have standard deviation
        ``noise / sqrt(M)``.
    """
    heads, _, pseudo = shape
    identity = jnp.broadcast_to(jnp.eye(heads)[:, :, None], shape)
    if pseudo == 1:
        return identity.astype(dtype)
    normal = jax.random.normal(key, shape)
    centred = (normal - jnp.mean(normal, axis=2, keepdims=True)) * math.sqrt(pseudo / (pseudo - 1))
    return (identity + noise / math.sqrt(heads) * centred).astype(dtype)


def initial_mixing(
    scheme: MixingScheme,
    key: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_pseudo_heads: int,
    head_dim: int,
    causal: Causal,
    window: int | None,
    rope: Rope | None,
    collapse: Collapse,
    dtype: DTypeLike,
) -> HeadMixing:
    """The mixing tensors a layer with these options starts from; see the module for the reasons.

    Args:
      scheme: ``"live"`` or ``"exact"``.
      key: PRNG key.
      num_heads: N.
      num_kv_heads: K.
      num_pseudo_heads: P.
      head_dim: H.
      causal: as in `interleaved_head_attention`.
      window: likewise.
      rope: likewise.
      collapse: ``"per_head"`` or ``"across_heads"``.
      dtype: of the tensors.

    Raises:
      ValueError: for ``"exact"`` with virtual-position RoPE and P > 1, where no exact start exists; for an
        unknown scheme.
    """
    if scheme not in get_args(MixingScheme):
        raise ValueError(f"the mixing scheme must be one of {get_args(MixingScheme)}, got {scheme!r}.")
    n, k, p = num_heads, num_kv_heads, num_pseudo_heads
    copies = HeadMixing.copy(n, p, k, collapse=collapse, select="last", dtype=dtype)
    keys = jax.random.split(key, 3)
    query = copy_with_noise(keys[0], (n, n, p), dtype)
    value = copy_with_noise(keys[2], (k, k, p), dtype)
    if scheme == "exact":
        if rope is not None and rope.positions == "virtual" and p > 1:
            raise ValueError(
                'mixing_init="exact" needs RoPE on token positions or none: with rope.positions="virtual" and '
                f'{p} pseudo-heads IHA does not contain MHA. Use Rope(positions="token") or mixing_init="live".'
            )
        query = query.at[:, :, -1].set(copies.query[:, :, -1])
        return HeadMixing(query=query, key=copies.key, value=value, collapse=copies.collapse)
    gain = collapse_gain(p, head_dim, causal, window, rope)
    shape = copies.collapse.shape
    share = jnp.full(shape, gain / p, dtype)
    if collapse == "across_heads":
        share = share * jnp.eye(n, dtype=dtype)[:, :, None]
    return HeadMixing(query=query, key=copy_with_noise(keys[1], (k, k, p), dtype), value=value, collapse=share)


@functools.lru_cache(maxsize=256)
def collapse_gain(
    num_pseudo_heads: int, head_dim: int, causal: Causal, window: int | None, rope: Rope | None, noise: float = NOISE
) -> float:
    """What the rows of a uniform collapse must sum to for an output of MHA's root mean square.

    Model: base queries, keys and values are independent standard normal vectors, so logits have unit variance.
    With weights ``e^l / sum e^l``, the mean square of an output is about ``E[sum e^2l] / E[(sum e^l)^2]``; logits of
    the same token have the covariance ``c = mean cos(frequency * distance) * <q_p, q_p'> * <k_r, k_r'>``, and
    ``E[e^(l + l')]`` is proportional to ``e^c``. Different tokens are independent. For MHA it is ``e / (e + n - 1)``,
    n keys in view; the gain is the root of the ratio.

    Args:
      num_pseudo_heads: P.
      head_dim: H.
      causal: which pseudo-keys are seen.
      window: W, or None.
      rope: turns pseudo-heads apart, where positions are virtual.
      noise: of the mixing tensors.
    """
    p = num_pseudo_heads
    if p == 1:
        return 1.0
    tokens = _TYPICAL_CONTEXT if window is None else min(window, _TYPICAL_CONTEXT)
    if causal is None and window is not None:
        tokens = 2 * tokens - 1
    index = np.arange(p)
    same = 1 + noise**2 * (np.eye(p) - 1 / p) * p / (p - 1)  # <x_p, x_p'> of noisy copies
    if rope is not None and rope.positions == "virtual":
        frequencies, _ = rope.frequencies(head_dim, p)
        # Pair (p, r), (p', r'): distances differ by (p - r) - (p' - r'), from 2 - 2P to 2P - 2.
        turn = np.cos(np.arange(2 - 2 * p, 2 * p - 1)[:, None] * frequencies[None]).mean(axis=1)
    else:
        turn = np.ones((4 * p - 3,))
    # Own token and, in a window, the token W before it are seen in part under virtual causality.
    full, everything = tokens, np.ones((p, p))
    partial = []
    if causal == "virtual":
        partial = [index[None, :] <= index[:, None]]
        full = tokens - 1
        if window is not None:
            partial.append(index[None, :] > index[:, None])
    views = [(full, everything), *((1, view.astype(float)) for view in partial)]
    seen = np.sum([count * view.sum(axis=1) for count, view in views], axis=0)  # keys seen by each pseudo-query
    total = 0.0
    for a in range(p):
        # (a - r) - (p' - r') over [p', r, r'].
        difference = (a - index[None, :, None]) - (index[:, None, None] - index[None, None, :])
        covariance = _EFFECTIVE_VARIANCE * turn[difference + 2 * p - 2] * same[a][:, None, None] * same[None]
        pair = np.exp(covariance)
        numerator, denominator = np.zeros(p), seen[a] * seen
        for count, view in views:
            both = view[a][None, :, None] * view[:, None, :]
            numerator += count * (both * pair * same[None]).sum(axis=(1, 2))
            denominator += count * (both * (pair - 1)).sum(axis=(1, 2))
        total += (numerator / denominator).sum()
    peak = math.exp(_EFFECTIVE_VARIANCE)
    ours, plain = total / p**2, peak / (peak + tokens - 1)
    return math.sqrt(plain / ours)
