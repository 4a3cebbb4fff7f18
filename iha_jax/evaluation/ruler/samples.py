"""A question about a long text, how its answer is scored, and how its length is made exact."""

import dataclasses
from collections.abc import Callable, Sequence

from iha_jax.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question before its length is known.

    Attributes:
      prompt: instruction, text and question.
      answer_prefix: what the answer begins with.
      references: what the answer must contain.
      depths: of what is asked about, in the order of ``references``: per cent of the haystack's characters before it.
        Empty where the answer stands everywhere.
    """

    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    depths: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A question of a given length.

    Attributes:
      task: its name, as ``"niah_multikey_1"``.
      length: L, the limit in tokens for prompt, answer prefix and answer.
      index: its number among the task's samples of this length.
      prompt: instruction, text and question.
      answer_prefix: what the answer begins with; a model goes on with ``text``.
      references: what the answer must contain.
      depths: as asked for, per cent of the haystack before each reference's statement, 0 … 100; empty for the tasks
        that ask about the whole text.
      tokens: of prompt and answer prefix, the start of document included if the tokenizer has one.
      answer_tokens: room for the answer; ``tokens + answer_tokens <= length``.
    """

    task: str
    length: int
    index: int
    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    depths: tuple[float, ...]
    tokens: int
    answer_tokens: int

    @property
    def text(self) -> str:
        """What a model goes on with."""
        return self.prompt + self.answer_prefix

    @property
    def depth(self) -> float | None:
        """Of the first thing asked about, None for tasks without depths."""
        return self.depths[0] if self.depths else None

    def score(self, answer: str) -> float:
        """As `score`."""
        return score(answer, self.references)


def score(answer: str, references: Sequence[str]) -> float:
    """The share of the references that stand in an answer, whatever their case: 0 … 1."""
    answer = answer.lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a prompt as models read it, that is after the start of document."""
    return len(tokenizer.encode(text)) + (tokenizer.bos_id is not None)


def fit(draft: Callable[[int, int], Draft], tokenizer: Tokenizer, limit: int, what: str) -> tuple[Draft, int]:
    """The longest draft of at most ``limit`` tokens.

    The haystack first grows by whole units; what is left is filled with words that say nothing.

    Args:
      draft: (units of the haystack, words of filler) → the draft; tokens grow with both.
      tokenizer: that measures.
      limit: tokens of prompt and answer prefix.
      what: the task and its length, for the message.

    Returns:
      The draft and its tokens.

    Raises:
      ValueError: not even the shortest haystack fits.
    """

    def made(units: int, filler: int) -> tuple[Draft, int]:
        one = draft(units, filler)
        return one, count_tokens(tokenizer, one.prompt + one.answer_prefix)

    best, tokens = made(0, 0)
    if tokens > limit:
        raise ValueError(f"{what}: the shortest prompt has {tokens} tokens, but only {max(limit, 0)} are left for it")
    units, best, tokens = _largest(lambda n: made(n, 0), best, tokens, limit, guess=max(1, limit // 8))
    _, best, tokens = _largest(lambda n: made(units, n), best, tokens, limit, guess=8)
    return best, tokens


def _largest(
    made: Callable[[int], tuple[Draft, int]], best: Draft, tokens: int, limit: int, guess: int
) -> tuple[int, Draft, int]:
    """The largest number whose draft fits, that draft and its tokens; ``best`` is what 0 makes."""
    low, high, start, tries = 0, None, tokens, 0
    while high is None or high - low > 1:
        draft, found = made(guess)
        if found <= limit:
            if found <= tokens and guess > low and high is None:
                return low, best, tokens  # more of it adds nothing
            low, best, tokens = guess, draft, found
        else:
            high = guess
        # Where the limit would be if every unit had as many tokens; every third time the middle, so that it ends soon.
        tries += 1
        slope = max((found - start) / guess, 1e-3)
        guess = low + max(1, int((limit - tokens) / slope))
        if high is not None:
            guess = (low + high) // 2 if tries % 3 == 0 else min(max(guess, low + 1), high - 1)
    return low, best, tokens
