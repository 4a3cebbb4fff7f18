"""Multi-key associative recall: many keys with a value each, some of them asked for after a while."""

import dataclasses

import numpy as np

from iha_jax.data.tasks.stream import choose, require_at_least


@dataclasses.dataclass(frozen=True)
class MultiKeyRecall:
    """Next-token prediction on a haystack with key-value pairs, a gap, and then queries.

        filler … K1 V1 filler … K2 V2 filler …  |  gap of filler  |  K2 V2 K1 V1
                                                                     ^^ is answered: only V2 after K2, V1 after K1
                                                                        carry weight

    A sequence has ``length + 1`` tokens (inputs are all but the last, targets all but the first). Keys of a sequence
    differ from each other; with ``key_length`` above 1 they share tokens, and only the whole key tells. Values are
    drawn with replacement. Tokens: filler is ``first_token … + num_fillers - 1``, then come the key tokens, then
    the value tokens.

    Attributes:
      length: T, tokens of inputs and targets.
      num_keys: pairs in the haystack.
      num_queries: keys asked for, each once, in random order.
      gap: tokens of filler between haystack and queries.
      key_length: tokens of a key.
      value_length: tokens of a value.
      key_tokens: different tokens keys are made of.
      value_tokens: different tokens values are made of.
      num_fillers: different tokens filler is made of.
      first_token: where this task's tokens begin in the vocabulary.
    """

    length: int
    num_keys: int = 8
    num_queries: int = 4
    gap: int = 0
    key_length: int = 1
    value_length: int = 1
    key_tokens: int = 64
    value_tokens: int = 64
    num_fillers: int = 16
    first_token: int = 0

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes out of range, fewer possible keys than keys, or too short a sequence: what is needed
            and what was given are named.
        """
        positive = ("length", "num_keys", "num_queries", "key_length", "value_length", "key_tokens", "value_tokens")
        require_at_least("MultiKeyRecall", 1, **{name: getattr(self, name) for name in positive})
        require_at_least("MultiKeyRecall", 1, num_fillers=self.num_fillers)
        require_at_least("MultiKeyRecall", 0, gap=self.gap, first_token=self.first_token)
        if self.num_queries > self.num_keys:
            raise ValueError(
                f"MultiKeyRecall asks for each key at most once, got num_queries={self.num_queries} and num_keys="
                f"{self.num_keys}"
            )
        if self.key_tokens**self.key_length < self.num_keys:
            raise ValueError(
                f"MultiKeyRecall: {self.key_tokens} tokens make only {self.key_tokens**self.key_length} keys of "
                f"length {self.key_length}, but num_keys={self.num_keys}"
            )
        needed = (self.num_keys + self.num_queries) * self.pair_length + self.gap
        if self.length + 1 < needed:
            raise ValueError(
                f"MultiKeyRecall: {self.num_keys} pairs, a gap of {self.gap} and {self.num_queries} queries take "
                f"{needed} tokens, but length={self.length} leaves room for {self.length + 1}"
            )

    @property
    def pair_length(self) -> int:
        """Tokens of a key and its value."""
        return self.key_length + self.value_length

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return self.first_token + self.num_fillers + self.key_tokens + self.value_tokens

    def sample(self, rng: np.random.Generator, count: int, filler: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """A batch.

        Args:
          rng: source of randomness.
          count: B.
          filler: integers ``[B, T + 1]``, what stands wherever no key or value does (text, say); default random
            filler tokens.

        Returns:
          "inputs" and "targets", int32 ``[B, T]``, and "weights", float32 ``[B, T]``, 1 where the target is a token
          of an answer.

        Raises:
          ValueError: ``filler`` has another shape.
        """
        total = self.length + 1
        if filler is None:
            filler = rng.integers(self.first_token, self.first_token + self.num_fillers, (count, total))
        if np.shape(filler) != (count, total):
            raise ValueError(f"filler must be [{count}, {total}], got {list(np.shape(filler))}")
        tokens = np.array(filler, np.int32)
        pairs = np.concatenate([self._keys(rng, count), self._values(rng, count)], axis=2)  # [B, keys, pair_length]

        # Starts of the pairs: as many of the haystack's free places, a pair taking one of them.
        queries_start = total - self.num_queries * self.pair_length
        haystack = queries_start - self.gap
        free = haystack - self.num_keys * (self.pair_length - 1)
        places = np.sort(choose(rng, count, free, self.num_keys), axis=1)
        starts = places + np.arange(self.num_keys) * (self.pair_length - 1)
        offsets = np.arange(self.pair_length)
        rows = np.arange(count)[:, None, None]
        tokens[rows, starts[:, :, None] + offsets] = pairs

        asked = choose(rng, count, self.num_keys, self.num_queries)
        query_starts = queries_start + np.arange(self.num_queries) * self.pair_length
        tokens[:, queries_start:] = pairs[np.arange(count)[:, None], asked].reshape(count, -1)

        weights = np.zeros((count, self.length), np.float32)
        answers = query_starts[:, None] + self.key_length + np.arange(self.value_length)
        weights[:, answers.ravel() - 1] = 1
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

    def _keys(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Different keys in every row, ``[B, keys, key_length]``."""
        codes = choose(rng, count, self.key_tokens**self.key_length, self.num_keys)
        digits = codes[..., None] // self.key_tokens ** np.arange(self.key_length) % self.key_tokens
        return self.first_token + self.num_fillers + digits

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        shape = (count, self.num_keys, self.value_length)
        return self.first_token + self.num_fillers + self.key_tokens + rng.integers(0, self.value_tokens, shape)
