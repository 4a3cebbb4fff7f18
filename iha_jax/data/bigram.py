"""The baseline every language model must beat: a table of which token follows which."""

from collections.abc import Iterable, Mapping

import numpy as np


class Bigram:
    """Counts of (token, next token), smoothed, as log-probabilities.

    Attributes:
      log_probabilities: float64 [V, V], natural logarithms of p(next | token).
    """

    def __init__(self, counts: np.ndarray, pseudo_count: float = 0.01):
        smoothed = counts.astype(np.float64) + pseudo_count
        self.log_probabilities = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))

    @classmethod
    def fit(cls, pairs: Iterable[Mapping[str, np.ndarray]], vocab_size: int) -> "Bigram":
        """The table of a stream of {inputs [n], targets [n]}.

        Raises:
          ValueError: the vocabulary is too large for a table (2,048 and above).
        """
        if vocab_size > 2048:
            raise ValueError(f"a bigram table is for vocabularies of at most 2048 tokens, got {vocab_size}")
        counts = np.zeros(vocab_size * vocab_size, np.int64)
        for pair in pairs:
            index = pair["inputs"].astype(np.int64) * vocab_size + pair["targets"]
            counts += np.bincount(index, minlength=vocab_size * vocab_size)
        return cls(counts.reshape(vocab_size, vocab_size))

    def nats_per_token(self, batches: Iterable[Mapping[str, np.ndarray]]) -> float:
        """Mean negative log-likelihood over the weighted targets of batches, in nats."""
        total = weight = 0.0
        for batch in batches:
            log_p = self.log_probabilities[batch["inputs"], batch["targets"]]
            total -= float((log_p * batch["weights"]).sum())
            weight += float(batch["weights"].sum())
        return total / weight if weight else float("nan")
