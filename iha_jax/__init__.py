"""Interleaved Head Attention (arXiv 2602.21371) for JAX and Flax."""

from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.ops.api import interleaved_head_attention
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

__all__ = [
    "HeadMixing",
    "InterleavedHeadAttention",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "Rope",
    "YarnScaling",
    "interleaved_head_attention",
]
