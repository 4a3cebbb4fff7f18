"""Hugging Face checkpoints in and out: ``python -m iha_jax.convert from-hf DIR OUT --pseudo-heads 4``."""

from iha_jax.convert.huggingface import read_huggingface, write_huggingface
from iha_jax.convert.pseudo_heads import with_pseudo_heads

__all__ = ["read_huggingface", "with_pseudo_heads", "write_huggingface"]
