"""Composition of a random relation with itself (paper appendix D)."""

import dataclasses

import numpy as np

from iha_jax.data.tasks.stream import require_at_least

# Sizes and density by arity, as in the paper: at these densities about half of the answers are yes.
_SIZES = {2: (6, 7, 8, 9, 10), 3: (5, 6, 7, 8)}
_DENSITIES = {2: 0.325, 3: 0.264}


@dataclasses.dataclass(frozen=True)
class RelationComposition:
    """Given a boolean m x m matrix R token by token, say for every pair whether R∘R, or R∘R∘R, holds.

    ``(R∘S)[i, j]`` holds if for some k both ``R[i, k]`` and ``S[k, j]`` do. Row-major, so pair (i, j) is token
    ``i * m + j``, and the answer stands where the pair does.

    Attributes:
      arity: 2 for R∘R, 3 for R∘R∘R.
      sizes: what m is drawn from, uniformly; default the paper's, 6 … 10 and 5 … 8.
      density: probability that a pair is related; default the paper's, 0.325 and 0.264.
    """

    arity: int
    sizes: tuple[int, ...] = ()
    density: float | None = None

    def __post_init__(self):
        """Fills in what the paper has.

        Raises:
          ValueError: an arity other than 2 and 3, an empty matrix, or a density outside 0 … 1.
        """
        if self.arity not in _SIZES:
            raise ValueError(f"RelationComposition needs arity 2 or 3, got {self.arity!r}")
        object.__setattr__(self, "sizes", tuple(self.sizes) or _SIZES[self.arity])
        object.__setattr__(self, "density", _DENSITIES[self.arity] if self.density is None else self.density)
        for size in self.sizes:
            require_at_least("RelationComposition", 1, size=size)
        if not 0 <= self._probability <= 1:
            raise ValueError(f"RelationComposition needs a density in 0 … 1, got {self.density}")

    @property
    def _probability(self) -> float:
        assert self.density is not None  # filled in above
        return self.density

    @property
    def max_length(self) -> int:
        """Tokens of the longest example."""
        return max(self.sizes) ** 2

    def of_size(self, rng: np.random.Generator, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Examples of one size m: relation and composition, both int8 ``[count, m²]`` of 0 and 1."""
        relation = rng.random((count, size, size)) < self._probability
        # Counts of paths: float32 is exact far beyond m^(arity - 1), and multiplies fast.
        step = relation.astype(np.float32)
        paths = step
        for _ in range(self.arity - 1):
            paths = np.minimum(paths @ step, 1)
        composed = paths > 0
        return relation.reshape(count, -1).astype(np.int8), composed.reshape(count, -1).astype(np.int8)

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """A batch of mixed sizes, padded on the right to its longest example.

        Args:
          rng: source of randomness.
          count: B.

        Returns:
          "inputs" and "targets", int8 ``[B, T]`` of 0 and 1, and "weights", float32 ``[B, T]``, 0 for padding.
        """
        sizes = rng.choice(np.asarray(self.sizes), count)
        length = int(sizes.max(initial=1)) ** 2
        inputs, targets = np.zeros((2, count, length), np.int8)
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            inputs[rows, : size**2], targets[rows, : size**2] = self.of_size(rng, len(rows), int(size))
        weights = (np.arange(length) < (sizes**2)[:, None]).astype(np.float32)
        return {"inputs": inputs, "targets": targets, "weights": weights}
