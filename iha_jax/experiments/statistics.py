"""Spread over seeds, and differences between variants seed by seed."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Mean and sample standard deviation; the latter NaN for a single value, both NaN for none.

    Attributes:
      mean: of the values.
      deviation: divided by n - 1.
      count: n.
    """

    mean: float
    deviation: float
    count: int


class Paired(NamedTuple):
    """Differences, seed by seed.

    Attributes:
      spread: of variant minus baseline.
      better: with how many of the seeds the variant is better.
    """

    spread: Spread
    better: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of some values."""
    n = len(values)
    if not n:
        return Spread(math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Spread(mean, math.nan, 1)
    return Spread(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)), n)


def paired(variant: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool = True) -> Paired:
    """Differences over the seeds that both have.

    Args:
      variant: seed → value.
      baseline: likewise.
      higher_is_better: whether more is better.
    """
    differences = [variant[seed] - baseline[seed] for seed in variant if seed in baseline]
    return Paired(spread(differences), sum((d > 0) if higher_is_better else (d < 0) for d in differences))
