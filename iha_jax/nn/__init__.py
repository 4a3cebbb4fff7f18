"""Flax NNX layers: Interleaved Head Attention, the baselines, and what a decoder is built from."""

from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.cache import AttentionCache
from iha_jax.nn.differential import DifferentialAttention
from iha_jax.nn.embedding import Embedding
from iha_jax.nn.mlp import MLP
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.norms import LayerNorm, RMSNorm
from iha_jax.nn.simplicial import SimplicialAttention
from iha_jax.nn.talking_heads import TalkingHeadsAttention

__all__ = [
    "MLP",
    "AttentionCache",
    "DifferentialAttention",
    "Embedding",
    "InterleavedHeadAttention",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
    "SimplicialAttention",
    "TalkingHeadsAttention",
]
