"""The tasks by name, and their samples at any length for any tokenizer."""

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.evaluation.ruler import aggregation, needles
from iha_jax.evaluation.ruler.haystacks import Essay, load_essay
from iha_jax.evaluation.ruler.samples import Draft, Sample, count_tokens, fit


class Task(Protocol):
    """What makes questions.

    Attributes:
      answer_tokens: the published room for an answer.
    """

    @property
    def answer_tokens(self) -> int: ...  # noqa: D102
    def draft(self, rng: np.random.Generator, units: int, filler: int, depth: float | None, essay: Essay) -> Draft:
        """A question with a haystack of so many units, and words of filler after them."""
        ...


TASKS: dict[str, Task] = {**needles.TASKS, **aggregation.TASKS}
"""RULER's synthetic tasks by their published names."""

_SHORT: dict[str, Task] = {"cwe": aggregation.CommonWords(common_repeats=6, other_repeats=1)}
"""Forms for lengths that the others don't fit in; the published one is for those below 4,096 tokens."""

WITHOUT_DEPTH = ("cwe", "fwe")
"""Tasks that ask about the whole text."""


def samples(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    count: int,
    *,
    depths: Sequence[float | None] = (None,),
    seed: int = 0,
    haystack: str | None = None,
) -> Iterator[Sample]:
    """Questions of one task and length; number i depends on these arguments and i alone, not on ``count``.

    Args:
      task: a name in `TASKS`.
      tokenizer: that lengths are measured with.
      length: L, tokens of prompt, answer prefix and answer.
      count: how many.
      depths: taken in turn, per cent of the haystack before what is asked about; None for places drawn at random
        from 40 equally spaced ones, as published.
      seed: of everything random, at least 0.
      haystack: a text file with the prose; None for the standard library's.

    Raises:
      ValueError: an unknown task, a depth outside 0 … 100, or a length that its shortest question doesn't fit in.
      FileNotFoundError: there is no such haystack.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join(TASKS)}")
    if wrong := [depth for depth in depths if depth is not None and not 0 <= depth <= 100]:
        raise ValueError(f"depths are per cent, 0 to 100, got {wrong[0]:g}")
    for index in range(count):
        depth = depths[index % len(depths)] if depths else None
        yield _sample(task, tokenizer, length, index, depth, seed, load_essay(haystack))


def _sample(
    name: str, tokenizer: Tokenizer, length: int, index: int, depth: float | None, seed: int, essay: Essay
) -> Sample:
    entropy = [seed, zlib.crc32(name.encode()), length, index]
    draft = functools.partial(_draft, TASKS[name], entropy, depth=depth, essay=essay)
    # Bytes and other small tokens may need more than the published room for the references alone.
    shortest = draft(0, 0)
    room = max(TASKS[name].answer_tokens, len(tokenizer.encode(" " + ", ".join(shortest.references))) + 8)
    if name in _SHORT and count_tokens(tokenizer, shortest.prompt + shortest.answer_prefix) > length - room:
        draft = functools.partial(_draft, _SHORT[name], entropy, depth=depth, essay=essay)
    one, tokens = fit(draft, tokenizer, length - room, f"{name} at length {length} (less {room} for the answer)")
    return Sample(name, length, index, one.prompt, one.answer_prefix, one.references, one.depths, tokens, room)


def _draft(task: Task, entropy: list[int], units: int, filler: int, *, depth: float | None, essay: Essay) -> Draft:
    return task.draft(np.random.default_rng(entropy), units, filler, depth, essay)
