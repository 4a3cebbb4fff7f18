"""The paper's 2.4B model and recipe (arXiv 2602.21371, section 5 and its appendix), every number of it.

Command:   python -m iha_jax.data.prepare --source.kind files --source.path 'corpus/*.jsonl' --output data/rows \
             --tokenizer llama3/tokenizer.json --sequence-length 8192
           python train.py configs/paper_2b4.py
Hardware:  128 accelerators in the paper, parameters fully sharded
Data:      240 billion tokens: 240,000 steps of 128 sequences of 8,192 tokens (2^20 a step)

26 layers in groups of five: 21 of sliding-window IHA, 5 of global MHA, the last one local. The window is
floor(8192 / (2 · 20²)) = 10 tokens. The feed-forward network is ungated and the embeddings are tied: only so does
the parameter count come to the 2.4B (2.37B) that the paper states.
"""

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.models import IHAConfig, ModelConfig, RopeConfig
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainConfig

CONFIG = TrainConfig(
    name="paper_2b4",
    steps=240_000,
    batch_size=128,
    model=ModelConfig(
        vocab_size=128_256,
        max_length=8192,
        num_layers=26,
        model_dim=2560,
        num_heads=20,
        head_dim=128,
        mlp_dim=10_240,
        mlp="gelu",
        tied_embeddings=True,
        pattern=("iha", "iha", "iha", "iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=20, window="auto", causal="virtual", rope_positions="virtual"),
        rope=RopeConfig(theta=500_000.0),
        dtype="bfloat16",
        scan_layers=True,
        remat="full",
    ),
    data=DataConfig(
        sources=(SourceConfig("packed", "data/rows"),), tokenizer="data/rows/tokenizer.json", sequence_length=8192
    ),
    optimizer=OptimizerConfig(
        peak_lr=8e-4, final_lr=8e-6, warmup_steps=1000, b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=1.0
    ),
    checkpoint=CheckpointConfig(every=1000, keep=3),
    evaluation=EvaluationConfig(every=2000, rows=1024),
)
