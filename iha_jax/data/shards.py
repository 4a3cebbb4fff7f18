"""One shard of packed rows: from a stretch of documents to two files and a receipt, all or nothing."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from iha_jax.data.documents import Documents, is_held_out
from iha_jax.data.packing import Row, document_pairs, stream_rows
from iha_jax.data.rows import SPLITS, RowFormat
from iha_jax.data.tokenizers import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """What a worker needs to make a shard.

    Attributes:
      directory: of the output.
      index: of the shard.
      count: of all shards.
      documents: the shard's stretch of the source.
      rows: layout of a row.
      tokenizer: name or path.
      held_out_fraction: share of the documents that go to "held_out".
    """

    directory: str
    index: int
    count: int
    documents: Documents
    rows: RowFormat
    tokenizer: str
    held_out_fraction: float

    @property
    def receipt(self) -> pathlib.Path:
        """Written last: the shard is complete exactly if this is there."""
        return pathlib.Path(self.directory) / "receipts" / f"{self.index:05}-of-{self.count:05}.json"

    def file(self, split: str) -> pathlib.Path:
        """The file of a split's rows."""
        return pathlib.Path(self.directory) / f"{split}-{self.index:05}-of-{self.count:05}.arrayrecord"


def finished(job: ShardJob) -> dict[str, Any] | None:
    """The receipt of a complete shard whose files are there in full, else None."""
    try:
        receipt = json.loads(job.receipt.read_text())
        for split in SPLITS:
            entry = receipt["splits"][split]
            if entry["rows"] and job.file(split).stat().st_size != entry["file_bytes"]:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return receipt


def make_shard(job: ShardJob) -> dict[str, Any]:
    """Makes a shard and returns its receipt; documents are read, tokenized and written one at a time.

    Raises:
      OSError: the disk is full, or the directory can't be written.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    receipt: dict[str, Any] = {"splits": {}}
    for split in SPLITS:
        counts = {"documents": 0, "tokens": 0, "bytes": 0}
        pairs = _pairs(job, split == "held_out", tokenizer, counts)
        rows = _write(job.file(split), job.rows, stream_rows(pairs, job.rows.sequence_length))
        receipt["splits"][split] = {**counts, **rows, "name": job.file(split).name}
    receipt["skipped"] = job.documents.skipped
    _write_text(job.receipt, json.dumps(receipt, sort_keys=True))
    return receipt


def _pairs(job: ShardJob, held_out: bool, tokenizer: Tokenizer, counts: dict[str, int]) -> Iterator[Row]:
    for index in range(len(job.documents)):
        text = job.documents[index]
        if text is None or is_held_out(text, job.held_out_fraction) != held_out:
            continue
        pair = document_pairs(tokenizer, text)
        if pair is not None:
            counts["documents"] += 1
            counts["tokens"] += len(pair["inputs"])
            counts["bytes"] += len(text.encode("utf-8", errors="surrogatepass"))
            yield pair


def _write(path: pathlib.Path, layout: RowFormat, rows: Iterator[Row]) -> dict[str, Any]:
    """Writes rows under a temporary name, then renames; no file where there is no row."""
    from array_record.python.array_record_module import ArrayRecordWriter

    temporary = path.with_name(path.name + ".tmp")
    count, writer = 0, None
    try:
        for row in rows:
            if writer is None:
                # A row a group: rows are read one by one in random order.
                writer = ArrayRecordWriter(str(temporary), "group_size:1")
            writer.write(layout.encode(row))
            count += 1
    except RuntimeError as error:  # how the C++ writer reports what the system told it
        raise OSError(f"writing {temporary} failed: {error}") from error
    finally:
        if writer is not None:
            with contextlib.suppress(RuntimeError):
                writer.close()
    if writer is None:
        path.unlink(missing_ok=True)
        return {"rows": 0, "file_bytes": 0, "sha256": None}
    digest, size = _digest(temporary)
    _check_readable(temporary, count)
    os.replace(temporary, path)
    return {"rows": count, "file_bytes": size, "sha256": digest}


def _check_readable(path: pathlib.Path, count: int) -> None:
    """A full disk shows in the file, not always in the writer's answers."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        found = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise OSError(f"{path} can't be read back after writing (is the disk full?): {error}") from error
    if found != count:
        raise OSError(f"{path} holds {found} rows after writing {count}: is the disk full?")


def _digest(path: pathlib.Path) -> tuple[str, int]:
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return hasher.hexdigest(), size


def _write_text(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
