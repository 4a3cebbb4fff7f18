"""One layer of the decoder: pre-norm attention and feed-forward network around a residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from iha_jax import sharding
from iha_jax.models.config import AttentionKind, ModelConfig
from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.cache import AttentionCache
from iha_jax.nn.differential import DifferentialAttention
from iha_jax.nn.mlp import MLP
from iha_jax.nn.multi_head import MultiHeadAttention
from iha_jax.nn.norms import LayerNorm, RMSNorm
from iha_jax.nn.parameters import default_kernel_init, scaled, split_keys
from iha_jax.nn.simplicial import SimplicialAttention
from iha_jax.nn.talking_heads import TalkingHeadsAttention


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The normalisation of the configured kind over the model dimension."""
    norm = RMSNorm if config.norm == "rms" else LayerNorm
    return norm(
        config.model_dim,
        epsilon=config.norm_epsilon,
        dtype=config.compute_dtype,
        param_dtype=jnp.dtype(config.param_dtype),
    )


def make_attention(
    config: ModelConfig, kind: AttentionKind, key: Array, depth: int | Int[Array, ""] = 0
) -> InterleavedHeadAttention | MultiHeadAttention:
    """The attention layer of one kind; its depth, from 0, matters to differential attention.

    The output projection starts at ``1 / sqrt(2 L)`` of its fan-in scale: 2L sub-layers add to the residual stream,
    and their sum should be of the size of one, whatever the depth (as in GPT-2).
    """
    shared = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.dim_per_head,
        "window": config.window(kind),
        "normalize_qk": config.normalize_qk,
        "use_bias": config.has_bias("qkv"),
        "use_output_bias": config.has_bias("out"),
        "logits_soft_cap": config.logits_soft_cap,
        "dtype": config.compute_dtype,
        "param_dtype": jnp.dtype(config.param_dtype),
        "out_kernel_init": scaled(default_kernel_init, (2 * config.num_layers) ** -0.5),
        "rngs": key,
    }
    if kind == "simplicial":
        return SimplicialAttention(config.num_heads, config.model_dim, **shared)
    if kind != "iha":
        shared["rope"] = None if config.rope is None else config.rope.rope("token")
    if kind == "differential":
        shared |= {"num_kv_heads": config.kv_heads // 2, "head_dim": 2 * config.dim_per_head, "depth": depth}
        return DifferentialAttention(config.num_heads // 2, config.model_dim, **shared)
    if kind == "talking_heads":
        return TalkingHeadsAttention(config.num_heads, config.model_dim, **shared)
    if kind != "iha":
        return MultiHeadAttention(config.num_heads, config.model_dim, **shared)
    iha = config.iha
    return InterleavedHeadAttention(
        config.num_heads,
        config.model_dim,
        num_pseudo_heads=config.pseudo_heads,
        causal=iha.causal,
        rope=None if config.rope is None else config.rope.rope(iha.rope_positions),
        collapse=iha.collapse,
        mixing_init=iha.init,
        implementation=iha.implementation,
        **shared,
    )


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(
        self, config: ModelConfig, kind: AttentionKind, *, depth: int | Int[Array, ""] = 0, rngs: nnx.Rngs | Array
    ):
        """Makes the parameters of layer number `depth`, from 0, from one key."""
        keys = split_keys(rngs, "attention", "mlp")
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, kind, keys["attention"], depth)
        for norm in (self.attention.query_norm, self.attention.key_norm):
            if norm is not None:
                norm.epsilon = config.norm_epsilon
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(
            config.model_dim,
            config.hidden_dim,
            kind=config.mlp,
            use_bias=config.has_bias("mlp"),
            dtype=config.compute_dtype,
            param_dtype=jnp.dtype(config.param_dtype),
            out_kernel_init=scaled(default_kernel_init, (2 * config.num_layers) ** -0.5),
            rngs=keys["mlp"],
        )
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Maps the residual stream; without a key nothing is dropped."""
        keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        y = self.attention(self.attention_norm(x), positions=positions, segment_ids=segment_ids)
        x = x + dropout(y, self.dropout, keys[0])
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])

    def decode(
        self,
        x: Float[Array, "B t D"],
        cache: AttentionCache,
        positions: Int[Array, "B t"] | None = None,
        segment_ids: Int[Array, "B t"] | None = None,
    ) -> tuple[Float[Array, "B t D"], AttentionCache]:
        """Continues each row by a chunk."""
        y, cache = self.attention.decode(self.attention_norm(x), cache, positions, segment_ids)
        x = x + y
        with sharding.tokens_whole_if_uneven(x.shape[1]):
            return x + self.mlp(self.mlp_norm(x)), cache


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes elements with this probability and scales the rest up; x itself without a key."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))
