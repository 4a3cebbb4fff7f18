"""RULER (arXiv 2404.06654): questions about long texts, made at any length for any tokenizer, and scored.

    for sample in samples("niah_multikey_1", load_tokenizer("bytes"), length=4096, count=20, depths=(0, 50, 100)):
        sample.score(answer(sample.text))

``python -m iha_jax.evaluation.ruler CHECKPOINT`` measures a trained model.
"""

from iha_jax.evaluation.ruler.runner import Plan, Record, evaluate
from iha_jax.evaluation.ruler.samples import Sample, score
from iha_jax.evaluation.ruler.tasks import TASKS, samples

__all__ = ["TASKS", "Plan", "Record", "Sample", "evaluate", "samples", "score"]
