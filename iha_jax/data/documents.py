"""Documents by index: the interpreter's library, text, JSONL and Parquet files, Hugging Face datasets.

Every source answers ``len()`` and ``[i]``, so that shuffling, slicing per process and resuming need no
scan. What can't be read is a counted skip: ``[i]`` gives None and ``skipped`` says why.
"""

import collections
import glob
import hashlib
import json
import logging
import os
import pathlib
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from iha_jax.data.config import SourceConfig

_LOG = logging.getLogger(__name__)

# A longer text file becomes several documents, so that no single one has to fit in memory with its tokens.
MAX_DOCUMENT_BYTES = 16 << 20
_SCAN_BYTES = 4 << 20
_JSONL = (".jsonl", ".ndjson")


class Documents:
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

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> str | None:
        raise NotImplementedError

    def sizes(self) -> np.ndarray:
        """Stored bytes of every document, int64 [len(self)], for dividing work evenly."""
        raise NotImplementedError

    def select(self, start: int, stop: int) -> "Documents":
        """The documents start … stop − 1, cheap to send to another process."""
        return _Range(self, start, stop)

    def _skip(self, index: int, reason: str, where: str) -> None:
        with self._lock:
            first = reason not in self._skipped
            self._skipped[reason].add(index)
        if first and reason != "empty":
            _LOG.warning("skipping a document (%s) at %s; further ones are only counted", reason, where)

    def __getstate__(self):
        state = dict(self.__dict__)
        state.pop("_lock")
        return state

    def __setstate__(self, state: dict[str, Any]):
        self.__dict__.update(state)
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
        for name, value in self.__dict__.items():
            if name not in selected.__dict__:
                selected.__dict__[name] = value
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
            self._skip(index, "not UTF-8", f"{self.where(index)} + {error.start}")
            return None


class TextFiles(_FileSpans):
    """One document a file; files above ``MAX_DOCUMENT_BYTES`` are cut at line ends."""

    def __init__(self, paths: Sequence[str], max_document_bytes: int = MAX_DOCUMENT_BYTES):
        spans = [(i, a, b) for i, path in enumerate(paths) for a, b in _text_spans(path, max_document_bytes)]
        super().__init__(paths, *_columns(spans))

    def __getitem__(self, index: int) -> str | None:
        data = self._read(index)
        if not data.strip():
            self._skip(index, "empty", self.where(index))
            return None
        return self._decode(index, data)


class JsonLines(_FileSpans):
    """One document a line, under one key."""

    def __init__(self, paths: Sequence[str], field: str, max_document_bytes: int = MAX_DOCUMENT_BYTES):
        self._field, self._max_document_bytes = field, max_document_bytes
        spans = [(i, a, b) for i, path in enumerate(paths) for a, b in _line_spans(path)]
        super().__init__(paths, *_columns(spans))

    def __getitem__(self, index: int) -> str | None:
        if self._stops[index] - self._starts[index] > self._max_document_bytes:
            self._skip(index, f"a line above {self._max_document_bytes} bytes", self.where(index))
            return None
        line = self._decode(index, self._read(index))
        if line is None:
            return None
        if not line.strip():
            self._skip(index, "empty", self.where(index))
            return None
        try:
            text = json.loads(line)[self._field]
        except json.JSONDecodeError:
            self._skip(index, "not JSON", self.where(index))
            return None
        except (KeyError, TypeError):
            self._skip(index, f"no field {self._field!r}", self.where(index))
            return None
        return _text_or_skip(self, index, text, self._field, self.where(index))


class ParquetFiles(Documents):
    """One document a row, of one column. Whole row groups are read; the last few are kept."""

    _KEEP = 4

    def __init__(self, paths: Sequence[str], field: str):
        super().__init__()
        parquet = _pyarrow_parquet()
        self._paths, self._field = tuple(paths), field
        groups = []
        for i, path in enumerate(paths):
            metadata = parquet.read_metadata(path)
            names = metadata.schema.to_arrow_schema().names
            if field not in names:
                raise ValueError(f"{path} has no column {field!r}, only {names}: set text_field")
            groups += [(i, g, metadata.row_group(g).num_rows, metadata.row_group(g).total_byte_size)
                       for g in range(metadata.num_row_groups)]  # fmt: skip
        self._groups = np.asarray(groups, np.int64).reshape(-1, 4)
        self._ends = np.cumsum(self._groups[:, 2])
        self._cache: collections.OrderedDict[int, list[Any]] = collections.OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> str | None:
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - int(self._ends[group] - self._groups[group, 2])
        text = self._column(group)[row]
        return _text_or_skip(self, index, text, self._field, f"{self._paths[self._groups[group, 0]]}, row {row}")

    def sizes(self) -> np.ndarray:
        """Mean stored bytes of each row's group."""
        rows = self._groups[:, 2]
        return np.repeat(self._groups[:, 3] // np.maximum(rows, 1), rows)

    def _column(self, group: int) -> list[Any]:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
        file, number = self._paths[self._groups[group, 0]], int(self._groups[group, 1])
        with _pyarrow_parquet().ParquetFile(file) as parquet:
            column = parquet.read_row_group(number, columns=[self._field]).column(0).to_pylist()
        with self._lock:
            self._cache[group] = column
            while len(self._cache) > self._KEEP:
                self._cache.popitem(last=False)
        return column

    def __getstate__(self):
        return {**super().__getstate__(), "_cache": collections.OrderedDict()}


class HubDataset(Documents):
    """A Hugging Face dataset's column."""

    def __init__(self, name: str, subset: str | None, split: str, field: str):
        super().__init__()
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("source kind 'hub' needs the package 'datasets': pip install 'iha-jax[data]'") from error
        self._data = datasets.load_dataset(name, subset, split=split)
        if field not in self._data.column_names:
            raise ValueError(f"dataset {name!r} has no column {field!r}, only {self._data.column_names}")
        self._name, self._field = name, field

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> str | None:
        return _text_or_skip(self, index, self._data[index][self._field], self._field, f"{self._name}, row {index}")

    def sizes(self) -> np.ndarray:
        """A nominal size: the dataset doesn't say."""
        return np.full(len(self), 1024, np.int64)


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


def open_documents(source: SourceConfig) -> Documents:
    """The documents of a source of kind "stdlib", "files" or "hub".

    Raises:
      FileNotFoundError: nothing is at the path.
      ValueError: there is no document at all, or a column is missing.
      ImportError: a package that reads the format is missing, naming the extra.
    """
    if source.kind == "stdlib":
        return TextFiles(stdlib_paths())
    if source.kind == "hub":
        return HubDataset(source.path, source.subset, source.split, source.text_field)
    if source.kind != "files":
        raise ValueError(f"a source of kind {source.kind!r} holds rows, not documents")
    paths = _expand(source.path)
    parts: list[Documents] = []
    if jsonl := [p for p in paths if p.endswith(_JSONL)]:
        parts.append(JsonLines(jsonl, source.text_field))
    if parquet := [p for p in paths if p.endswith(".parquet")]:
        parts.append(ParquetFiles(parquet, source.text_field))
    if text := [p for p in paths if not p.endswith((*_JSONL, ".parquet"))]:
        parts.append(TextFiles(text))
    documents = parts[0] if len(parts) == 1 else Concatenated(parts)
    if len(documents) == 0:
        raise ValueError(f"{source.path!r} holds no document: all {len(paths)} files are empty")
    return documents


def stdlib_paths() -> list[str]:
    """The running interpreter's library sources, sorted; installed packages and test suites left out."""
    root = sysconfig.get_path("stdlib")
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    paths = []
    for directory, children, files in os.walk(root):
        children[:] = sorted(c for c in children if c not in left_out)
        paths += [os.path.join(directory, f) for f in files if f.endswith(".py")]
    return sorted(paths)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split: a function of its text, so copies stay together."""
    digest = hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _expand(path: str) -> list[str]:
    """Files of a path, directory (recursively, hidden ones left out) or glob, sorted."""
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        found = [
            str(p)
            for p in pathlib.Path(expanded).rglob("*")
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(expanded).parts)
        ]
    else:
        found = [p for p in glob.glob(expanded, recursive=True) if os.path.isfile(p)]
    if not found:
        raise FileNotFoundError(f"no file at {path!r}: expected a file, a directory with files, or a glob")
    return sorted(found)


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


def _line_spans(path: str) -> Iterator[tuple[int, int]]:
    """Spans of the lines, found in pieces so that no line need fit in memory."""
    start = position = 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + position + 1
            for end in ends.tolist():
                yield start, end
                start = end
            position += len(chunk)
    if start < position:
        yield start, position


def _columns(spans: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.asarray(spans, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _text_or_skip(documents: Documents, index: int, text: Any, field: str, where: str) -> str | None:
    if isinstance(text, str) and text.strip():
        return text
    documents._skip(index, "empty" if text in ("", None) or isinstance(text, str) else f"{field!r} isn't text", where)
    return None


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("Parquet files need the package 'pyarrow': pip install 'iha-jax[data]'") from error
    return parquet
