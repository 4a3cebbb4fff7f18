"""The five mechanisms compared on text, at equal FLOPs: this one is global multi-head attention, the reference.

Command:   python train.py configs/compare/global_mha.py
Others:    global_local.py, talking_heads.py, differential.py, iha.py
Hardware:  2 CPU cores, 2 GB of memory, minutes; or any accelerator
Data:      the running interpreter's own library sources, 12 MB; nothing is downloaded
Account:   python -m iha_jax.training.flop_matching configs/compare/global_mha.py configs/compare/iha.py

The other four cost as many model FLOPs per token (visible pairs, mixing and collapse included) within 2%. What each had
to change for that stands in its file; data, optimizer, depth, model dimension and heads are the same in all.
"""

from iha_jax.data import DataConfig
from iha_jax.models import ModelConfig
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainConfig

CONFIG = TrainConfig(
    name="compare_global_mha",
    steps=240,
    batch_size=4,
    model=ModelConfig(
        vocab_size=258,
        max_length=512,
        num_layers=5,
        model_dim=256,
        num_heads=8,
        mlp_dim=1024,
        tied_embeddings=False,
        pattern=("mha",),
    ),
    data=DataConfig(sequence_length=512, held_out_fraction=0.02),
    optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=20),
    checkpoint=CheckpointConfig(every=80),
    evaluation=EvaluationConfig(every=80, rows=16, final_rows=64),
)
