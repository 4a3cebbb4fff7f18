"""Documents to rows of T tokens, with segment ids and restarting positions.

A document of ids x_0 … x_n gives n pairs (x_i, x_{i+1}): inputs and targets are cut from the document
*before* packing, so every token but the first is predicted exactly once, wherever a row ends. Segment
ids count the pieces in a row from 1 (0 is padding); positions restart at 0 in every piece.
"""

from collections.abc import Callable, Iterable, Iterator

import grain
import numpy as np

from iha_jax.data.documents import Documents, is_held_out
from iha_jax.data.tokenizers import Tokenizer, document_ids

Row = dict[str, np.ndarray]


Encode = Callable[[str], Row | None]
"""A document's pairs, with a column of weights or not; None where there is nothing to predict."""


def document_pairs(tokenizer: Tokenizer, text: str) -> Row | None:
    """A document's inputs and targets, int32 [n] each, or None where there is nothing to predict."""
    ids = document_ids(tokenizer, text)
    return {"inputs": ids[:-1], "targets": ids[1:]} if len(ids) > 1 else None


class SplitPairs(grain.transforms.Map):
    """Keeps the documents of one split, as pairs; the others become None, which Grain passes over."""

    def __init__(self, encode: Encode, held_out_fraction: float, held_out: bool):
        self._encode, self._fraction, self._held_out = encode, held_out_fraction, held_out

    def map(self, element: str | None) -> Row | None:
        """Text to pairs."""
        if element is None or is_held_out(element, self._fraction) != self._held_out:
            return None
        return self._encode(element)


class CutPieces(grain.experimental.FlatMapTransform):
    """Cuts documents longer than a row, for the packing that keeps documents whole."""

    # Grain wants a bound on the pieces of one element; documents are bounded by ``MAX_DOCUMENT_BYTES``.
    max_fan_out = 1 << 24

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element: Row) -> list[Row]:
        """Pairs of a document to pairs of its pieces."""
        count = len(element["inputs"])
        return [
            {name: column[start : start + self._length] for name, column in element.items()}
            for start in range(0, count, self._length)
        ]


def packed_rows(pairs: grain.IterDataset, length: int, packing: str, weighted: bool = False) -> grain.IterDataset:
    """Rows {inputs, targets, segment_ids, positions}, int32 [T], of a dataset of pairs.

    Args:
      pairs: elements {inputs [n], targets [n]}, and "weights" [n] if they are weighted.
      length: T.
      packing: "split" or "fit", see ``DataConfig.packing``.
      weighted: whether the elements have weights; rows have them then too.
    """
    struct = {"inputs": length, "targets": length} | ({"weights": length} if weighted else {})
    if packing == "split":
        rows = grain.experimental.ConcatThenSplitIterDataset(pairs, length_struct=struct)
    elif packing == "fit":
        pieces = grain.experimental.FlatMapIterDataset(pairs, CutPieces(length))
        # 32 open rows leave little padding; more would hold documents back for longer.
        rows = grain.experimental.FirstFitPackIterDataset(pieces, length_struct=struct, num_packing_bins=32)
    else:
        raise ValueError(f"packing must be 'split' or 'fit', got {packing!r}")
    return rows.map(_rename)


def _rename(packed: Row) -> Row:
    return {
        "inputs": packed["inputs"].astype(np.int32),
        "targets": packed["targets"].astype(np.int32),
        "segment_ids": packed["inputs_segment_ids"].astype(np.int32),
        "positions": packed["inputs_positions"].astype(np.int32),
        **({"weights": packed["weights"].astype(np.float32)} if "weights" in packed else {}),
    }


def stream_rows(pairs: Iterable[Row], length: int) -> Iterator[Row]:
    """The same rows as ``packed_rows(…, "split")``, from a plain stream: for packing offline.

    Args:
      pairs: elements {inputs [n], targets [n]}.
      length: T.

    Yields:
      Rows {inputs, targets, segment_ids}; the last one is padded with segment 0.
    """
    row = _empty(length)
    filled = segment = 0
    for pair in pairs:
        start, count = 0, len(pair["inputs"])
        while start < count:
            take = min(count - start, length - filled)
            segment += 1
            for name in ("inputs", "targets"):
                row[name][filled : filled + take] = pair[name][start : start + take]
            row["segment_ids"][filled : filled + take] = segment
            start, filled = start + take, filled + take
            if filled == length:
                yield row
                row = _empty(length)
                filled = segment = 0
    if filled:
        yield row


def restarting_positions(segment_ids: np.ndarray) -> np.ndarray:
    """Positions that restart with every segment, int32 of the shape [T] of the ids."""
    index = np.arange(len(segment_ids), dtype=np.int32)
    starts = np.concatenate([[True], segment_ids[1:] != segment_ids[:-1]])
    return np.where(segment_ids > 0, index - np.maximum.accumulate(np.where(starts, index, 0)), 0).astype(np.int32)


def bytes_per_target(documents: Documents, encode: Encode, fraction: float, held_out: bool, limit: int) -> float:
    """UTF-8 bytes of text per predicted token of a split, from the first ``limit`` bytes of its documents.

    Bits per byte follow from it for any tokenizer: nats per token / ln 2 / bytes per token.
    """
    size = targets = 0
    for index in range(len(documents)):
        text = documents[index]
        if text is None or is_held_out(text, fraction) != held_out:
            continue
        size += len(text.encode("utf-8", errors="surrogatepass"))
        targets += 0 if (pairs := encode(text)) is None else len(pairs["inputs"])
        if size >= limit:
            break
    return size / targets if targets else 1.0


def _empty(length: int) -> Row:
    return {name: np.zeros(length, np.int32) for name in ("inputs", "targets", "segment_ids")}
