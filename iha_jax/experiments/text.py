"""Text as one long row of tokens for training and one held out, from which windows are cut."""

import dataclasses
import functools
import hashlib
import math

import numpy as np

from iha_jax.data import Bigram, SourceConfig, load_tokenizer
from iha_jax.data.documents import is_held_out
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import document_ids


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The documents of a source, one after the other, each with the tokenizer's start and end.

    Attributes:
      train: int32 ``[tokens]``.
      held_out: likewise, of documents that ``train`` has none of.
      bytes_per_token: UTF-8 bytes of the held-out documents over their tokens.
      vocab_size: of the tokenizer.
      fingerprint: of all tokens; two runs read the same text if it is the same.
    """

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float
    vocab_size: int
    fingerprint: str

    def windows(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Stretches of the training text at random places, int32 ``[count, length]``."""
        return _cut(self.train, rng.integers(0, len(self.train) - length + 1, count), length)

    def held_out_windows(self, count: int, length: int) -> np.ndarray:
        """Stretches of the held-out text, evenly spaced, int32 ``[count, length]``."""
        return _cut(self.held_out, np.linspace(0, len(self.held_out) - length, count).astype(np.int64), length)

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A loss in a unit that doesn't depend on the tokenizer."""
        return nats_per_token / math.log(2) / self.bytes_per_token

    @functools.cached_property
    def bigram(self) -> Bigram | None:
        """Which token follows which in the training text; None if the vocabulary is too large for a table."""
        if self.vocab_size > 2048:
            return None
        return Bigram.fit([{"inputs": self.train[:-1], "targets": self.train[1:]}], self.vocab_size)


@functools.lru_cache(maxsize=2)
def load_text(source: SourceConfig, tokenizer: str, held_out_fraction: float, length: int) -> Text:
    """Reads a source whole.

    Args:
      source: of documents, not of packed rows.
      tokenizer: as in `DataConfig`.
      held_out_fraction: share of the documents, chosen by a hash of their text.
      length: tokens that windows will have.

    Raises:
      ValueError: a part is shorter than a window.
    """
    loaded, documents = load_tokenizer(tokenizer), open_documents(source)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    size = 0
    for index in range(len(documents)):
        text = documents[index]
        if text is None:
            continue
        held_out = is_held_out(text, held_out_fraction)
        parts[held_out].append(document_ids(loaded, text))
        size += len(text.encode("utf-8", errors="surrogatepass")) if held_out else 0
    train, held = (np.concatenate([np.zeros(0, np.int32), *parts[is_held]]) for is_held in (False, True))
    for name, tokens in (("training", train), ("held-out", held)):
        if len(tokens) < length:
            raise ValueError(
                f"the {name} text of the source {source.kind} {source.path!r} has {len(tokens)} tokens, but a window "
                f"takes {length}: give more text, or another held_out_fraction than {held_out_fraction}"
            )
    digest = hashlib.blake2b(train.tobytes(), digest_size=8)
    digest.update(held.tobytes())
    return Text(train, held, size / len(held), loaded.vocab_size, digest.hexdigest())


def _cut(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(length)]
