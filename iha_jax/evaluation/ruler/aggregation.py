"""Tasks about a whole text: variable tracking, and the most common of many words (arXiv 2404.06654, table 2)."""

import dataclasses
import itertools
import string

import numpy as np

from iha_jax.data.words import compound_words
from iha_jax.evaluation.ruler.haystacks import NOISE, Essay, noise_words, placed
from iha_jax.evaluation.ruler.needles import DEPTHS
from iha_jax.evaluation.ruler.samples import Draft


@dataclasses.dataclass(frozen=True)
class VariableTracking:
    """A chain of assignments in noise; all variables that end up with its value are asked for.

    Attributes:
      hops: assignments of a variable to the next, after the first of a number.
    """

    hops: int = 4

    answer_tokens = 30

    def draft(self, rng: np.random.Generator, units: int, filler: int, depth: float | None, essay: Essay) -> Draft:
        """A question.

        Args:
          rng: source of randomness.
          units: lines of noise.
          filler: words of noise after them.
          depth: per cent of the haystack before the first assignment, the others at the next places after it or, near
            the end, before them; None for places drawn at random, in the chain's order.
          essay: not used.
        """
        count = self.hops + 1
        if depth is None:
            places = sorted(DEPTHS[i] for i in rng.choice(len(DEPTHS), count, replace=False))
        else:
            after = [place for place in DEPTHS if place > depth]
            places = [depth, *after[: self.hops]]
            # What doesn't fit before the end stands at the end, in order.
            places += [100.0] * (count - len(places))
        value = str(rng.integers(10_000, 100_000))
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choice(list(string.ascii_uppercase), 5))] = None
        chain = list(names)
        statements = [f"VAR {chain[0]} = {value}"]
        statements += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain)]
        lines = [NOISE] * units + ([noise_words(filler)] if filler else [])
        context = "\n".join(placed(lines, list(zip(places, statements, strict=True))))
        return Draft(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{count} variables are assigned the value {value}, they are: ",
            tuple(chain),
            tuple(places),
        )


@dataclasses.dataclass(frozen=True)
class CommonWords:
    """A numbered list in which some words stand more often than all others; those are asked for.

    Attributes:
      common: words asked for.
      common_repeats: how often each of them stands in the list.
      other_repeats: how often every other word does; the last may stand there less often.
    """

    common: int = 10
    common_repeats: int = 30
    other_repeats: int = 3

    answer_tokens = 120

    def draft(self, rng: np.random.Generator, units: int, filler: int, depth: float | None, essay: Essay) -> Draft:
        """A question.

        Args:
          rng: source of randomness.
          units: places of the list that other words have.
          filler: not used: a place of the list is short.
          depth: not used: the answer stands everywhere.
          essay: not used.

        Raises:
          ValueError: there aren't so many words.
        """
        word_rng, order_rng = rng.spawn(2)
        others = -(-units // self.other_repeats)
        words = list(itertools.islice(compound_words(word_rng), self.common + others))
        if len(words) < self.common + others:
            raise ValueError(f"a list has room for {self.common + others} words, but there are only {len(words)}")
        asked = words[: self.common]
        listed = asked * self.common_repeats + (words[self.common :] * self.other_repeats)[:units]
        shuffled = [listed[i] for i in order_rng.permutation(len(listed))]
        context = " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, 1))
        return Draft(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{context}\n"
            f"Question: What are the {self.common} most common words in the above list?",
            f" Answer: The top {self.common} words that appear most often in the list are:",
            tuple(asked),
        )


@dataclasses.dataclass(frozen=True)
class FrequentWords:
    """Codes whose frequency falls with a power of their rank, dots being the first; the next ones are asked for.

    Attributes:
      asked: codes asked for: ranks 2 to ``asked + 1``.
      alpha: the power.
      codes: ranks there are.
      code_length: letters of a code.
      least: words of the shortest text, so that the ranks asked for differ in frequency.
    """

    asked: int = 3
    alpha: float = 2.0
    codes: int = 2000
    code_length: int = 6
    least: int = 60

    answer_tokens = 50

    def draft(self, rng: np.random.Generator, units: int, filler: int, depth: float | None, essay: Essay) -> Draft:
        """A question.

        Args:
          rng: source of randomness.
          units: words beyond the least.
          filler: dots after the text, each a word of its own.
          depth: not used: the answer stands everywhere.
          essay: not used.
        """
        code_rng, order_rng = rng.spawn(2)
        shares = np.arange(1, self.codes + 1, dtype=np.float64) ** -self.alpha
        counts = np.floor((self.least + units) * shares / shares.sum()).astype(int)
        names: dict[str, None] = {"...": None}
        while len(names) < np.count_nonzero(counts):
            names["".join(code_rng.choice(list(string.ascii_lowercase), self.code_length))] = None
        words = [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
        context = " ".join([words[i] for i in order_rng.permutation(len(words))] + ["..."] * filler)
        return Draft(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {context}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
            tuple(names)[1 : 1 + self.asked],
        )


TASKS = {"vt": VariableTracking(), "cwe": CommonWords(), "fwe": FrequentWords()}
"""By their published names."""
