"""What to train on: sources, tokenizer, packing and the held-out split."""

import dataclasses
from typing import Literal

SourceKind = Literal["stdlib", "files", "hub", "packed"]


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of text, or of rows packed beforehand.

    Attributes:
      kind: "stdlib", the running interpreter's own library sources (real text that is always there);
        "files", text, JSONL or Parquet files; "hub", a Hugging Face dataset; "packed", rows written by
        ``python -m iha_jax.data.prepare``.
      path: for "files" a file, directory or glob; for "hub" the dataset's name; for "packed" the directory.
      format: "text", or "chat": records are conversations (OpenThoughts, ShareGPT or OpenAI messages) of which the
        assistant's words are trained on; for "files" (JSONL, Parquet) and "hub".
      text_field: the column or key of the text in JSONL, Parquet and hub datasets.
      subset: hub only, the dataset's configuration.
      split: hub only, the split to read.
      weight: share of the rows, relative to the other sources'.
    """

    kind: SourceKind = "stdlib"
    path: str = ""
    format: Literal["text", "chat"] = "text"
    text_field: str = "text"
    subset: str | None = None
    split: str = "train"
    weight: float = 1.0

    def __post_init__(self):
        """Checks what can be checked without touching a disk."""
        if self.kind == "stdlib" and self.path:
            raise ValueError(f"source kind 'stdlib' takes no path, got path={self.path!r}; use kind 'files'")
        if self.kind != "stdlib" and not self.path:
            raise ValueError(f"source kind {self.kind!r} needs a path, got path=''")
        if self.format == "chat" and self.kind not in ("files", "hub"):
            raise ValueError(f"a source of format 'chat' must be of kind 'files' or 'hub', got {self.kind!r}")
        if not self.weight > 0:
            raise ValueError(f"a source's weight must be positive, got {self.weight} for {self.kind} {self.path!r}")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to batches.

    Attributes:
      sources: one or more sources, mixed row by row in proportion to their weights.
      tokenizer: "bytes", or the path of a ``tokenizers`` JSON or SentencePiece model, or a Hugging Face name.
      sequence_length: T, tokens of a row.
      packing: "split" concatenates documents and cuts them at row ends (no padding); "fit" keeps documents
        whole where they fit in a row (longer ones are cut into pieces of T) and pads what is left.
      chat_template: how conversations are written: "chatml", "llama3", "plain", "tokenizer" (the one beside the
        tokenizer), or the path of a Jinja file.
      held_out_fraction: share of the documents, chosen by a hash of their text, that is never trained on.
      shuffle: visit documents (or packed rows) in a new order each epoch; off, in their stored order.
      seed: of the shuffle.
      streams: lanes that documents are dealt to and packed in; row g of the run is of lane g % streams. With many
        processes, a multiple of batch_size / micro_batches lets each document be read by one of them only.
      prefetch: batches made ahead in a thread of their own.
    """

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    tokenizer: str = "bytes"
    sequence_length: int = 512
    packing: Literal["split", "fit"] = "split"
    chat_template: str = "chatml"
    held_out_fraction: float = 0.02
    shuffle: bool = True
    seed: int = 0
    streams: int = 32
    prefetch: int = 4

    def __post_init__(self):
        """Checks ranges."""
        if not self.sources:
            raise ValueError("data.sources is empty: at least one source is needed")
        if self.sequence_length < 2:
            raise ValueError(f"data.sequence_length must be at least 2, got {self.sequence_length}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction must be in [0, 1), got {self.held_out_fraction}")
        if self.packing != "fit" and any(source.format == "chat" for source in self.sources):
            raise ValueError(
                f"data.packing must be 'fit' with conversations, which are kept whole, got {self.packing!r}"
            )
        if self.streams < 1:
            raise ValueError(f"data.streams must be at least 1, got {self.streams}")
        if self.prefetch < 0:
            raise ValueError(f"data.prefetch must be at least 0, got {self.prefetch}")
