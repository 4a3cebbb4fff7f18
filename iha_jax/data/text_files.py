"""Documents in text and JSONL files: byte ranges, found once and read when asked for."""

import json
import os
from collections.abc import Iterator, Sequence

import numpy as np

from iha_jax.data.documents import Documents

# A longer text file becomes several documents, so that no single one has to fit in memory with its tokens.
MAX_DOCUMENT_BYTES = 16 << 20
_SCAN_BYTES = 4 << 20


class _FileSpans(Documents):
    """Byte ranges of files: the common part of text and JSONL."""

    def __init__(self, paths: Sequence[str], files: np.ndarray, starts: np.ndarray, stops: np.ndarray):
        super().__init__()
        self._paths, self._files, self._starts, self._stops = tuple(paths), files, starts, stops

    def __len__(self) -> int:
        return len(self._starts)

    def sizes(self) -> np.ndarray:
        """Lengths of the spans."""
        return self._stops - self._starts

    def select(self, start: int, stop: int) -> "_FileSpans":
        """The documents start … stop − 1, with only their part of the index."""
        selected = type(self).__new__(type(self))
        files = self._files[start:stop]
        used, local = np.unique(files, return_inverse=True)
        paths = [self._paths[i] for i in used]
        _FileSpans.__init__(selected, paths, local, self._starts[start:stop], self._stops[start:stop])
        for name, value in vars(self).items():
            if name not in vars(selected):
                vars(selected)[name] = value
        return selected

    def where(self, index: int) -> str:
        """The place of a document, for messages."""
        return f"{self._paths[self._files[index]]}, byte {self._starts[index]}"

    def _read(self, index: int) -> bytes:
        start, stop = int(self._starts[index]), int(self._stops[index])
        with open(self._paths[self._files[index]], "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def _decode(self, index: int, data: bytes) -> str | None:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.skip(index, "not UTF-8", f"{self.where(index)} + {error.start}")
            return None


class TextFiles(_FileSpans):
    """One document a file; files above ``MAX_DOCUMENT_BYTES`` are cut at line ends."""

    def __init__(self, paths: Sequence[str], max_document_bytes: int = MAX_DOCUMENT_BYTES):
        spans = [(i, a, b) for i, path in enumerate(paths) for a, b in _text_spans(path, max_document_bytes)]
        super().__init__(paths, *np.asarray(spans, np.int64).reshape(-1, 3).T)

    def __getitem__(self, index: int) -> str | None:
        data = self._read(index)
        if not data.strip():
            self.skip(index, "empty", self.where(index))
            return None
        return self._decode(index, data)


class JsonLines(_FileSpans):
    """One document a line: the text under one key, or without a key the line's conversation."""

    def __init__(self, paths: Sequence[str], field: str | None, max_document_bytes: int = MAX_DOCUMENT_BYTES):
        self._field, self._max_document_bytes = field, max_document_bytes
        starts, stops = zip(*map(_line_spans, paths), strict=True)  # arrays: there may be hundreds of millions
        files = np.repeat(np.arange(len(paths)), [len(s) for s in starts])
        super().__init__(paths, files, np.concatenate(starts), np.concatenate(stops))

    def __getitem__(self, index: int) -> str | None:
        if self._stops[index] - self._starts[index] > self._max_document_bytes:
            self.skip(index, f"a line above {self._max_document_bytes} bytes", self.where(index))
            return None
        line = self._decode(index, self._read(index))
        if line is None:
            return None
        if not line.strip():
            self.skip(index, "empty", self.where(index))
            return None
        try:
            record = json.loads(line)
            text = record if self._field is None else record[self._field]
        except (ValueError, RecursionError):  # or a number of thousands of digits, or too deep a nesting
            self.skip(index, "not JSON", self.where(index))
            return None
        except (KeyError, TypeError):
            self.skip(index, f"no field {self._field!r}", self.where(index))
            return None
        return self.text_or_skip(index, text, self._field, self.where(index))


def _text_spans(path: str, limit: int) -> Iterator[tuple[int, int]]:
    """Spans of at most ``limit`` bytes, cut after a line end or, failing that, between two characters."""
    size, start = os.path.getsize(path), 0
    if size <= limit:
        yield 0, size
        return
    with open(path, "rb") as file:
        while start < size:
            stop = min(start + limit, size)
            if stop < size:
                file.seek(start)
                data = file.read(limit)
                cut = data.rfind(b"\n") + 1
                if not cut:  # no line end: cut before the last character, which may be incomplete
                    cut = next((k for k in range(len(data) - 1, 0, -1) if data[k] & 0xC0 != 0x80), len(data))
                stop = start + cut
            yield start, stop
            start = stop


def _line_spans(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the lines, found in pieces so that no line need fit in memory."""
    stops, position = [np.zeros(0, np.int64)], 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            stops.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + (position + 1))
            position += len(chunk)
    ends = np.concatenate(stops)
    if position > (ends[-1] if len(ends) else 0):  # the last line has no end
        ends = np.append(ends, position)
    return np.append(0, ends[:-1]) if len(ends) else ends, ends
