"""Numbers about mixing tensors and collapses."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float


class MixingSummary(NamedTuple):
    """Numbers about one mixing tensor.

    Attributes:
      from_copy: root-mean-square distance of the entries from ``mix[m, h, p] = 1(m == h)``.
      spread: root mean square over heads of the standard deviation over p; 0 if all pseudo-heads are alike.
      effective_rank: of the matrix ``[M, N P]``: the exponential of the entropy of its normalised squared singular
        values; M if all sources matter alike, 1 if all pseudo-heads are multiples of one mixture.
    """

    from_copy: float
    spread: float
    effective_rank: float


def mixing_summary(tensor: Float[Array, "M N P"] | np.ndarray) -> MixingSummary:
    """How far a mixing tensor is from copying, how pseudo-heads differ, and how many sources it uses."""
    values = np.asarray(tensor, np.float64)
    heads, made, pseudo = values.shape
    energy = np.linalg.svd(values.reshape(heads, made * pseudo), compute_uv=False) ** 2
    share = energy[energy > 0] / energy.sum()
    return MixingSummary(
        from_copy=float(np.sqrt(np.mean((values - np.eye(heads, made)[:, :, None]) ** 2))),
        spread=float(np.sqrt(np.mean(values.var(axis=2)))),
        effective_rank=float(np.exp(-(share * np.log(share)).sum())),
    )


class CollapseSummary(NamedTuple):
    """Which pseudo-heads a collapse uses.

    Attributes:
      share: float64 ``[N, P]``: of head n's weights by absolute value, the part on pseudo-heads p (of all source heads
        together, across heads); rows sum to 1, a head without any weight has zeros.
      used: float64 ``[N]``: the exponential of the entropy of a row of ``share``: P if all pseudo-heads count alike, 1
        if one alone counts.
    """

    share: Float[np.ndarray, "N P"]
    used: Float[np.ndarray, "N"]


def collapse_summary(collapse: Array | np.ndarray) -> CollapseSummary:
    """How a collapse ``[N, P]``, or ``[N, N, P]`` across heads, divides its weight among pseudo-heads."""
    weight = np.abs(np.asarray(collapse, np.float64))
    if weight.ndim == 3:
        weight = weight.sum(axis=1)
    total = weight.sum(axis=1, keepdims=True)
    share = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return CollapseSummary(share, np.exp(-(share * logs).sum(axis=1)))
