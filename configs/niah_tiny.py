"""Needles in a haystack of words, small enough to train on: IHA and MHA at equal FLOPs.

Command:   python -m iha_jax.experiments.compare configs/niah_tiny.py --seeds 3
Hardware:  a few minutes of one CPU core for each run
Data:      generated
Expected:  docs/niah.md has what we found
"""

import dataclasses

from iha_jax.data.tasks import NeedleInHaystack
from iha_jax.experiments import Comparison, Entry, Metric, NeedleSearch
from iha_jax.models import IHAConfig, MHAConfig, ModelConfig
from iha_jax.models.config import RopeConfig
from iha_jax.training.config import OptimizerConfig

TASK = NeedleInHaystack(length=48, num_needles=4, num_questions=4, key_words=16, value_words=16, filler_words=16)
_MHA = ModelConfig(
    vocab_size=TASK.vocab_size,
    max_length=TASK.length,
    num_layers=2,
    model_dim=64,
    num_heads=4,
    mlp_dim=128,
    tied_embeddings=False,
    pattern=("mha",),
    rope=RopeConfig(theta=100.0),  # more than that would leave heads of 16 few frequencies that tell neighbours apart
)
MODELS = {
    "MHA": _MHA,
    # Windows alone, to tell them from pseudo-heads; the feed-forward width takes up what they save.
    "Local, then MHA": dataclasses.replace(_MHA, pattern=("local", "mha"), local=MHAConfig(window=6), mlp_dim=136),
    # A window of T / (2 P^2) words costs what global attention does, but for the mixing.
    "IHA, P = 2, then MHA": dataclasses.replace(
        _MHA, pattern=("iha", "mha"), iha=IHAConfig(num_pseudo_heads=2, window=6)
    ),
}

CONFIG = Comparison(
    name="niah_tiny",
    title="Needles in a haystack of words",
    entries=tuple(
        Entry(
            variant,
            "4 needles in 48 words",
            NeedleSearch(
                task=TASK,
                model=model,
                optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1.5e-4, warmup_steps=50, weight_decay=0.0),
                steps=800,
                batch_size=64,
                evaluate_every=25,
            ),
        )
        for variant, model in MODELS.items()
    ),
    metrics=(
        Metric(
            "retrieval_accuracy",
            "retrieval accuracy",
            percent=True,
            reference="one_of_the_needles",
            reference_label="by guessing one of the needles' values",
        ),
        Metric("steps_to_90_percent", "steps to 90 % (all of them if never)", higher_is_better=False),
        Metric("retrieval_loss", "loss of the answers", higher_is_better=False),
    ),
    baseline="MHA",
    note="Two layers of width 64 with four heads, 48 words with four needles and four questions at the end; 800 steps "
    "of 64 rows, loss on the answers alone. Blind guessing is right once in 16 times, guessing one of the four values "
    "that occur once in 4. Model FLOPs per token are those of MHA within 2%.",
)
