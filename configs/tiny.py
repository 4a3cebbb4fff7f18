"""A byte-level language model of Python code with Interleaved Head Attention, in minutes on a laptop.

Command:   python train.py configs/tiny.py
"""

from iha_jax.data import DataConfig
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, SampleConfig, TrainConfig

CONFIG = TrainConfig(
    name="tiny",
    steps=400,
    batch_size=8,
    model=ModelConfig(
        vocab_size=258,
        max_length=512,
        num_layers=5,
        model_dim=256,
        num_heads=4,
        pattern=("iha", "iha", "iha", "iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=4, window="auto"),
    ),
    data=DataConfig(sequence_length=512, held_out_fraction=0.02),
    optimizer=OptimizerConfig(peak_lr=2e-3, final_lr=2e-4, warmup_steps=40),
    checkpoint=CheckpointConfig(every=200),
    evaluation=EvaluationConfig(every=100, rows=32, final_rows=128),
    sample=SampleConfig(prompt="def main(", tokens=200),
)
