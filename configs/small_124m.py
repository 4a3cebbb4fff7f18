"""A 124M-parameter model on one accelerator: GPT-2 small's size, with the paper's pattern of layers.

Command:   python -m iha_jax.data.prepare --source.kind files --source.path 'corpus/*.jsonl' --output data/rows \
             --train-tokenizer 32768 --sequence-length 2048
           python train.py configs/small_124m.py
Hardware:  one Colab TPU (v5e) or one GPU of 16 GB and more; bfloat16 compute, float32 parameters
Data:      rows in ``data/rows``, made by the first command from text of your own
Length:    20,000 steps of 65,536 tokens: 1.3 billion tokens

With T = 2048 and P = 8 the window is T / (2 P²) = 16 tokens.
"""

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainConfig

CONFIG = TrainConfig(
    name="small_124m",
    steps=20_000,
    batch_size=32,
    micro_batches=4,
    z_loss=1e-4,
    model=ModelConfig(
        vocab_size=32_768,
        max_length=2048,
        num_layers=14,
        model_dim=768,
        num_heads=8,
        mlp_dim=3072,
        pattern=("iha", "iha", "iha", "iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=8, window="auto"),
        dtype="bfloat16",
        scan_layers=True,
        remat="dots",
    ),
    data=DataConfig(
        sources=(SourceConfig("packed", "data/rows"),), tokenizer="data/rows/tokenizer.json", sequence_length=2048
    ),
    optimizer=OptimizerConfig(peak_lr=1e-3, final_lr=1e-5, warmup_steps=500),
    checkpoint=CheckpointConfig(every=1000),
    evaluation=EvaluationConfig(every=500, rows=256),
)
