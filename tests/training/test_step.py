"""The step against computations by hand, and micro-batches against the whole batch."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from iha_jax.models import Transformer
from iha_jax.training.evaluate import evaluate
from iha_jax.training.optimizer import make_optimizer
from iha_jax.training.state import ModelFunctions, initial_state
from iha_jax.training.step import make_eval_step, make_train_step, split_micro_batches, summed_gradient, token_losses

VOCAB = 7


class Table(nnx.Module):
    """Logits from a table: a model whose gradient is written down in a line."""

    def __init__(self):
        self.weight_kernel = nnx.Param(
            jnp.linspace(-1, 1, VOCAB * VOCAB).reshape(VOCAB, VOCAB), axes=("embed", "vocab")
        )

    def __call__(self, tokens, positions=None, segment_ids=None, dropout_key=None):
        return self.weight_kernel[...][tokens]


def _batch(rows, length=5, seed=0, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    ones = np.ones((rows, length), np.int32)
    return {
        "inputs": rng.integers(0, vocab, (rows, length), dtype=np.int32),
        "targets": rng.integers(0, vocab, (rows, length), dtype=np.int32),
        "positions": ones.cumsum(1, dtype=np.int32) - 1,
        "segment_ids": ones,
        "weights": rng.integers(0, 2, (rows, length)).astype(np.float32),
    }


def _numpy_table_loss(table, batch, z_loss=0.0):
    """(mean loss, gradient of the mean objective) in float64."""
    table = np.asarray(table, np.float64)
    logits = table[batch["inputs"]]
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(logits - log_z)
    one_hot = np.eye(VOCAB)[batch["targets"]]
    weights = batch["weights"][..., None] / max(batch["weights"].sum(), 1e-9)
    gradient = np.zeros_like(table)
    np.add.at(gradient, batch["inputs"], weights * (p - one_hot + 2 * z_loss * log_z * p))
    return float((weights * (log_z - (logits * one_hot).sum(-1, keepdims=True))).sum()), gradient


def test_token_losses_are_log_softmax():
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCAB)).astype(np.float32)
    targets = np.array([[0, 6, 3], [1, 2, 5]], np.int32)
    losses, log_z = token_losses(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(losses, optax.softmax_cross_entropy_with_integer_labels(logits, targets), rtol=1e-5)
    np.testing.assert_allclose(log_z, np.log(np.exp(logits).sum(-1)), rtol=1e-5)


def test_an_adamw_trajectory_by_hand(tiny):
    config = tiny(batch_size=3, z_loss=0.1, steps=4)
    functions = ModelFunctions(Table())
    optimizer = make_optimizer(config, functions.params, functions.axes)
    state = initial_state(functions, optimizer, 0)
    step = jax.jit(make_train_step(config, functions, optimizer))
    table = np.asarray(functions.params["weight_kernel"], np.float64)
    first, second = np.zeros_like(table), np.zeros_like(table)
    options = config.optimizer
    for i in range(4):
        batch = _batch(3, seed=i)
        loss, gradient = _numpy_table_loss(table, batch, config.z_loss)
        norm = np.linalg.norm(gradient)
        clipped = gradient * min(1.0, options.clip_norm / norm)
        first = options.b1 * first + (1 - options.b1) * clipped
        second = options.b2 * second + (1 - options.b2) * clipped**2
        direction = first / (1 - options.b1 ** (i + 1)) / (np.sqrt(second / (1 - options.b2 ** (i + 1))) + options.eps)
        # Warm-up of 2 steps to 1e-2, then a cosine over the other 2 to 1e-3.
        rate = [5e-3, 1e-2, 1e-2, 1e-3 + 9e-3 * 0.5 * (1 + np.cos(np.pi / 2))][i]
        table = table - rate * (direction + options.weight_decay * table)
        state, metrics = step(state, split_micro_batches(batch, 1))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-5)
        np.testing.assert_allclose(state.params["weight_kernel"], table, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(metrics["param_norm/matrix"], np.linalg.norm(table), rtol=1e-5)
    assert (int(state.step), int(state.updates)) == (4, 4)


def test_micro_batches_with_an_empty_one_equal_the_big_batch(tiny):
    config = tiny()
    functions = ModelFunctions(Transformer(config.model, rngs=nnx.Rngs(0)))
    batch = _batch(8, length=16, vocab=258)
    batch["weights"][2:4] = 0  # the second of four micro-batches
    batch["weights"][4:6] *= 0.5
    key = jax.random.key(0)

    @jax.jit
    def mean_gradient(batch):
        gradient, sums = summed_gradient(functions, functions.params, batch, key, 1e-3)
        return jax.tree.map(lambda g: g / sums["weight"], gradient), sums

    whole, whole_sums = mean_gradient(split_micro_batches(batch, 1))
    parts, part_sums = mean_gradient(split_micro_batches(batch, 4))
    chex.assert_trees_all_close(parts, whole, atol=1e-6, rtol=0)
    chex.assert_trees_all_close(part_sums, whole_sums, rtol=1e-6)


def test_a_batch_without_weight_changes_nothing(tiny):
    config = tiny(batch_size=2)
    functions = ModelFunctions(Table())
    optimizer = make_optimizer(config, functions.params, functions.axes)
    state = initial_state(functions, optimizer, 0)
    batch = _batch(2)
    batch["weights"][:] = 0
    new, metrics = jax.jit(make_train_step(config, functions, optimizer))(state, split_micro_batches(batch, 1))
    chex.assert_trees_all_equal(
        (new.params, new.optimizer, new.updates), (state.params, state.optimizer, state.updates)
    )
    chex.assert_tree_all_finite(metrics)
    assert int(new.step) == 1
    assert int(new.nonfinite) == 0


def test_non_finite_steps_are_left_out_and_counted(tiny):
    config = tiny(batch_size=2)
    functions = ModelFunctions(Table())
    optimizer = make_optimizer(config, functions.params, functions.axes)
    state = initial_state(functions, optimizer, 0)
    step = jax.jit(make_train_step(config, functions, optimizer))
    good, bad = _batch(2), _batch(2)
    good["weights"][:] = 1
    bad["weights"] = np.full_like(good["weights"], np.inf)
    for count in (1, 2):
        new, metrics = step(state, split_micro_batches(bad, 1))
        chex.assert_trees_all_equal((new.params, new.optimizer), (state.params, state.optimizer))
        assert int(metrics["nonfinite"]) == count
        state = new
    state, metrics = step(state, split_micro_batches(good, 1))
    assert [int(metrics[n]) for n in ("nonfinite", "nonfinite_total")] == [0, 2]
    # Warm-up counts updates, not batches.
    np.testing.assert_allclose(metrics["learning_rate"], 5e-3, rtol=1e-6)
    assert (int(state.step), int(state.updates)) == (3, 1)
    chex.assert_tree_all_finite(state.params)


def test_padding_may_hold_anything(tiny):
    functions = ModelFunctions(Table())
    step = make_eval_step(functions)
    batch = _batch(2)
    other = dict(batch, targets=np.where(batch["weights"] > 0, batch["targets"], 0))
    chex.assert_trees_all_equal(step(functions.params, batch), step(functions.params, other))


@pytest.mark.parametrize("rows", [1, 4])
def test_evaluation_does_not_depend_on_the_batch_size(rows):
    functions = ModelFunctions(Table())
    batch = _batch(8)
    expected, _ = _numpy_table_loss(functions.params["weight_kernel"], batch)
    batches = [{k: v[i : i + rows] for k, v in batch.items()} for i in range(0, 8, rows)]
    found = evaluate(jax.jit(make_eval_step(functions)), functions.params, batches, 0.5)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected / np.log(2) / 0.5, rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-6)
    assert found["tokens"] == batch["weights"].sum()


def test_dropout_differs_by_step_and_micro_batch_but_repeats(tiny):
    model = dataclasses.replace(tiny().model, dropout=0.5)
    functions = ModelFunctions(Transformer(model, rngs=nnx.Rngs(0)))
    row = _batch(1, length=8, vocab=258)
    row["weights"][:] = 1
    batch = {name: np.stack([column, column]) for name, column in row.items()}  # twice the same micro-batch

    @jax.jit
    def loss(seed):
        return summed_gradient(functions, functions.params, batch, jax.random.key(seed), 0.0)[1]["loss"]

    @jax.jit
    def single(seed):
        one = {name: column[:1] for name, column in batch.items()}
        return summed_gradient(functions, functions.params, one, jax.random.key(seed), 0.0)[1]["loss"]

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)
    assert loss(0) != 2 * single(0)
