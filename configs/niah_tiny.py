"""Needles in a haystack of words, small enough to train on: IHA and MHA at equal FLOPs.

Command:   python -m iha_jax.experiments.compare configs/niah_tiny.py --seeds 3
Hardware:  a few minutes of one CPU core for each run
Data:      generated
Expected:  docs/niah.md has what we found
"""

import dataclasses

from iha_jax.data.tasks import NeedleInHaystack
from iha_jax.experiments import Comparison, Entry, Metric, NeedleSearch
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.training.config import OptimizerConfig

TASK = NeedleInHaystack(length=96, num_needles=8, num_questions=4, key_words=32, value_words=16, filler_words=32)
_MHA = ModelConfig(
    vocab_size=TASK.vocab_size,
    max_length=TASK.length,
    num_layers=2,
    model_dim=64,
    num_heads=4,
    mlp_dim=128,
    tied_embeddings=False,
    pattern=("mha",),
)
MODELS = {
    "MHA": _MHA,
    # A window of T / (2 P^2) = 12 words costs what global attention does; with the mixing 1.5% more in all.
    "IHA, P = 2": dataclasses.replace(_MHA, pattern=("iha", "mha"), iha=IHAConfig(num_pseudo_heads=2, window=12)),
}

CONFIG = Comparison(
    name="niah_tiny",
    title="Needles in a haystack of words",
    entries=tuple(
        Entry(
            variant,
            "4 needles in 96 words",
            NeedleSearch(
                task=TASK,
                model=model,
                optimizer=OptimizerConfig(peak_lr=5e-3, final_lr=2.5e-4, warmup_steps=50),
                steps=1000,
                batch_size=32,
            ),
        )
        for variant, model in MODELS.items()
    ),
    metrics=(
        Metric(
            "retrieval_accuracy",
            "retrieval accuracy",
            percent=True,
            reference="chance",
            reference_label="by chance",
        ),
        Metric("retrieval_loss", "loss of the answers", higher_is_better=False),
    ),
    baseline="MHA",
    note="Two layers of width 64 with four heads, haystacks of 96 words with four needles, all of which are asked "
    "about; the loss is on the answers alone.",
)
