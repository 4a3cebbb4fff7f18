"""Rows packed beforehand: fixed-length records in ArrayRecord files beside a manifest.

A directory holds, per split ("train", "held_out"), files ``<split>-00000-of-00008.arrayrecord`` and one
``manifest.json``. A record is the row's columns one after the other, little-endian, as the manifest's
``columns`` lists them: inputs and targets (uint16 or uint32, by the vocabulary), segment ids (uint16).
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from iha_jax.data.packing import Row, restarting_positions
from iha_jax.json_text import parse_json_object

MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")
_FORMAT = "iha_jax packed rows 1"


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a row becomes bytes.

    Attributes:
      sequence_length: T.
      token_dtype: "uint16" where every id fits, else "uint32".
    """

    sequence_length: int
    token_dtype: str

    def __post_init__(self):
        """Checks ranges."""
        if not isinstance(self.sequence_length, int) or self.sequence_length < 1:
            raise ValueError(f"sequence_length must be a positive whole number, got {self.sequence_length!r}")
        if self.token_dtype not in ("uint16", "uint32"):
            raise ValueError(f"token_dtype must be uint16 or uint32, got {self.token_dtype!r}")

    @classmethod
    def of(cls, sequence_length: int, vocab_size: int) -> "RowFormat":
        """The smallest format that holds ids below ``vocab_size``."""
        return cls(sequence_length, "uint16" if vocab_size <= 1 << 16 else "uint32")

    @property
    def columns(self) -> list[tuple[str, np.dtype]]:
        """(name, dtype) in stored order."""
        token = np.dtype(self.token_dtype).newbyteorder("<")
        segment = np.dtype("uint16" if self.sequence_length < 1 << 16 else "uint32").newbyteorder("<")
        return [("inputs", token), ("targets", token), ("segment_ids", segment)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a record before compression."""
        return self.sequence_length * sum(dtype.itemsize for _, dtype in self.columns)

    def encode(self, row: Row) -> bytes:
        """A row's bytes."""
        return b"".join(row[name].astype(dtype).tobytes() for name, dtype in self.columns)

    def decode(self, record: bytes) -> Row:
        """A row {inputs, targets, segment_ids, positions}, int32 [T], of its bytes.

        Raises:
          ValueError: the record has another size.
        """
        if len(record) != self.row_bytes:
            raise ValueError(
                f"a packed row must have {self.row_bytes} bytes (T {self.sequence_length}), got {len(record)}"
            )
        row, start = {}, 0
        for name, dtype in self.columns:
            stop = start + self.sequence_length * dtype.itemsize
            row[name] = np.frombuffer(record[start:stop], dtype).astype(np.int32)
            start = stop
        return {**row, "positions": restarting_positions(row["segment_ids"])}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a directory of packed rows holds.

    Attributes:
      rows: how a record is laid out.
      tokenizer: name or path it was made with.
      tokenizer_fingerprint: hash of the vocabulary.
      held_out_fraction: share of the documents in "held_out".
      splits: split → {"files": [{"name", "rows", "sha256", …}], "rows", "documents", "tokens", "bytes"}.
      skipped: reason → documents.
    """

    rows: RowFormat
    tokenizer: str
    tokenizer_fingerprint: str
    held_out_fraction: float
    splits: dict[str, dict[str, Any]]
    skipped: dict[str, int]

    def to_json(self) -> str:
        """As written to ``manifest.json``."""
        columns = [{"name": name, "dtype": dtype.name} for name, dtype in self.rows.columns]
        content = {"format": _FORMAT, **dataclasses.asdict(self), "columns": columns}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, directory: str | pathlib.Path) -> "Manifest":
        """The manifest of a directory.

        Raises:
          FileNotFoundError: there is none (a run of ``prepare`` that hasn't finished leaves none).
          ValueError: it is of another format.
        """
        path = pathlib.Path(directory).expanduser() / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(directory)!r} has no {MANIFEST}: expected rows made by 'python -m iha_jax.data.prepare'; "
                "if that was interrupted, run it again to the end"
            )
        content = parse_json_object(path.read_bytes(), str(path))
        if content.pop("format", None) != _FORMAT:
            raise ValueError(f"{path} isn't of the format {_FORMAT!r}")
        content.pop("columns", None)
        try:
            found = cls(**{**content, "rows": RowFormat(**content["rows"])})
            for split in SPLITS:
                _check_split(split, found.splits[split])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return found

    def files(self, directory: str | pathlib.Path, split: str) -> list[str]:
        """Paths of a split's files, in order."""
        root = pathlib.Path(directory).expanduser()
        return [str(root / entry["name"]) for entry in self.splits[split]["files"] if entry["rows"]]

    def bytes_per_target(self, split: str) -> float:
        """UTF-8 bytes of text per predicted token."""
        entry = self.splits[split]
        return entry["bytes"] / entry["tokens"] if entry["tokens"] else 1.0


def _check_split(split: str, entry: dict[str, Any]) -> None:
    for name in ("rows", "documents", "tokens", "bytes"):
        _check_count(f"{split}.{name}", entry[name])
    if not isinstance(entry["files"], list):
        raise ValueError(f"{split}.files must be a list, got {entry['files']!r:.60}")
    for file in entry["files"]:
        _check_count(f"{split}.files: rows", file["rows"])
        # A name, not a path: a manifest must not lead out of its directory. A split's file without rows isn't there.
        if not isinstance(file["name"], str) or pathlib.PurePath(file["name"]).name != file["name"]:
            raise ValueError(f"{split}.files must have plain names, got {file['name']!r}")


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} must be a whole number of at least 0, got {value!r}")
