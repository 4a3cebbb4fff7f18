"""A run small enough to train in a test."""

import dataclasses

import pytest

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)


@pytest.fixture
def tiny(tmp_path):
    """Makes configurations of a two-layer model on text in the test's folder; keywords replace fields.

    One device, though there are more: they have tests of their own.
    """
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(str(i * j % 97) for j in range(150)))
    config = TrainConfig(
        name="run",
        directory=str(tmp_path / "runs"),
        steps=6,
        batch_size=4,
        model=ModelConfig(
            vocab_size=258,
            max_length=32,
            num_layers=2,
            model_dim=16,
            num_heads=2,
            pattern=("iha", "mha"),
            iha=IHAConfig(num_pseudo_heads=2, window=4),
        ),
        data=DataConfig(
            sources=(SourceConfig("files", str(text)),), sequence_length=32, held_out_fraction=0.2, streams=4
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
        checkpoint=CheckpointConfig(every=2),
        evaluation=EvaluationConfig(every=3, rows=4),
        log=LogConfig(every=1),
        mesh=MeshConfig(fsdp=1),
    )
    return lambda **changes: dataclasses.replace(config, **changes)
