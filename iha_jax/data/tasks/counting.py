"""Count permutation match with three tokens, CPM-3 (paper section 5)."""

import dataclasses

import numpy as np

from iha_jax.data.tasks.stream import require_at_least


@dataclasses.dataclass(frozen=True)
class PermutationMatchCount:
    """Count, for every token, the pairs of tokens that complete it to a multiple of M.

    The answer at i is the number of ordered pairs (j1, j2), j1 = j2 and i itself included, for which
    ``(x[i] + G * x[j1] + x[j2]) mod M`` is 0.

    Attributes:
      length: n, tokens.
      modulus: M.
      coefficient: G, more than 2 M.
      max_token: tokens are drawn from 0 … ``max_token``; default ``M - 1``.
    """

    length: int
    modulus: int
    coefficient: int
    max_token: int | None = None

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes out of range; ``coefficient`` and ``modulus`` are both named.
        """
        require_at_least("PermutationMatchCount", 1, length=self.length, modulus=self.modulus)
        if self.max_token is not None:
            require_at_least("PermutationMatchCount", 0, max_token=self.max_token)
        if not self.coefficient > 2 * self.modulus:
            raise ValueError(
                f"PermutationMatchCount needs a coefficient above twice the modulus, got coefficient="
                f"{self.coefficient} and modulus={self.modulus}"
            )

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """The answers, int64 ``[..., n]``, to whole tokens ``[..., n]`` of any size.

        Only residues matter, so pairs are counted by residue: ``n + M²`` steps a row instead of ``n³``.
        """
        m = self.modulus
        residues = np.asarray(tokens) % m
        histogram = (residues[..., None] == np.arange(m)).sum(axis=-2)
        residue = np.arange(m)
        # pairs[s] = how many (j1, j2) have G x[j1] + x[j2] = s modulo M.
        second = (residue[:, None] - self.coefficient * residue[None]) % m
        pairs = (histogram[..., None, :] * histogram[..., second]).sum(axis=-1)
        return np.take_along_axis(pairs, -residues % m, axis=-1)

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """A batch: "inputs" int32 ``[B, n]`` and "targets" int32 ``[B, n]``.

        Args:
          rng: source of randomness.
          count: B.
        """
        top = self.modulus - 1 if self.max_token is None else self.max_token
        tokens = rng.integers(0, top + 1, (count, self.length))
        return {"inputs": tokens.astype(np.int32), "targets": self.count(tokens).astype(np.int32)}
