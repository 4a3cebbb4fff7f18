"""Polynomial filtering: the powers of a matrix, all at once (paper section 5)."""

import dataclasses
import functools

import numpy as np

from iha_jax.data.tasks.stream import require_at_least


@dataclasses.dataclass(frozen=True)
class PolynomialFilters:
    """Given the rows of ``[X, I]``, give those of ``[X, AX, …, A^(k-1) X]``; A is fixed, X changes.

    Attributes:
      nodes: n, rows of X and size of A.
      features: d, columns of X.
      order: k, powers asked for, the zeroth included.
      spectral_radius: of A, whose entries are independent normal numbers, scaled.
      seed: of A.
      dtype: of all arrays.
    """

    nodes: int
    features: int
    order: int
    spectral_radius: float = 1.0
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes below 1, or a radius that isn't positive.
        """
        require_at_least("PolynomialFilters", 1, nodes=self.nodes, features=self.features, order=self.order)
        if not self.spectral_radius > 0:
            raise ValueError(f"PolynomialFilters needs a spectral radius > 0, got {self.spectral_radius}")

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """A, float64 ``[n, n]``."""
        matrix = np.random.default_rng(self.seed).standard_normal((self.nodes, self.nodes))
        return matrix * (self.spectral_radius / np.abs(np.linalg.eigvals(matrix)).max())

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """A batch.

        Args:
          rng: source of randomness.
          count: B.

        Returns:
          "inputs" ``[B, n, d + n]``, X (standard normal) beside the identity, and "targets" ``[B, n, k * d]``.
        """
        signal = rng.standard_normal((count, self.nodes, self.features))
        powers = [signal]
        for _ in range(self.order - 1):
            powers.append(self.matrix @ powers[-1])
        identity = np.broadcast_to(np.eye(self.nodes), (count, self.nodes, self.nodes))
        inputs = np.concatenate([signal, identity], axis=2)
        return {"inputs": inputs.astype(self.dtype), "targets": np.concatenate(powers, axis=2).astype(self.dtype)}
