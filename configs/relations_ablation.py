"""Composing relations for longer, on one CPU core: is it steps, start, collapse or learning rate that decides?

Command:   python -m iha_jax.experiments.compare configs/relations_ablation.py --seeds 3
Hardware:  one CPU core, about half an hour a seed, and as long again for the last two with 40,000 examples
Data:      random ternary relations of 5 and 6 elements, generated
Expected:  docs/relations.md has what we found

Against the reduced form of ``configs/relations.py``: eight times as many examples, six times as many steps, at one
learning rate, and variants of IHA itself; then MHA and IHA with four times as many again, the paper's number.
"""

import dataclasses

from iha_jax.data.tasks import RelationComposition
from iha_jax.experiments import Comparison, Entry, Metric, OneLayer
from iha_jax.models import EncoderConfig

PLAIN = OneLayer(
    task=RelationComposition(arity=3, sizes=(5, 6)),
    model=EncoderConfig(attention="mha"),
    learning_rate=1e-3,
    train_examples=10_000,
    validation_examples=400,
    test_examples=2_000,
    batch_per_size=8,
    max_epochs=15,
)


def iha(mixing_lr_multiplier: float = 1.0, **options) -> OneLayer:
    model = EncoderConfig(**{"attention": "iha", "num_pseudo_heads": 4, **options})
    return dataclasses.replace(PLAIN, model=model, mixing_lr_multiplier=mixing_lr_multiplier)


def longer(experiment: OneLayer) -> OneLayer:
    return dataclasses.replace(experiment, train_examples=40_000, validation_examples=1_000, test_examples=5_000)


VARIANTS = {
    "MHA": PLAIN,
    "IHA, P = 4": iha(),
    "IHA, P = 4, mixing learning rate x 5": iha(mixing_lr_multiplier=5.0),
    "IHA, P = 4, collapse across heads": iha(collapse="across_heads"),
    "IHA, P = 8": iha(num_pseudo_heads=8),
    "IHA, P = 4, started at MHA": iha(mixing_init="exact"),
}
CONFIG = Comparison(
    name="relations_ablation",
    title="Composing relations in one layer, for longer",
    entries=(
        *(Entry(variant, "ternary, learning rate 0.001", experiment) for variant, experiment in VARIANTS.items()),
        *(Entry(variant, "ternary, 40,000 examples", longer(VARIANTS[variant])) for variant in ("MHA", "IHA, P = 4")),
    ),
    metrics=(
        Metric("test_accuracy", "test accuracy", percent=True, reference="always_the_same"),
        Metric("test_all_right", "whole relations right", percent=True),
        Metric("test_loss", "test loss", higher_is_better=False),
    ),
    baseline="MHA",
    note="Relations of 5 and 6 elements; 10,000 training, 400 validation and 2,000 test examples and 15 epochs of 625 "
    "steps, or 40,000, 1,000 and 5,000 examples and 15 epochs of 2,500 steps, at a constant learning rate; the "
    "parameters of the best validation loss are tested.",
)
