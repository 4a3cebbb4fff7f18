"""Five mechanisms in small language models at equal FLOPs: on text, and on text with multi-key recall.

Command:   python -m iha_jax.experiments.compare configs/compare_lm.py --seeds 3
Hardware:  with an accelerator the models of ``configs/compare``; without one a reduced form, about half an hour of
           one CPU core for three seeds
Data:      the running interpreter's own library sources, 12 MB, and generated pairs of key and value
Expected:  docs/comparison.md has what we found

All cost as many model FLOPs per token as global attention within 2%; what each had to change for that stands in
``configs/compare`` and, for the reduced form, below.
"""

import dataclasses
import pathlib

from iha_jax.data.tasks import MultiKeyRecall
from iha_jax.experiments import Comparison, Entry, LanguageModel, Metric
from iha_jax.models import IHAConfig, MHAConfig, ModelConfig
from iha_jax.training.cli import load
from iha_jax.training.config import OptimizerConfig

BYTE_TOKENS = 258
METRICS = (
    Metric("recall_accuracy", "recall accuracy", percent=True, reference="recall_chance", reference_label="by chance"),
    Metric(
        "bits_per_byte",
        "held-out bits per byte",
        higher_is_better=False,
        reference="bigram_bits_per_byte",
        reference_label="of a byte bigram",
    ),
    Metric("recall_loss", "loss of recall", higher_is_better=False),
)


def recall_task(length: int, pairs: int, tokens: int) -> MultiKeyRecall:
    """All pairs are asked for, in another order; keys and values have tokens of their own, text is the filler."""
    return MultiKeyRecall(
        length=length,
        num_keys=pairs,
        num_queries=pairs,
        key_tokens=tokens,
        value_tokens=tokens,
        num_fillers=1,
        first_token=BYTE_TOKENS,
    )


def comparison(
    models: dict[str, ModelConfig],
    task: MultiKeyRecall,
    on_text: dict,
    with_recall: dict,
    note: str,
    reduced: Comparison | None = None,
    **options,
) -> Comparison:
    entries = []
    settings = {
        "text": {**options, **on_text},
        "text and recall": {**options, **with_recall, "recall": task},
    }
    for setting, chosen in settings.items():
        for variant, model in models.items():
            # One vocabulary in both settings, so that a model costs the same in both.
            model = dataclasses.replace(model, vocab_size=task.vocab_size)
            experiment = LanguageModel(model=model, sequence_length=task.length, **chosen)
            entries.append(Entry(variant, setting, experiment))
    return Comparison(
        name="compare_lm",
        title="Small language models at equal FLOPs",
        entries=tuple(entries),
        metrics=METRICS,
        baseline="Global MHA",
        note="Bytes of Python code; in the second setting half of the loss is on pairs of key and value strewn into "
        "text, all of which are asked for at the end. Model FLOPs per token are those of Global MHA within 2%. " + note,
        reduced=reduced,
    )


# --------------------------------------------------------------------------------------------------------- reduced

_SMALL = ModelConfig(
    max_length=64, num_layers=5, model_dim=64, num_heads=4, mlp_dim=256, tied_embeddings=False, pattern=("mha",)
)
SMALL_MODELS = {
    "Global MHA": _SMALL,
    "Global+Local": dataclasses.replace(
        _SMALL, pattern=("local",) * 4 + ("mha",), local=MHAConfig(window=4), mlp_dim=280
    ),
    "Talking Heads": dataclasses.replace(_SMALL, pattern=("talking_heads",), mlp_dim=248),
    "Diff Transformer": dataclasses.replace(_SMALL, pattern=("differential",)),
    "IHA, P = 2": dataclasses.replace(
        _SMALL, pattern=("iha",) * 4 + ("mha",), iha=IHAConfig(num_pseudo_heads=2, window=8)
    ),
}
REDUCED = comparison(
    SMALL_MODELS,
    recall_task(length=64, pairs=4, tokens=16),
    on_text={"batch_size": 16, "steps": 600, "evaluate_every": 50},
    with_recall={"batch_size": 6, "recall_rows": 26, "steps": 900, "evaluate_every": 100},
    note="Reduced for a CPU: five layers of width 64 with four heads, rows of 64 bytes; 600 steps of 16 rows on text, "
    "900 steps of 6 rows of text and 26 of recall (4 pairs, 16 keys and 16 values; a model that knows which values "
    "occur but not where reaches 25 %).",
    optimizer=OptimizerConfig(peak_lr=5e-3, final_lr=2.5e-4, warmup_steps=30),
)

# ------------------------------------------------------------------------------------------------------------ full

_DIRECTORY = pathlib.Path(__file__).with_name("compare")
MODELS = {
    name: load(str(_DIRECTORY / file)).model
    for name, file in (
        ("Global MHA", "global_mha.py"),
        ("Global+Local", "global_local.py"),
        ("Talking Heads", "talking_heads.py"),
        ("Diff Transformer", "differential.py"),
        ("IHA, P = 4", "iha.py"),
    )
}
CONFIG = comparison(
    MODELS,
    recall_task(length=512, pairs=32, tokens=64),
    on_text={"batch_size": 32, "steps": 4000},
    with_recall={"batch_size": 16, "recall_rows": 16, "steps": 4000},
    note="The models of configs/compare: five layers of width 256 with eight heads, rows of 512 bytes; 4,000 steps of "
    "32 rows, in the second setting half of them of recall (32 pairs, 64 keys and 64 values).",
    reduced=REDUCED,
    optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=100),
    evaluate_every=250,
)
