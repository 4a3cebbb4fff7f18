"""The paper's 2.4B model continued at 65,536 tokens, for RULER (arXiv 2602.21371, section 5).

Command:   python -m iha_jax.data.prepare --source.kind files --source.path 'long/*.jsonl' --output data/rows_64k \
             --tokenizer data/rows/tokenizer.json --sequence-length 65536
           python train.py configs/long_context_64k.py --mesh.context 8
Hardware:  as for the pretraining; the context axis cuts a row over devices
Data:      4 billion tokens: 4,000 steps of 16 sequences of 65,536 tokens (2^20 a step)

The paper names the length, not the recipe; this is ours. Windows stay what they were trained as, 10 tokens: what must
reach further are the global layers, so the rotary embedding is rescaled by YaRN from 8,192 tokens. (Its lengths count
tokens, also where positions are virtual.) The learning rate is a tenth of the pretraining's.
"""

import dataclasses
import pathlib

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.models import RopeConfig
from iha_jax.ops.rope import YarnScaling
from iha_jax.training.cli import load
from iha_jax.training.config import OptimizerConfig

BASE = load(str(pathlib.Path(__file__).with_name("paper_2b4.py")))
CONFIG = dataclasses.replace(
    BASE,
    name="long_context_64k",
    start_from="runs/paper_2b4",
    steps=4000,
    batch_size=16,
    # resolve(): the window is a number of the trained model, never worked out anew from another length.
    model=dataclasses.replace(
        BASE.model.resolve(),
        max_length=65_536,
        rope=RopeConfig(theta=500_000.0, scaling=YarnScaling(factor=8.0, original_max_position=8192)),
    ),
    data=DataConfig(
        sources=(SourceConfig("packed", "data/rows_64k"),),
        tokenizer="data/rows/tokenizer.json",
        sequence_length=65_536,
    ),
    optimizer=OptimizerConfig(peak_lr=8e-5, final_lr=8e-6, warmup_steps=100),
)
