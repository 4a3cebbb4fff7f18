"""Documents by index: what every source of text answers.

A source answers ``len()`` and ``[i]``, so that shuffling, slicing per process and resuming need no scan. What
can't be read is a counted skip: ``[i]`` gives None and ``skipped`` says why.
"""

import abc
import collections
import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from iha_jax.data.chat import conversation_of

_LOG = logging.getLogger(__name__)


class Documents(abc.ABC):
    """Texts by index; None stands for one that was skipped.

    Attributes:
      skipped: reason → how many of the documents read so far were skipped for it.
    """

    def __init__(self):
        self._skipped: dict[str, set[int]] = collections.defaultdict(set)
        self._lock = threading.Lock()

    @property
    def skipped(self) -> dict[str, int]:
        """Reason → number of documents, each counted once however often it was read."""
        with self._lock:
            return {reason: len(indices) for reason, indices in sorted(self._skipped.items())}

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many documents there are, those that will be skipped included."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> str | None:
        """The text of a document, or None where it is skipped."""

    @abc.abstractmethod
    def sizes(self) -> np.ndarray:
        """Stored bytes of every document, int64 [len(self)], for dividing work evenly."""

    def select(self, start: int, stop: int) -> "Documents":
        """The documents start … stop − 1, cheap to send to another process."""
        return _Range(self, start, stop)

    def skip(self, index: int, reason: str, where: str) -> None:
        """Counts document ``index`` as left out; the first for a reason is also logged, with its place."""
        with self._lock:
            first = reason not in self._skipped
            self._skipped[reason].add(index)
        if first and reason != "empty":
            _LOG.warning("skipping a document (%s) at %s; further ones are only counted", reason, where)

    def text_or_skip(self, index: int, text: Any, field: str | None, where: str) -> str | None:
        """The text found in a record's field, or a skip; of a whole record (no field) its conversation, as JSON."""
        if field is None:
            try:
                return json.dumps(conversation_of(text), ensure_ascii=False)
            except ValueError as error:
                self.skip(index, str(error), where)
                return None
        if isinstance(text, str) and text.strip():
            return text
        empty = text is None or isinstance(text, str)
        self.skip(index, "empty" if empty else f"{field!r} isn't text", where)
        return None

    def __getstate__(self):
        state = dict(vars(self))
        state.pop("_lock")
        return state

    def __setstate__(self, state: dict[str, Any]):
        vars(self).update(state)
        self._lock = threading.Lock()


class _Range(Documents):
    """A stretch of another source."""

    def __init__(self, parent: Documents, start: int, stop: int):
        super().__init__()
        self._parent, self._start, self._stop = parent, start, stop

    @property
    def skipped(self) -> dict[str, int]:
        return self._parent.skipped

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> str | None:
        return self._parent[self._start + index]

    def sizes(self) -> np.ndarray:
        return self._parent.sizes()[self._start : self._stop]


class Concatenated(Documents):
    """Several sources one after the other."""

    def __init__(self, parts: Sequence[Documents]):
        super().__init__()
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def skipped(self) -> dict[str, int]:
        """The parts' counts, added."""
        total: collections.Counter[str] = collections.Counter()
        for part in self._parts:
            total.update(part.skipped)
        return dict(sorted(total.items()))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str | None:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]

    def sizes(self) -> np.ndarray:
        """The parts' sizes."""
        return np.concatenate([part.sizes() for part in self._parts])


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split: a function of its text, so copies stay together."""
    digest = hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64
