"""Scores of several samples of one problem: votes, means, and the chance that one of k is right."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

Answer = Hashable | None
"""A canonical answer: equal answers are equal values. None is no answer."""


def majority(answers: Sequence[Answer]) -> Answer:
    """The answer given most often; of several, the one seen first.

    None, no answer, never votes: it wins only where there is nothing else.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    # A counter keeps the order of first appearance, and max takes the first of equals.
    return max(votes, key=votes.__getitem__, default=None)


def majority_at(answers: Sequence[Answer], right: Sequence[bool], k: int) -> float:
    """Maj@k: whether the majority of the first k samples is right, 0 or 1.

    Args:
      answers: canonical, of the samples in their order.
      right: whether each of them is.
      k: at least 1 and at most as many as there are.

    Raises:
      ValueError: k is out of range, or there are more or fewer answers than judgements.
    """
    _check(len(answers), len(right), k)
    winner = majority(answers[:k])
    return float(winner is not None and right[list(answers).index(winner)])


def mean_at(right: Sequence[bool], k: int) -> float:
    """mean@k: the share of the first k samples that are right.

    Args:
      right: whether each sample is.
      k: at least 1 and at most as many as there are.

    Raises:
      ValueError: k is out of range.
    """
    _check(len(right), len(right), k)
    return sum(right[:k]) / k


def pass_at(samples: int, right: int, k: int) -> float:
    """pass@k without bias (arXiv 2107.03374): the chance that some of k samples, drawn from these, is right.

    ``1 - C(n - c, k) / C(n, k)`` for c right ones of n, in exact integers until the last division.

    Args:
      samples: n.
      right: c, at most n.
      k: at least 1 and at most n.

    Raises:
      ValueError: k or ``right`` is out of range.
    """
    _check(samples, samples, k)
    if not 0 <= right <= samples:
        raise ValueError(f"of {samples} samples 0 to {samples} can be right, got {right}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def grouped(answers: Sequence[Answer], same: Callable[[Hashable, Hashable], bool]) -> list[Answer]:
    """Answers by the first that means the same, so that votes for one number written in two ways add up.

    Args:
      answers: None stays None.
      same: whether two answers mean the same.
    """
    seen: list[Hashable] = []
    result: list[Answer] = []
    for answer in answers:
        if answer is None:
            result.append(None)
            continue
        known = answer if answer in seen else next((other for other in seen if same(other, answer)), None)
        if known is None:
            seen.append(answer)
            known = answer
        result.append(known)
    return result


def _check(count: int, judged: int, k: int) -> None:
    if count != judged:
        raise ValueError(f"every answer needs a judgement, got {count} answers and {judged} judgements")
    if not 1 <= k <= count:
        raise ValueError(f"k must be in 1 … {count}, the number of samples, got {k}")
