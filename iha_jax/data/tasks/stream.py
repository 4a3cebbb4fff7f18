"""Endless batches of a task, any of which can be made without those before it."""

import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np


class Task(Protocol):
    """Something that makes examples."""

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """Arrays with ``count`` rows, drawn from ``rng``."""
        ...


def stream(task: Task, count: int, seed: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Batches number ``start``, ``start + 1``, …; batch i is the same wherever the stream starts.

    Args:
      task: what makes the examples.
      count: rows of a batch.
      seed: of all batches, at least 0.
      start: number of the first batch.
    """
    for index in itertools.count(start):
        yield task.sample(np.random.default_rng([seed, index]), count)


def require_at_least(what: str, least: int, **sizes: int) -> None:
    """Raises ValueError naming the first size that isn't a whole number of at least ``least``."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{what} needs a whole number {name} >= {least}, got {name}={size!r}")


def choose(rng: np.random.Generator, count: int, population: int, size: int) -> np.ndarray:
    """``[count, size]``: in every row different numbers below ``population``, in random order."""
    if population <= 4 * size**2:
        return rng.random((count, population)).argsort(axis=1)[:, :size]
    # Collisions are rare: rows with one are drawn again, as a whole, so that every choice stays equally likely.
    chosen = rng.integers(0, population, (count, size))
    while True:
        ordered = np.sort(chosen, axis=1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not len(again):
            return chosen
        chosen[again] = rng.integers(0, population, (len(again), size))
