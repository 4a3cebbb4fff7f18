"""Needles in a haystack: RULER's eight retrieval tasks (arXiv 2404.06654, table 2)."""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Literal

import numpy as np

from iha_jax.data.words import compound_words
from iha_jax.evaluation.ruler.haystacks import NOISE, Essay, noise_words, placed
from iha_jax.evaluation.ruler.samples import Draft

Kind = Literal["word", "number", "uuid"]

# The published prompt, which scores depend on; with one value asked for it stands in the singular.
_PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
_PROMPT_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_PREFIX_ONE = " The special magic {kind} for {query} mentioned in the provided text is"
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."

DEPTHS = tuple(float(depth) for depth in np.linspace(0, 100, 40))
"""Per cent of the haystack at which needles are hidden, unless a depth is asked for."""


@dataclasses.dataclass(frozen=True)
class Needles:
    """One of the tasks.

    Attributes:
      haystack: a line of noise over and over, prose, or needles that nobody asks about, one a line.
      key: what a needle is asked for by.
      value: what it says.
      keys: different keys among the needles proper.
      values: needles of each key, that is values.
      queries: keys asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "word"
    value: Kind = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    answer_tokens = 128

    def draft(self, rng: np.random.Generator, units: int, filler: int, depth: float | None, essay: Essay) -> Draft:
        """A question.

        Args:
          rng: source of randomness; new ones of the same seed give the same needles, whatever the length.
          units: lines of noise, words of prose or distracting needles.
          filler: words of noise after a haystack of lines that is still too short.
          depth: per cent of the haystack before the first needle asked about, the others at the places nearest to it;
            None for places drawn at random.
          essay: the prose.
        """
        asked_places, other_places = self._depths(rng, depth)
        key_rng, value_rng = rng.spawn(2)
        if self.haystack == "essay":
            sentences, joint = essay.first(units), " "
        else:
            sentences, joint = [NOISE] * units, "\n"
        # Drawn in one row, the needles proper first: longer haystacks have the same ones, and no two are alike.
        proper, distractors = self.keys * self.values, units if self.haystack == "needles" else 0
        text = " ".join(sentences).lower() if self.haystack == "essay" else ""
        keys = _draw(key_rng, self.key, self.keys + distractors, text)
        values = _draw(value_rng, self.value, proper + distractors, text)
        if self.haystack == "needles":
            sentences = [self._needle(k, v) for k, v in zip(keys[self.keys :], values[proper:], strict=True)]
        sentences += [noise_words(filler)] if filler else []

        by_key = {key: values[i * self.values : (i + 1) * self.values] for i, key in enumerate(keys[: self.keys])}
        asked = keys[: self.queries]
        references = tuple(value for key in asked for value in by_key[key])
        others = [(key, value) for key in keys[self.queries : self.keys] for value in by_key[key]]
        statements = [(key, value) for key in asked for value in by_key[key]]
        needles = [
            (place, self._needle(key, value))
            for place, (key, value) in zip((*asked_places, *other_places), statements + others, strict=True)
        ]
        query = _listed(asked)
        one = len(references) == 1
        kind = self.value if one else f"{self.value}s"
        context = joint.join(placed(sentences, needles))
        return Draft(
            (_PROMPT_ONE if one else _PROMPT).format(kind=kind, context=context, query=query),
            (_PREFIX_ONE if one else _PREFIX).format(kind=kind, query=query),
            references,
            asked_places,
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.value, key=key, value=value)

    def _depths(self, rng: np.random.Generator, depth: float | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Places of what is asked about and of the rest, drawn without replacement."""
        asked, rest = self.queries * self.values, (self.keys - self.queries) * self.values
        if depth is None:
            drawn = [DEPTHS[i] for i in rng.choice(len(DEPTHS), asked + rest, replace=False)]
            return tuple(drawn[:asked]), tuple(drawn[asked:])
        near = sorted(DEPTHS, key=lambda place: abs(place - depth))
        drawn = asked + rng.choice(len(near) - asked, rest, replace=False)
        return (depth, *near[1:asked]), tuple(near[i] for i in drawn)


TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuid"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
"""By their published names."""


def _draw(rng: np.random.Generator, kind: Kind, count: int, text: str) -> list[str]:
    """Different words, 7-digit numbers or version-4 UUIDs that a text hasn't got; fewer are the first of more."""
    found: dict[str, None] = {}
    words = compound_words(rng) if kind == "word" else None
    while len(found) < count:
        if words is not None:
            made = next(words, "")
            if not made:
                raise ValueError(
                    f"a haystack has room for {count} keys, but there are only {len(found)} words for them"
                )
        else:
            made = (
                str(rng.integers(10**6, 10**7)) if kind == "number" else str(uuid.UUID(bytes=rng.bytes(16), version=4))
            )
        if made not in text:
            found[made] = None
    return list(found)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"
