"""Documents in tables: Parquet files and Hugging Face datasets."""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from iha_jax.data.chat import CHAT_FIELDS
from iha_jax.data.documents import Documents
from iha_jax.extras import needed


class ParquetFiles(Documents):
    """One document a row: of one column, or without one its conversation. Whole row groups are read; a few are kept."""

    _KEEP = 4

    def __init__(self, paths: Sequence[str], field: str | None):
        super().__init__()
        parquet = _pyarrow_parquet()
        self._paths, self._field = tuple(paths), field
        groups = []
        for i, path in enumerate(paths):
            with _naming(path):
                metadata = parquet.read_metadata(path)
                names = metadata.schema.to_arrow_schema().names
            if not wanted_columns(field, names):
                wanted = f"column {field!r}, only {names}: set text_field" if field else f"conversations, only {names}"
                raise ValueError(f"{path} has no {wanted}")
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
        return self.text_or_skip(index, text, self._field, f"{self._paths[self._groups[group, 0]]}, row {row}")

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
        with _naming(file), _pyarrow_parquet().ParquetFile(file) as parquet:
            columns = wanted_columns(self._field, parquet.schema_arrow.names)
            table = parquet.read_row_group(number, columns=columns)
            column = table.to_pylist() if self._field is None else table.column(0).to_pylist()
        with self._lock:
            self._cache[group] = column
            while len(self._cache) > self._KEEP:
                self._cache.popitem(last=False)
        return column

    def __getstate__(self):
        return {**super().__getstate__(), "_cache": collections.OrderedDict()}


class HubDataset(Documents):
    """A Hugging Face dataset's column, or its conversations."""

    def __init__(self, name: str, subset: str | None, split: str, field: str | None):
        super().__init__()
        with needed("datasets", "a source of kind 'hub'"):
            import datasets  # pyright: ignore[reportMissingImports]
        self._data = datasets.load_dataset(name, subset, split=split)
        if not wanted_columns(field, self._data.column_names):
            wanted = "conversations" if field is None else f"column {field!r}"
            raise ValueError(f"dataset {name!r} has no {wanted}, only {self._data.column_names}")
        self._name, self._field = name, field

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> str | None:
        record = self._data[index]
        value = record if self._field is None else record[self._field]
        return self.text_or_skip(index, value, self._field, f"{self._name}, row {index}")

    def sizes(self) -> np.ndarray:
        """A nominal size: the dataset doesn't say."""
        return np.full(len(self), 1024, np.int64)


def wanted_columns(field: str | None, names: Sequence[str]) -> list[str]:
    """The columns to read: the field's, or without one those that conversations are made of; [] if there is none."""
    if field is not None:
        return [field] if field in names else []
    found = [name for name in CHAT_FIELDS if name in names]
    return found if found != ["system"] else []


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Says which file it was that Arrow could not read."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's own errors are of these types
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


def _pyarrow_parquet() -> Any:
    with needed("pyarrow", "reading Parquet files"):
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    return parquet
