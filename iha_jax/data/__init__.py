"""Text to batches: documents, tokenizers, packing, mixtures."""

from iha_jax.extras import needed

with needed("grain", "reading data"):  # here, once: what is below imports it in several places
    import grain as _  # noqa: F401

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
