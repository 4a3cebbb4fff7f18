"""Text to hide things in: prose, a line that says nothing, and where in it a sentence goes."""

import functools
import inspect
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from iha_jax.data.sources import stdlib_paths

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The published line of noise."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# Found by their quotes, a hundred times as fast as by parsing; a string that isn't documentation rarely reads as prose.
_LONG_STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_NOT_PROSE = re.compile(r"^[ *+>-]|[_={}\[\]<>\\|@#$%~^]|::|\.\.\.|\(\)", re.MULTILINE)
_LONGEST_SENTENCE = 60
"""Words; longer stretches without an end, as in lists, are cut, so that a depth can be met anywhere."""


class Essay:
    """Prose as sentences, from its beginning and, where it is too short, round again."""

    def __init__(self, sentences: Iterable[str]):
        """Takes the sentences when they are needed.

        Args:
          sentences: without line ends; read as far as texts asked for go.
        """
        self._more, self._sentences = iter(sentences), []

    def first(self, words: int) -> list[str]:
        """The first so many words, in sentences; the last may be cut short.

        Raises:
          ValueError: there is not a single word.
        """
        found = []
        for sentence in self._endless():
            if words <= 0:
                break
            found.append(" ".join(sentence[:words]))
            words -= len(sentence)
        return found

    def _endless(self) -> Iterator[list[str]]:
        for index in itertools.count():
            if index == len(self._sentences):
                following = next(self._more, None)
                if following is None:
                    break
                self._sentences.append(following.split())
            yield self._sentences[index]
        if not self._sentences:
            raise ValueError("the haystack's text has no words")
        yield from itertools.cycle(self._sentences)


@functools.lru_cache(maxsize=4)
def load_essay(path: str | None = None) -> Essay:
    """Prose to hide needles in.

    Args:
      path: a UTF-8 text file; None takes prose of the running interpreter's own documentation strings.

    Raises:
      FileNotFoundError: there is no such file.
    """
    if path is None:
        return Essay(sentence for paragraph in _library_prose() for sentence in _sentences(paragraph))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no haystack at {path!r}: expected a text file")
    with open(path, encoding="utf-8", errors="replace") as file:
        return Essay(_sentences(file.read()))


def placed(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Sentences with others among them, each at the end of a sentence nearest to its depth.

    Args:
      sentences: the haystack.
      needles: (depth in per cent of the haystack's characters, sentence); those of equal depth keep their order.
    """
    ends = np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)])
    result = list(sentences)
    # From the end, so that earlier places stay what they are.
    for depth, needle in sorted(needles, key=lambda pair: pair[0])[::-1]:
        place = int(np.abs(ends - depth / 100 * ends[-1]).argmin())
        result.insert(place, needle)
    return result


def noise_words(count: int) -> str:
    """The first words of the endless repetition of the noise line."""
    return " ".join(itertools.islice(itertools.cycle(NOISE.split()), count))


def _sentences(text: str) -> Iterator[str]:
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST_SENTENCE):
            yield " ".join(words[start : start + _LONGEST_SENTENCE])


def _library_prose() -> Iterator[str]:
    """Paragraphs of documentation strings that read as prose, in the order of files, each once."""
    seen: set[str] = set()
    for path in stdlib_paths():
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in _LONG_STRING.findall(file.read()):
                for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
                    if paragraph not in seen and _is_prose(paragraph):
                        seen.add(paragraph)
                        yield paragraph


def _is_prose(paragraph: str) -> bool:
    text = paragraph.strip()
    if len(text) < 60 or not text[0].isupper() or text[-1] != "." or text.count(" ") < 11 or _NOT_PROSE.search(text):
        return False
    return sum(map(str.isalpha, text)) >= 0.75 * len(text)
