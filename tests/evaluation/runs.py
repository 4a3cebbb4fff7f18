"""A run's directory with random parameters, for what takes one."""

import jax

from iha_jax.data import DataConfig
from iha_jax.models import IHAConfig, ModelConfig, Transformer
from iha_jax.training.checkpoint import save_params
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.serialization import to_json
from iha_jax.training.state import ModelFunctions


def make_run(directory, length):
    """A decoder of bytes for rows of this length, in a new directory."""
    model = ModelConfig(
        vocab_size=258,
        max_length=length,
        num_layers=2,
        model_dim=16,
        num_heads=2,
        pattern=("iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=2, window=4),
        tied_embeddings=False,
    )
    config = TrainConfig(
        name=directory.name,
        directory=str(directory.parent),
        model=model,
        data=DataConfig(sequence_length=length, chat_template="plain"),
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    directory.mkdir()
    save_params(directory, ModelFunctions(Transformer(model, rngs=jax.random.key(1))).params)
    (directory / "config.json").write_text(to_json(config))
    return directory
