"""Asks an answerer a plan's questions."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.evaluation.answering import Answerer
from iha_jax.evaluation.ruler.tasks import TASKS, WITHOUT_DEPTH, samples


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
      tasks: names in `iha_jax.evaluation.ruler.TASKS`.
      lengths: in tokens, prompt and answer together.
      samples: questions of each task and length; the published tables have 500.
      depths: per cent of the haystack, which questions take in turn; empty for depths drawn at random, as published.
        Tasks that ask about the whole text have none.
      seed: of everything random.
      haystack: a text file with the prose; None for the standard library's.
      batch_size: questions given to the answerer at once.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (4096,)
    samples: int = 20
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    seed: int = 0
    haystack: str | None = None
    batch_size: int = 8

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: unknown tasks, depths outside 0 … 100, or sizes below 1.
        """
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ValueError(f"unknown tasks {unknown}: expected some of {', '.join(TASKS)}")
        for name, sizes in (("lengths", self.lengths), ("samples", [self.samples]), ("batch_size", [self.batch_size])):
            if wrong := [size for size in sizes if size < 1]:
                raise ValueError(f"{name} must be at least 1, got {wrong[0]}")
        if not self.tasks or not self.lengths:
            raise ValueError(f"a plan needs tasks and lengths, got {list(self.tasks)} and {list(self.lengths)}")
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 100]:
            raise ValueError(f"depths are per cent, 0 to 100, got {wrong[0]:g}")


@dataclasses.dataclass(frozen=True)
class Record:
    """A question's outcome.

    Attributes:
      task: its name.
      length: L in tokens.
      depth: asked for, in per cent; None where it was drawn or there is none.
      index: number of the question.
      tokens: of the prompt.
      references: what the answer had to contain.
      answer: as given.
      score: share of the references in it, 0 … 1.
    """

    task: str
    length: int
    depth: float | None
    index: int
    tokens: int
    references: tuple[str, ...]
    answer: str
    score: float


def evaluate(
    answer: Answerer, tokenizer: Tokenizer, plan: Plan, progress: Callable[[str], None] = lambda line: None
) -> list[Record]:
    """All of a plan's questions, answered and scored.

    Args:
      answer: what is measured.
      tokenizer: that lengths are measured with.
      plan: what is asked.
      progress: takes a line for every task and length.

    Raises:
      ValueError: a length that a task's shortest question doesn't fit in, before anything is asked at it.
    """
    records = []
    for task in plan.tasks:
        depths = () if task in WITHOUT_DEPTH else plan.depths
        for length in plan.lengths:
            asked = list(
                samples(
                    task,
                    tokenizer,
                    length,
                    plan.samples,
                    depths=depths,
                    seed=plan.seed,
                    haystack=plan.haystack,
                )
            )
            answers: list[str] = []
            for start in range(0, len(asked), plan.batch_size):
                batch = asked[start : start + plan.batch_size]
                room = max(sample.answer_tokens for sample in batch)
                answers += answer([sample.text for sample in batch], max_new_tokens=room)
            found = [
                Record(
                    task,
                    length,
                    sample.depth if depths else None,
                    sample.index,
                    sample.tokens,
                    sample.references,
                    text,
                    sample.score(text),
                )
                for sample, text in zip(asked, answers, strict=True)
            ]
            records += found
            progress(f"{task}, {length} tokens: {100 * mean(record.score for record in found):.1f}")
    return records


def mean(values: Iterable[float]) -> float:
    """NaN for none."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def averaged(
    records: Sequence[Record], key: Callable[[Record], tuple], among: Callable[[Record], bool] = lambda record: True
) -> dict[tuple, float]:
    """Mean scores, 0 … 100, of the records that share a key, in order of their first appearance."""
    groups: dict[tuple, list[float]] = {}
    for record in filter(among, records):
        groups.setdefault(key(record), []).append(100 * record.score)
    return {group: mean(scores) for group, scores in groups.items()}
