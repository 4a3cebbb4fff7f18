"""Text to batches: documents, tokenizers, packing, mixtures."""

from iha_jax.data.bigram import Bigram
from iha_jax.data.config import DataConfig, SourceConfig
from iha_jax.data.pipeline import DataPipeline, Slice
from iha_jax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Bigram",
    "ByteTokenizer",
    "DataConfig",
    "DataPipeline",
    "Slice",
    "SourceConfig",
    "Tokenizer",
    "load_tokenizer",
]
