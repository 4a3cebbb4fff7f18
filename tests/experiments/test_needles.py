"""Learning to find needles: rows, scores, the same numbers after any interruption, equal FLOPs as shipped."""

import dataclasses
import pathlib

import numpy as np
import pytest

from iha_jax.data.tasks import NeedleInHaystack
from iha_jax.experiments import Comparison, NeedleSearch
from iha_jax.models import ModelConfig
from iha_jax.training.cli import config_in
from iha_jax.training.config import OptimizerConfig
from iha_jax.training.flops import account
from tests.experiments.grids import assert_kills_change_nothing

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "niah_tiny.py"
TASK = NeedleInHaystack(length=11, num_needles=2, num_questions=2, key_words=4, value_words=4, filler_words=2)
EXPERIMENT = NeedleSearch(
    task=TASK,
    model=ModelConfig(
        vocab_size=TASK.vocab_size, max_length=11, num_layers=1, model_dim=8, num_heads=2, pattern=("mha",)
    ),
    optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
    steps=6,
    batch_size=4,
    test_rows=9,
    evaluate_every=2,
)


def test_rows():
    rows = EXPERIMENT.step_rows(1, 2)
    assert rows["inputs"].shape == (4, 11)
    np.testing.assert_allclose(rows["weights"][rows["weights"] > 0], 1 / 8)
    assert (rows["weights"] > 0).sum() == 8
    for other in (EXPERIMENT.step_rows(1, 3), EXPERIMENT.step_rows(2, 2)):
        assert (other["inputs"] != rows["inputs"]).any()
    np.testing.assert_array_equal(EXPERIMENT.step_rows(1, 2)["inputs"], rows["inputs"])
    assert set(np.unique(EXPERIMENT.test()["weights"])) == {0, 1}


@pytest.mark.slow
def test_a_run_killed_after_every_evaluation_ends_with_the_same_numbers(tmp_path, monkeypatch):
    whole, starts = assert_kills_change_nothing(EXPERIMENT, tmp_path, monkeypatch)
    assert starts == 3
    assert [step for step, _ in whole.curves["training loss"]] == [2, 4, 6]
    assert whole.metrics["retrieval_accuracy"] == whole.curves["retrieval accuracy"][-1][1]
    assert whole.metrics["chance"] == 1 / 4
    assert whole.metrics["one_of_the_needles"] == 1 / 2
    assert whole.notes["answers_tested"] == 18
    assert whole.costs["parameters"] == account(EXPERIMENT.model).parameters


def test_when_it_was_learnt():
    def steps(*accuracies):
        return EXPERIMENT._steps_to(0.9, [(2 * i, x) for i, x in enumerate(accuracies, 1)])

    assert steps(0.95, 0.9, 1.0) == 2
    assert steps(0.5, 0.9, 1.0) == 4
    assert steps(0.95, 0.5, 1.0) == 6
    assert steps(1.0, 1.0, 0.5) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 4}, "evaluate_every must divide steps=6, got 4"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"model": dataclasses.replace(EXPERIMENT.model, vocab_size=8)}, "hold the task's 12 words, got 8"),
    ],
)
def test_wrong_experiments(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EXPERIMENT, **changes)


def test_what_ships_is_matched():
    comparison = config_in(SHIPPED, Comparison)
    counted = {e.variant: account(e.experiment.model, tokens=e.experiment.task.length) for e in comparison.entries}
    reference = counted[comparison.baseline].model_training_per_token
    for one in counted.values():
        assert one.model_training_per_token == pytest.approx(reference, rel=0.02)
