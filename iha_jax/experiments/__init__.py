"""Comparisons: a grid of experiments and seeds, run to the end whatever happens, and a page about it.

python -m iha_jax.experiments.compare configs/relations.py --seeds 3
"""

from iha_jax.experiments.comparison import Comparison, Entry, Experiment, Metric, Outcome
from iha_jax.experiments.language_model import LanguageModel
from iha_jax.experiments.needles import NeedleSearch
from iha_jax.experiments.one_layer import OneLayer

__all__ = ["Comparison", "Entry", "Experiment", "LanguageModel", "Metric", "NeedleSearch", "OneLayer", "Outcome"]
