"""The paper's 2.4B model fine-tuned on reasoning traces (arXiv 2602.21371, section 5): OpenThoughts, answers only.

Command:   python train.py configs/sft_openthoughts.py
           with another model: --start-from RUN and --model.… of that run; with files instead of the hub:
           --data.sources.0.kind files --data.sources.0.path 'openthoughts/*.parquet'
Hardware:  as for the pretraining
Data:      8 billion tokens as in the paper: 7,630 steps of 128 rows of 8,192 tokens

Conversations are kept whole and apart (``packing="fit"``, segment ids), loss is on the assistant's tokens only. The
paper gives the data and their amount, the recipe is ours. Afterwards:

    python -m iha_jax.evaluation.benchmarks runs/sft_openthoughts --task gsm8k --samples 16
"""

import dataclasses
import pathlib

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.training.cli import load
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig

BASE = load(str(pathlib.Path(__file__).with_name("paper_2b4.py")))
CONFIG = dataclasses.replace(
    BASE,
    name="sft_openthoughts",
    start_from="runs/paper_2b4",
    steps=7630,
    data=DataConfig(
        sources=(SourceConfig("hub", "open-thoughts/OpenThoughts-114k", format="chat"),),
        tokenizer="data/rows/tokenizer.json",
        sequence_length=8192,
        packing="fit",
        chat_template="chatml",
        held_out_fraction=0.005,
    ),
    optimizer=OptimizerConfig(peak_lr=2e-5, final_lr=2e-6, warmup_steps=200, weight_decay=0.0),
    checkpoint=CheckpointConfig(every=500, keep=2),
    evaluation=EvaluationConfig(every=500, rows=256),
)
