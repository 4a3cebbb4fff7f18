"""From configuration to batches: deterministic, the same whatever the number of processes, and checkpointable.

A batch is a dict of arrays [rows, T]: ``inputs``, ``targets``, ``segment_ids``, ``positions`` (int32) and
``weights`` (float32, 0 where nothing is to be predicted).
"""

import collections
import dataclasses
import functools
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from iha_jax.data.bigram import Bigram
from iha_jax.data.chat import ChatEncoder, load_template
from iha_jax.data.config import DataConfig, SourceConfig
from iha_jax.data.documents import Documents
from iha_jax.data.iterator import BatchIterator
from iha_jax.data.lanes import IndexedLane, IteratedLane, Lane, LaneBatches
from iha_jax.data.packing import Encode, Row, SplitPairs, bytes_per_target, document_pairs, packed_rows
from iha_jax.data.rows import Manifest
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import Tokenizer, load_tokenizer

_LOG = logging.getLogger(__name__)
# Enough text for a stable ratio of bytes to tokens and for a bigram table.
_SAMPLE_BYTES = 64 << 20


class DataPipeline:
    """The training and held-out batches of one configuration.

    Attributes:
      config: what to read.
      tokenizer: the loaded tokenizer.
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer)
        self._documents: dict[SourceConfig, Documents] = {}
        self._manifests: dict[SourceConfig, Manifest] = {}
        for source in config.sources:
            if source.kind == "packed":
                self._manifests[source] = self._checked_manifest(source)
            elif source not in self._documents:
                self._documents[source] = open_documents(source)

    @property
    def skipped(self) -> dict[str, int]:
        """Reason → documents skipped so far."""
        total: collections.Counter[str] = collections.Counter()
        for documents in self._documents.values():
            total.update(documents.skipped)
        return dict(total)

    def training_batches(self, rows: int, own: Sequence[int] | None = None) -> BatchIterator:
        """An endless iterator of training batches of ``rows`` rows, with ``get_state``/``set_state``.

        Close it when done: it has a thread.

        Args:
          rows: of a batch, over all processes.
          own: the rows of each batch, numbers in [0, rows), that are wanted here; None, all.
        """
        sources = self.config.sources
        batches: grain.IterDataset = LaneBatches(
            lambda source, lane: self._lane(sources[source], lane),
            [source.weight for source in sources],
            self.config.streams,
            rows,
            range(rows) if own is None else own,
        )
        if self.config.prefetch:
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=self.config.prefetch)
        return BatchIterator(batches)

    def held_out_batches(self, rows: int, limit: int | None = None) -> Iterator[Row]:
        """The held-out split once, in a fixed order, the last batch filled up with rows of weight 0.

        Args:
          rows: rows of a batch.
          limit: stop after this many rows, or None for all. Rows, not batches: so that the loss doesn't
            depend on the batch size.
        """
        waiting: list[Row] = []
        for row in self._held_out_rows(limit):
            waiting.append(row)
            if len(waiting) == rows:
                yield _stack(waiting)
                waiting = []
        if waiting:
            empty = {name: np.zeros_like(column) for name, column in waiting[0].items()}
            yield _stack(waiting + [empty] * (rows - len(waiting)))

    def bytes_per_target(self) -> float:
        """UTF-8 bytes per predicted token of the held-out split, the sources' mean by weight."""
        total = sum(source.weight for source in self.config.sources)
        return sum(s.weight / total * self._source_bytes_per_target(s) for s in self.config.sources)

    def fit_bigram(self) -> Bigram:
        """The byte-bigram table of the training split (of at most 64 MiB of each source)."""
        return Bigram.fit(self._training_sample(), self.tokenizer.vocab_size)

    def _training_sample(self) -> Iterator[Row]:
        for source in self.config.sources:
            size = 0
            for pair in self._source_pairs(source):
                yield pair
                size += len(pair["inputs"])
                if size >= _SAMPLE_BYTES:
                    break

    def _source_pairs(self, source: SourceConfig) -> Iterator[Row]:
        if source.kind == "packed":
            for row in iter(self._packed(source, held_out=False).to_iter_dataset()):
                kept = row["segment_ids"] > 0
                yield {name: row[name][kept] for name in ("inputs", "targets")}
            return
        documents = self._documents[source]
        split = SplitPairs(self._encode(source), self.config.held_out_fraction, held_out=False)
        for index in range(len(documents)):
            if (pair := split.map(documents[index])) is not None:
                yield pair

    def _held_out_rows(self, limit: int | None) -> Iterator[Row]:
        count = 0
        for source in self.config.sources:
            iterator = iter(self._held_out_dataset(source).map(_with_weights))
            try:
                for row in iterator:
                    if limit is not None and count >= limit:
                        return
                    count += 1
                    yield row
            finally:
                iterator.close()

    def _lane(self, source: SourceConfig, lane: int) -> Lane:
        """Every streams-th document (or packed row) of a source's training split, endless and shuffled."""
        config = self.config
        packed = source.kind == "packed"
        data: Any = self._packed(source, held_out=False) if packed else grain.MapDataset.source(self._documents[source])
        # A seed of its own for every source, so that adding one leaves the others' order alone.
        data = data.seed(config.seed + zlib.crc32(repr(dataclasses.replace(source, weight=1.0)).encode()))
        data = (data.shuffle() if config.shuffle else data).repeat()[lane :: config.streams]
        if packed:
            return IndexedLane(data.map(_with_weights))
        # Lanes are packed apart: otherwise a long document would fill whole batches, and the rows of a batch would all
        # be alike.
        return IteratedLane(self._packed_online(source, data, held_out=False).map(_with_weights))

    def _held_out_dataset(self, source: SourceConfig) -> grain.IterDataset:
        """Rows of the held-out split of one source, once and in order."""
        if source.kind == "packed":
            return self._packed(source, held_out=True).to_iter_dataset()
        return self._packed_online(source, grain.MapDataset.source(self._documents[source]), held_out=True)

    def _packed_online(self, source: SourceConfig, documents: grain.MapDataset, held_out: bool) -> grain.IterDataset:
        config = self.config
        pairs = documents.map(SplitPairs(self._encode(source), config.held_out_fraction, held_out))
        # One reader each: cheap to open, and the order of skips is the order of documents.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        chat = source.format == "chat"
        return packed_rows(pairs.to_iter_dataset(options), config.sequence_length, config.packing, weighted=chat)

    def _encode(self, source: SourceConfig) -> Encode:
        """What makes pairs of a source's documents."""
        if source.format == "text":
            return functools.partial(document_pairs, self.tokenizer)
        template = load_template(self.config.chat_template, self.config.tokenizer)
        return ChatEncoder(self.tokenizer, template, self.config.sequence_length)

    def _packed(self, source: SourceConfig, held_out: bool) -> grain.MapDataset:
        manifest = self._manifests[source]
        split = "held_out" if held_out else "train"
        files = manifest.files(source.path, split)
        if not files:
            raise ValueError(f"{source.path!r} holds no row of the split {split!r}")
        records: Any = grain.sources.ArrayRecordDataSource(files)
        return grain.MapDataset.source(records).map(manifest.rows.decode)

    def _checked_manifest(self, source: SourceConfig) -> Manifest:
        manifest = Manifest.read(source.path)
        if manifest.rows.sequence_length != self.config.sequence_length:
            raise ValueError(
                f"{source.path!r} holds rows of {manifest.rows.sequence_length} tokens, but data.sequence_length is "
                f"{self.config.sequence_length}: prepare the rows again or change the length"
            )
        if manifest.tokenizer_fingerprint != self.tokenizer.fingerprint:
            raise ValueError(
                f"{source.path!r} was made with the tokenizer {manifest.tokenizer!r}, but data.tokenizer is "
                f"{self.config.tokenizer!r}, another vocabulary"
            )
        return manifest

    def _source_bytes_per_target(self, source: SourceConfig) -> float:
        if source.kind == "packed":
            return self._manifests[source].bytes_per_target("held_out")
        fraction = self.config.held_out_fraction
        return bytes_per_target(self._documents[source], self._encode(source), fraction, True, _SAMPLE_BYTES)


def _with_weights(row: Row) -> Row:
    weights = (row["segment_ids"] > 0).astype(np.float32)
    return {**row, "weights": weights * row["weights"] if "weights" in row else weights}


def _stack(rows: list[Row]) -> Row:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


__all__ = ["DataPipeline", "document_pairs"]
