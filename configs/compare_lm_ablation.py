"""What IHA's choices are worth in a small language model: positions, causality, collapse, P, start, learning rate.

Command:   python -m iha_jax.experiments.compare configs/compare_lm_ablation.py --seeds 3
Hardware:  one CPU core, about an hour and a half for three seeds
Data:      as the reduced form of ``configs/compare_lm.py``
Expected:  docs/comparison.md has what we found

Each variant changes one thing of the reduced form's IHA layers (P = 2, window 8, both on virtual positions) and,
unless its name says that the window is kept, keeps ``window * P^2``, on which the cost of the scores depends. "P = 1,
window 2" asks whether the gain of "P = 4, window 2" is the window's.
"""

import dataclasses
import pathlib

from iha_jax.experiments import Comparison, Entry, LanguageModel
from iha_jax.training.cli import config_in

COMPARED = config_in(pathlib.Path(__file__).with_name("compare_lm.py"), Comparison).reduced
assert COMPARED is not None  # for type checkers
BASELINE = "IHA, P = 2"

# Options of the IHA layers that differ from the baseline's.
LAYERS = {
    BASELINE: {},
    "RoPE on tokens": {"rope_positions": "token"},
    "causal on tokens": {"causal": "token"},
    "RoPE and causal on tokens": {"rope_positions": "token", "causal": "token"},
    "RoPE on tokens, started at MHA": {"rope_positions": "token", "init": "exact"},
    "collapse across heads": {"collapse": "across_heads"},
    "P = 1, window 32": {"num_pseudo_heads": 1, "window": 32},
    "P = 1, window 2": {"num_pseudo_heads": 1, "window": 2},
    "P = 3, window 4": {"num_pseudo_heads": 3, "window": 4},
    "P = 4, window 2": {"num_pseudo_heads": 4, "window": 2},
    "P = 1, window kept": {"num_pseudo_heads": 1},
    "P = 4, window kept": {"num_pseudo_heads": 4},
}
MIXING_LEARNING_RATES = {"mixing learning rate x 0.2": 0.2, "mixing learning rate x 5": 5.0}


def variants(experiment: LanguageModel) -> dict[str, LanguageModel]:
    """All of them, of one setting's baseline."""
    model, optimizer = experiment.model, experiment.optimizer
    layers = {
        name: dataclasses.replace(
            experiment, model=dataclasses.replace(model, iha=dataclasses.replace(model.iha, **options))
        )
        for name, options in LAYERS.items()
    }
    rates = {
        name: dataclasses.replace(experiment, optimizer=dataclasses.replace(optimizer, mixing_lr_multiplier=factor))
        for name, factor in MIXING_LEARNING_RATES.items()
    }
    return layers | rates


CONFIG = Comparison(
    name="compare_lm_ablation",
    title="IHA's choices in a small language model",
    entries=tuple(
        Entry(variant, entry.setting, experiment)
        for entry in COMPARED.entries
        if entry.variant == BASELINE and isinstance(entry.experiment, LanguageModel)
        for variant, experiment in variants(entry.experiment).items()
    ),
    metrics=COMPARED.metrics,
    baseline=BASELINE,
    note="Four layers of IHA and a global one, width 64, four heads, rows of 64 bytes; data, steps and learning rate "
    "of the reduced form of configs/compare_lm.py. Each variant changes one thing.",
)
