"""Composing relations in one layer: plain, 2-simplicial and Interleaved Head Attention (the paper's appendix D).

Command:   python -m iha_jax.experiments.compare configs/relations.py --seeds 3
Hardware:  with an accelerator the paper's protocol; without one a reduced one, under an hour on one CPU core
Data:      random relations, generated
Expected:  the paper reports IHA ahead of the strongest baseline at both learning rates, by up to 4.7 points of test
           accuracy (binary) and 3.3 points (ternary); docs/relations.md has what we found
"""

from iha_jax.data.tasks import RelationComposition
from iha_jax.experiments import Comparison, Entry, Metric, OneLayer
from iha_jax.models import EncoderConfig

ATTENTIONS = {
    "MHA": {"attention": "mha"},
    "2-simplicial": {"attention": "simplicial"},
    "IHA, P = 4": {"attention": "iha", "num_pseudo_heads": 4},
    "IHA, P = 8": {"attention": "iha", "num_pseudo_heads": 8},
}
LEARNING_RATES = (1e-3, 1e-4)
METRICS = (
    Metric("test_accuracy", "test accuracy", percent=True, reference="always_the_same"),
    Metric("test_all_right", "whole relations right", percent=True),
    Metric("test_loss", "test loss", higher_is_better=False),
)
SHARED_NOTE = (
    "One layer, width 128, 8 heads, feed-forward 512, learned positions, no causal mask; Adam at a constant learning "
    "rate; the parameters of the best validation loss are tested. Every batch holds equally many relations of each "
    "size. "
)


def comparison(
    tasks: dict[str, RelationComposition], note: str, reduced: Comparison | None = None, **options
) -> Comparison:
    entries = []
    for name, task in tasks.items():
        # 64 positions as in the paper, where 8 x 8 is the largest; the binary task goes to 10 x 10.
        length = max(64, task.max_length)
        for rate in LEARNING_RATES:
            for variant, attention in ATTENTIONS.items():
                experiment = OneLayer(
                    task=task, model=EncoderConfig(max_length=length, **attention), learning_rate=rate, **options
                )
                entries.append(Entry(variant, f"{name}, learning rate {rate:g}", experiment))
    return Comparison(
        name="relations",
        title="Composing relations in one layer",
        entries=tuple(entries),
        metrics=METRICS,
        baseline="MHA",
        note=SHARED_NOTE + note,
        reduced=reduced,
    )


REDUCED = comparison(
    {"ternary": RelationComposition(arity=3, sizes=(5, 6))},
    "Reduced for a CPU: relations of 5 and 6 elements instead of 5 to 8; 1,200 training, 200 validation and 1,000 "
    "test examples instead of 40,000, 5,000 and 5,000; at most 10 epochs.",
    train_examples=1_200,
    validation_examples=200,
    test_examples=1_000,
    batch_per_size=4,
    max_epochs=10,
)
CONFIG = comparison(
    {"binary": RelationComposition(arity=2), "ternary": RelationComposition(arity=3)},
    "The paper's protocol: 40,000 training, 5,000 validation and 5,000 test examples, patience of 10 epochs.",
    reduced=REDUCED,
)
