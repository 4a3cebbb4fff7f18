"""Tokenizers behind one small protocol: bytes, ``tokenizers`` JSON, SentencePiece, Hugging Face."""

import dataclasses
import functools
import hashlib
import importlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from iha_jax.extras import needed

# Names that mark a document's start and end in the vocabularies people have.
_START_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]", "<|endoftext|>")
_END_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|endoftext|>")


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need of a tokenizer.

    Attributes:
      vocab_size: one more than the largest id.
      bos_id: id put before a document, or None.
      eos_id: id put after a document, or None.
      fingerprint: hash of the vocabulary, to tell rows packed with another tokenizer.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def eos_id(self) -> int | None: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 [n], without start and end ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ids left out."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, then a start (256) and an end (257) of document."""

    vocab_size: int = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint: str = "bytes-258"

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the text, int32 [n]."""
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; what isn't UTF-8 shows as U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class FastTokenizer:
    """A ``tokenizers`` JSON file."""

    def __init__(self, path: str | pathlib.Path):
        self._path = str(path)
        self._tokenizer = _require("tokenizers", "a tokenizer JSON").Tokenizer.from_file(self._path)
        self.vocab_size: int = _one_past_largest(self._tokenizer.get_vocab(with_added_tokens=True))
        self.bos_id: int | None = _first_known(self._tokenizer.token_to_id, _START_NAMES)
        self.eos_id: int | None = _first_known(self._tokenizer.token_to_id, _END_NAMES)
        self.fingerprint: str = _hash(self._tokenizer.to_str().encode())

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [n]."""
        return np.asarray(self._tokenizer.encode(_utf8(text), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids])

    def __reduce__(self):
        return FastTokenizer, (self._path,)


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file."""

    def __init__(self, path: str | pathlib.Path):
        self._path = str(path)
        module = _require("sentencepiece", "a SentencePiece model")
        self._processor = module.SentencePieceProcessor(model_file=self._path)
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int | None = _or_none(self._processor.bos_id())
        self.eos_id: int | None = _or_none(self._processor.eos_id())
        self.fingerprint: str = _hash(pathlib.Path(path).read_bytes())

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [n]."""
        return np.asarray(self._processor.encode(_utf8(text)), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        special = {self.bos_id, self.eos_id}
        return self._processor.decode([int(i) for i in ids if int(i) not in special])

    def __reduce__(self):
        return SentencePieceTokenizer, (self._path,)


class HubTokenizer:
    """A Hugging Face tokenizer by name or local directory."""

    def __init__(self, name: str):
        self._name = name
        transformers = _require("transformers", f"the tokenizer {name!r}")
        # Refused, not asked for: a tokenizer that brings code of its own would run it.
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size: int = _one_past_largest(vocabulary)
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.fingerprint: str = _hash(repr(sorted(vocabulary.items())).encode())

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [n]."""
        return np.asarray(self._tokenizer.encode(_utf8(text), add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def __reduce__(self):
        return HubTokenizer, (self._name,)


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a name or path.

    Args:
      name: "bytes"; the path of a ``.json`` (``tokenizers``) or ``.model`` (SentencePiece) file; a directory
        or name that Hugging Face ``transformers`` knows.

    Raises:
      ValueError: nothing of that name can be loaded, saying what was tried.
      ImportError: the package that reads it isn't installed, naming the extra that brings it.
    """
    path = pathlib.Path(name).expanduser()
    if name == "bytes":
        return ByteTokenizer()
    try:
        if path.suffix == ".json" and path.is_file():
            return FastTokenizer(path)
        if path.suffix == ".model" and path.is_file():
            return SentencePieceTokenizer(path)
        if path.is_dir() and (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
            return FastTokenizer(path / "tokenizer.json")
        if path.suffix in (".json", ".model"):
            raise ValueError("there is no such file")
        return HubTokenizer(name)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"unknown tokenizer {name!r}: expected 'bytes', the path of a tokenizers .json or SentencePiece .model "
            f"file, or a Hugging Face name ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | pathlib.Path) -> None:
    """Trains a byte-level BPE and writes it as a ``tokenizers`` JSON, all or nothing.

    Args:
      texts: documents.
      vocab_size: tokens in all: 256 bytes, two special ones, the rest merges.
      path: of the JSON file.

    Raises:
      ValueError: the vocabulary is too small to hold the bytes.
    """
    if vocab_size < 258:
        raise ValueError(f"a trained tokenizer needs at least 258 tokens (256 bytes, start, end), got {vocab_size}")
    parts = ("models", "pre_tokenizers", "decoders", "trainers")
    models, pre_tokenizers, decoders, trainers = (_require(f"tokenizers.{p}", "training a tokenizer") for p in parts)
    tokenizer = _require("tokenizers", "training a tokenizer").Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    temporary = f"{path}.tmp"
    tokenizer.save(temporary)
    os.replace(temporary, path)


def document_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A document's ids with start and end where the tokenizer has them, int32 [n]."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.concatenate([np.asarray(start, np.int32), tokenizer.encode(text), np.asarray(end, np.int32)])


def _require(module: str, what: str) -> Any:
    with needed(module, what):
        return importlib.import_module(module)


def _utf8(text: str) -> str:
    """The text as the packages written in other languages take it: with U+FFFD for halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _one_past_largest(vocabulary: dict[str, int]) -> int:
    return max(vocabulary.values(), default=-1) + 1


def _first_known(token_to_id: Any, names: Sequence[str]) -> int | None:
    return next((i for i in map(token_to_id, names) if i is not None), None)


def _or_none(index: int) -> int | None:
    return index if index >= 0 else None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
