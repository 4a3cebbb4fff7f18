"""Flax NNX layers: Interleaved Head Attention, the plain baseline, and what a decoder is built from."""

from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.cache import AttentionCache
from iha_jax.nn.embedding import Embedding
from iha_jax.nn.mlp import MLP
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.norms import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "AttentionCache",
    "Embedding",
    "InterleavedHeadAttention",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
]
