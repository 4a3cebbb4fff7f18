"""Needles in a haystack of words, small enough to train on: the word-level kin of RULER's multi-key task."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from iha_jax.data.tasks.stream import choose, require_at_least
from iha_jax.data.words import ADJECTIVES, NOUNS


@dataclasses.dataclass(frozen=True)
class NeedleInHaystack:
    """Next-token prediction, where a token is a word, on filler with sentences in it that are asked about at the end.

        calm tidy anchor 7 . able dark cabin 12 . brave …  ? cabin 12
                                                                   ^^ only the answer carries weight

    A sequence has ``length + 1`` words (inputs are all but the last, targets all but the first). A needle is
    ``KEY VALUE .`` with ``value_length`` words of value, a question ``? KEY VALUE``. Keys of a sequence differ from
    each other, and so do values: who knows the values but not whose they are is right once in ``num_needles`` times.
    Needles never overlap; every choice of places for them is equally likely.

    Attributes:
      length: T, words of inputs and targets.
      num_needles: needles in the haystack.
      num_questions: keys asked for, each time any of them.
      value_length: words of a value.
      key_words: different keys.
      value_words: different words that values are made of; they are numbers.
      filler_words: different words of the haystack.
    """

    length: int
    num_needles: int = 4
    num_questions: int = 1
    value_length: int = 1
    key_words: int = 32
    value_words: int = 16
    filler_words: int = 32

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes out of range, more words than the lists have, or too short a sequence; what is needed and
            what was given are named.
        """
        require_at_least("NeedleInHaystack", 1, **dataclasses.asdict(self))
        for name, value, most in (
            ("num_needles", self.num_needles, self.key_words),
            ("key_words", self.key_words, len(NOUNS)),
            ("filler_words", self.filler_words, len(ADJECTIVES)),
        ):
            if value > most:
                raise ValueError(f"NeedleInHaystack has room for {name} <= {most}, got {name}={value}")
        if self.num_needles > self.value_words**self.value_length:
            raise ValueError(
                f"NeedleInHaystack: {self.value_words} words make only {self.value_words**self.value_length} values of "
                f"length {self.value_length}, but num_needles={self.num_needles}"
            )
        needed = self.num_needles * self.needle_length + self._questions_length
        if self.length + 1 < needed:
            raise ValueError(
                f"NeedleInHaystack: {self.num_needles} needles and {self.num_questions} questions take {needed} words, "
                f"but length={self.length} leaves room for {self.length + 1}"
            )

    @functools.cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The word of every token: ``.`` and ``?``, then filler, keys and values."""
        numbers = tuple(str(number) for number in range(self.value_words))
        return (".", "?", *ADJECTIVES[: self.filler_words], *NOUNS[: self.key_words], *numbers)

    @property
    def vocab_size(self) -> int:
        """Different tokens."""
        return len(self.vocabulary)

    @property
    def needle_length(self) -> int:
        """Words of a needle."""
        return self.value_length + 2

    @property
    def _questions_length(self) -> int:
        return self.num_questions * (self.value_length + 2)

    def text(self, tokens: Sequence[int]) -> str:
        """The words of some tokens, a space between them."""
        return " ".join(self.vocabulary[token] for token in tokens)

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """A batch.

        Args:
          rng: source of randomness.
          count: B.

        Returns:
          "inputs" and "targets", int32 ``[B, T]``, and "weights", float32 ``[B, T]``, 1 where the target is a word of
          an answer.
        """
        full_stop, question_mark, first_filler = range(3)
        first_key = first_filler + self.filler_words
        first_value = first_key + self.key_words
        total, rows = self.length + 1, np.arange(count)[:, None]
        tokens = rng.integers(first_filler, first_key, (count, total)).astype(np.int32)
        keys = first_key + choose(rng, count, self.key_words, self.num_needles)[:, :, None]
        codes = choose(rng, count, self.value_words**self.value_length, self.num_needles)[:, :, None]
        values = first_value + codes // self.value_words ** np.arange(self.value_length) % self.value_words

        def every(token: int) -> np.ndarray:
            return np.full(keys.shape, token)

        needles = np.concatenate([keys, values, every(full_stop)], axis=2)  # [B, needles, needle_length]
        # As many places as the haystack has with each needle taking but one.
        haystack = total - self._questions_length
        free = haystack - self.num_needles * (self.needle_length - 1)
        places = np.sort(choose(rng, count, free, self.num_needles), axis=1)
        starts = places + np.arange(self.num_needles) * (self.needle_length - 1)
        tokens[rows[:, :, None], starts[:, :, None] + np.arange(self.needle_length)] = needles

        questions = np.concatenate([every(question_mark), keys, values], axis=2)
        asked = rng.integers(0, self.num_needles, (count, self.num_questions))
        tokens[:, haystack:] = questions[rows, asked].reshape(count, -1)

        weights = np.zeros((count, self.length), np.float32)
        question_starts = haystack + np.arange(self.num_questions) * (self.value_length + 2)
        answers = question_starts[:, None] + 2 + np.arange(self.value_length)
        weights[:, answers.ravel() - 1] = 1
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
