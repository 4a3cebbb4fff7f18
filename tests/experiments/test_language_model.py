"""Small language models: rows and losses by hand, the same numbers after any interruption, equal FLOPs as shipped."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.data import SourceConfig
from iha_jax.data.tasks import MultiKeyRecall
from iha_jax.experiments import Comparison, LanguageModel
from iha_jax.experiments.text import load_text
from iha_jax.models import IHAConfig, ModelConfig, Transformer
from iha_jax.training.cli import config_in
from iha_jax.training.config import OptimizerConfig
from iha_jax.training.flops import account
from iha_jax.training.state import ModelFunctions
from tests.experiments.grids import assert_kills_change_nothing

T, SHIPPED = 16, pathlib.Path(__file__).parents[2] / "configs" / "compare_lm.py"
# A collection of documents that are easily told apart: each is one letter, many times, with a byte beyond ASCII.
LETTERS = "abcdefghijklmnopqrst"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for letter in LETTERS:
        (folder / f"{letter}.txt").write_text("\u00e9" + letter * 60)
    return LanguageModel(
        model=ModelConfig(
            vocab_size=258 + 1 + 8 + 8,
            max_length=T,
            num_layers=2,
            model_dim=8,
            num_heads=2,
            pattern=("iha", "mha"),
            iha=IHAConfig(num_pseudo_heads=2, window=4, implementation="reference"),
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
        steps=6,
        batch_size=3,
        sequence_length=T,
        recall=MultiKeyRecall(
            length=T, num_keys=3, num_queries=2, key_tokens=8, value_tokens=8, num_fillers=1, first_token=258
        ),
        recall_rows=4,
        recall_weight=0.5,
        source=SourceConfig(kind="files", path=str(folder)),
        held_out_fraction=0.3,
        held_out_rows=7,
        recall_test_rows=9,
        evaluate_every=2,
    )


def silent(line):
    pass


def by_hand(experiment, params, rows):
    """Losses in nats and hits of every token, float64, from the model's logits."""
    functions = ModelFunctions(nnx.eval_shape(lambda: Transformer(experiment.model, rngs=nnx.Rngs(0))))
    call = jax.jit(lambda params, tokens: functions.merge(params)(tokens))
    logits = np.asarray(call(params, jnp.asarray(rows["inputs"])), np.float64)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(axis=-1, keepdims=True), rows["targets"][..., None], axis=-1)[..., 0]
    return -np.log(p), logits.argmax(axis=-1) == rows["targets"]


def test_held_out_text_is_apart_and_counted_in_bytes(experiment):
    text = load_text(experiment.source, "bytes", 0.3, T + 1)
    # A document: start, two bytes of the accented letter, sixty of its own, end.
    assert (len(text.train) + len(text.held_out)) == len(LETTERS) * 64
    seen = {chr(i) for i in set(text.train) if i < 128}
    unseen = {chr(i) for i in set(text.held_out) if i < 128}
    assert seen | unseen == set(LETTERS)
    assert not seen & unseen
    assert text.bytes_per_token == 62 / 64
    assert text.bits_per_byte(math.log(2)) == pytest.approx(64 / 62)
    windows = text.held_out_windows(5, 17)
    np.testing.assert_array_equal(windows[0], text.held_out[:17])
    np.testing.assert_array_equal(windows[-1], text.held_out[-17:])
    with pytest.raises(ValueError, match="a window takes 2000: give more text"):
        load_text(experiment.source, "bytes", 0.3, 2000)


def test_rows_of_a_step(experiment):
    rows, train = experiment.step_rows(3, 5), experiment.text().train
    stretches = {tuple(train[i : i + T + 1]) for i in range(len(train) - T)}
    for inputs, targets in zip(rows["inputs"][:3], rows["targets"][:3], strict=True):
        assert (*inputs, targets[-1]) in stretches
    np.testing.assert_array_equal(rows["inputs"][:, 1:], rows["targets"][:, :-1])
    np.testing.assert_allclose(rows["weights"][:3], 1 / (3 * T), rtol=1e-6)
    asked = rows["weights"][3:]
    assert asked.sum() == pytest.approx(0.5)
    for inputs, targets, weights in zip(rows["inputs"][3:], rows["targets"][3:], asked, strict=True):
        for place in np.flatnonzero(weights):
            # What is to be answered stood behind the same key before.
            first = list(inputs).index(inputs[place])
            assert first < place
            assert targets[place] == inputs[first + 1] >= 258 + 9
    for other in (experiment.step_rows(4, 5), experiment.step_rows(3, 6)):
        assert (other["inputs"] != rows["inputs"]).any()
    # Another mechanism sees the same.
    mha = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, pattern=("mha",)))
    np.testing.assert_array_equal(mha.step_rows(3, 5)["inputs"], rows["inputs"])


def test_losses_and_scores_by_hand(experiment):
    # The mechanism doesn't matter here: the quickest to compile.
    plain = dataclasses.replace(experiment.model, num_layers=1, pattern=("mha",))
    still = dataclasses.replace(
        experiment, model=plain, optimizer=OptimizerConfig(peak_lr=0.0, final_lr=0.0, warmup_steps=1), steps=2
    )
    programs = still.programs()
    params, moments = programs.init(jax.random.key(1))
    kept = jax.tree.map(jnp.copy, params)
    steps = [still.step_rows(0, step) for step in range(2)]
    stacked = {name: jnp.asarray(np.stack([step[name] for step in steps])) for name in steps[0]}
    _, _, loss = programs.train(params, moments, stacked)
    expected = np.mean([(by_hand(still, kept, step)[0] * step["weights"]).sum() for step in steps])
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for rows in still.tests():
        losses, hits = by_hand(still, kept, rows)
        found = programs.evaluate(kept, jax.device_put(rows))
        assert float(found.loss) == pytest.approx(losses[rows["weights"] > 0].mean(), rel=1e-5)
        assert float(found.accuracy) == pytest.approx(hits[rows["weights"] > 0].mean(), rel=1e-5)


@pytest.mark.parametrize("pattern", [("mha",), pytest.param(("iha", "mha"), marks=pytest.mark.slow)])
def test_a_run_killed_after_every_evaluation_ends_with_the_same_numbers(experiment, pattern, tmp_path, monkeypatch):
    model = dataclasses.replace(experiment.model, pattern=pattern, num_layers=len(pattern))
    experiment = dataclasses.replace(experiment, model=model)
    whole, starts = assert_kills_change_nothing(experiment, tmp_path, monkeypatch)
    assert starts == 3
    losses = dict(whole.curves["training loss"])
    assert list(losses) == [2, 4, 6]
    assert losses[6] < losses[2]
    assert set(whole.metrics) == {
        *("bits_per_byte", "bigram_bits_per_byte", "recall_accuracy", "recall_loss", "recall_chance")
    }
    assert whole.metrics["recall_chance"] == 1 / 8
    kept = {f"layer {len(pattern) - 1}, mha/patterns/effective"}
    if "iha" in pattern:
        kept |= {f"layer 0, iha/mixing/{name}" for name in ("query", "key", "value", "collapse")}
        kept |= {f"layer 0, iha/patterns/{name}" for name in ("effective", "pseudo")}
    assert set(whole.arrays) == kept
    assert whole.costs["memory_bytes"] > 0
    assert whole.costs["parameters"] == account(experiment.model).parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 4}, "evaluate_every must divide steps=6, got 4"),
        ({"recall_rows": 0}, "recall_rows=0 and a task"),
        ({"recall": None}, "recall_rows=4 and no task"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"sequence_length": 8}, "recall.length must be sequence_length=8, got 16"),
    ],
)
def test_wrong_experiments(experiment, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment, **changes)


def test_vocabularies_must_be_apart_and_fit(experiment):
    task = dataclasses.replace(experiment.recall, first_token=200)
    with pytest.raises(ValueError, match="beyond the tokenizer's 258 tokens, got 200"):
        dataclasses.replace(experiment, recall=task).text()
    small = dataclasses.replace(experiment.model, vocab_size=200)
    with pytest.raises(ValueError, match="hold the recall task's 275 tokens, got 200"):
        dataclasses.replace(experiment, model=small)
    with pytest.raises(ValueError, match="hold the tokenizer's 258 tokens, got 200"):
        dataclasses.replace(experiment, model=small, recall=None, recall_rows=0).text()


@pytest.mark.parametrize("scale", ["full", "reduced"])
def test_what_ships_is_matched(scale):
    whole = config_in(SHIPPED, Comparison)
    comparison = whole if scale == "full" else whole.reduced
    assert len(comparison.variants) == 5
    costs = {
        (entry.setting, entry.variant): account(entry.experiment.model, tokens=entry.experiment.sequence_length)
        for entry in comparison.entries
    }
    for (setting, _), counted in costs.items():
        reference = costs[setting, comparison.baseline]
        assert counted.model_training_per_token == pytest.approx(reference.model_training_per_token, rel=0.02)
