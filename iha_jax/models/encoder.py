"""A one-layer bidirectional encoder with a logit per token: the model of the relation experiment (paper section 6)."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.embedding import Embedding
from iha_jax.nn.init import MixingScheme
from iha_jax.nn.mlp import MLP, MLPKind
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.norms import LayerNorm
from iha_jax.nn.parameters import (
    default_bias_init,
    default_kernel_init,
    kernel,
    parameter,
    require_positive,
    split_keys,
)
from iha_jax.nn.simplicial import SimplicialAttention
from iha_jax.ops.mixing import Collapse
from iha_jax.ops.types import Implementation

EncoderAttention = Literal["mha", "iha", "simplicial"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """What the encoder is made of; the defaults are the paper's model of ternary relations.

    Attributes:
      attention: which attention.
      vocab_size: V.
      max_length: learned positions, the most tokens of an input.
      model_dim: D.
      num_heads: N.
      mlp_dim: of the feed-forward network.
      mlp: its activation.
      num_pseudo_heads: P, for IHA.
      collapse: for IHA.
      mixing_init: for IHA.
      implementation: for IHA.
      dtype: the computation's.
    """

    attention: EncoderAttention = "mha"
    vocab_size: int = 2
    max_length: int = 64
    model_dim: int = 128
    num_heads: int = 8
    mlp_dim: int = 512
    mlp: MLPKind = "gelu"
    num_pseudo_heads: int = 8
    collapse: Collapse = "per_head"
    mixing_init: MixingScheme = "live"
    implementation: Implementation = None
    dtype: str = "float32"

    def __post_init__(self):
        """Checks what no layer checks.

        Raises:
          ValueError: an unknown attention, or no positions.
        """
        if self.attention not in get_args(EncoderAttention):
            raise ValueError(f"attention must be one of {get_args(EncoderAttention)}, got {self.attention!r}.")
        require_positive("EncoderConfig", max_length=self.max_length)


class Encoder(nnx.Module):
    """Embedding and learned positions, attention, feed-forward network, one logit per token.

    Normalised after each residual sum, as in the first transformers: with two norms in one layer, nothing else
    would normalise what the last projection reads. Biases everywhere; attention sees all tokens of its segment, both
    ways, without rotary embedding.

        model = Encoder(EncoderConfig(attention="iha"), rngs=nnx.Rngs(0))
        logits = model(tokens)                          # [B, T] -> [B, T]
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs | Array):
        """Makes the parameters.

        Args:
          config: of the model.
          rngs: a ``params`` stream, or a key.
        """
        self.config = config
        dtype: DTypeLike = jnp.dtype(config.dtype)
        keys = split_keys(rngs, "embedding", "positions", "attention", "mlp", "head", "head_bias")
        # Of unit size both: a token says one bit, and where it stands matters as much.
        unit = nnx.initializers.normal(1.0)
        self.embedding = Embedding(
            config.vocab_size, config.model_dim, dtype=dtype, embedding_init=unit, rngs=keys["embedding"]
        )
        self.positions = Embedding(
            config.max_length, config.model_dim, dtype=dtype, embedding_init=unit, rngs=keys["positions"]
        )
        self.attention = _make_attention(config, keys["attention"])
        self.attention_norm = LayerNorm(config.model_dim)
        self.mlp = MLP(config.model_dim, config.mlp_dim, kind=config.mlp, use_bias=True, dtype=dtype, rngs=keys["mlp"])
        self.mlp_norm = LayerNorm(config.model_dim)
        head = kernel(keys["head"], default_kernel_init, (config.model_dim,), (1,), ("embed", None), jnp.float32)
        self.logit_kernel = head
        self.logit_bias = parameter(default_bias_init(keys["head_bias"], (1,), jnp.float32), (None,))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What attention reads: tokens and positions, summed.

        Raises:
          ValueError: more tokens than positions.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"tokens must be [batch, tokens] with at most max_length={self.config.max_length} tokens, got shape "
                f"{tokens.shape}."
            )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        return self.embedding(tokens) + self.positions(positions)

    def __call__(self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
        """A logit per token.

        Args:
          tokens: integers ``[B, T]`` in ``0 … V-1``, T at most ``max_length``.
          segment_ids: int32 ``[B, T]``; 0 is padding. Default all 1.

        Returns:
          ``[B, T]`` in float32.
        """
        x = self.embed(tokens)
        x = self.attention_norm(x + self.attention(x, segment_ids=segment_ids))
        x = self.mlp_norm(x + self.mlp(x))
        logits = jnp.einsum("btd,do->bto", x, self.logit_kernel[...].astype(x.dtype))[..., 0]
        return logits.astype(jnp.float32) + self.logit_bias[...][None]


def _make_attention(config: EncoderConfig, key: Array) -> MultiHeadAttention | InterleavedHeadAttention:
    shared = {"rope": None, "use_bias": True, "dtype": jnp.dtype(config.dtype), "rngs": key}
    match config.attention:
        case "mha":
            return MultiHeadAttention(config.num_heads, config.model_dim, causal=False, **shared)
        case "simplicial":
            return SimplicialAttention(config.num_heads, config.model_dim, causal=False, **shared)
        case "iha":
            return InterleavedHeadAttention(
                config.num_heads,
                config.model_dim,
                num_pseudo_heads=config.num_pseudo_heads,
                causal=None,
                collapse=config.collapse,
                mixing_init=config.mixing_init,
                implementation=config.implementation,
                **shared,
            )
