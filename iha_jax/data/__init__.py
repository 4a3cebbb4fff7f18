"""Text to batches: documents, tokenizers, packing, mixtures."""

from iha_jax.data.bigram import Bigram
from iha_jax.data.config import DataConfig, SourceConfig
from iha_jax.data.pipeline import DataPipeline
from iha_jax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Bigram",
    "ByteTokenizer",
    "DataConfig",
    "DataPipeline",
    "SourceConfig",
    "Tokenizer",
    "load_tokenizer",
]
