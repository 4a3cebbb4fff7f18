"""Models: a decoder-only language model whose layers attend in any pattern of kinds, and a one-layer encoder."""

from iha_jax.models.config import IHAConfig, MHAConfig, ModelConfig, RopeConfig
from iha_jax.models.encoder import Encoder, EncoderConfig
from iha_jax.models.transformer import Transformer, TransformerCache, stack_parameters, unstack_parameters

__all__ = [
    "Encoder",
    "EncoderConfig",
    "IHAConfig",
    "MHAConfig",
    "ModelConfig",
    "RopeConfig",
    "Transformer",
    "TransformerCache",
    "stack_parameters",
    "unstack_parameters",
]
