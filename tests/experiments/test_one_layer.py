"""The one-layer experiment: its loss against padded batches, its step by hand, early stopping, resumption, FLOPs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.data.tasks import RelationComposition
from iha_jax.experiments import OneLayer, one_layer
from iha_jax.experiments.encoder_flops import encoder_flops_per_token
from iha_jax.experiments.snapshot import load_snapshot, save_snapshot
from iha_jax.models import Encoder, EncoderConfig
from tests.experiments.grids import assert_kills_change_nothing
from tests.jaxpr_flops import matmul_flops

SMALL = EncoderConfig(
    attention="iha", max_length=9, model_dim=8, num_heads=2, mlp_dim=12, num_pseudo_heads=2, implementation="reference"
)
EXPERIMENT = OneLayer(
    task=RelationComposition(arity=2, sizes=(2, 3), density=0.4),
    model=SMALL,
    learning_rate=3e-2,
    train_examples=16,
    validation_examples=14,
    test_examples=14,
    batch_per_size=4,
    max_epochs=7,
    patience=2,
    mixing_lr_multiplier=0.25,
)


def silent(line):
    pass


def cross_entropy(logits, targets):
    """Written from the definition, in float64."""
    p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    return -np.where(targets == 1, np.log(p), np.log(1 - p))


def padded(data):
    """All examples as one batch as the paper has it: padded on the right."""
    length = max(inputs.shape[1] for inputs, _ in data)
    rows = [[np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in map(np.asarray, pair)] for pair in data]
    ids = [np.broadcast_to(np.arange(length) < x.shape[1], (len(x), length)) for x, _ in data]
    return *(np.concatenate(column) for column in zip(*rows, strict=True)), np.concatenate(ids)


def test_an_epoch_and_the_scores_are_those_of_padded_batches():
    programs = one_layer._programs(dataclasses.replace(EXPERIMENT, learning_rate=0.0))
    params = programs.init(jax.random.key(5))
    before = {path: np.asarray(x, np.float64) for path, x in params.items()}
    train, _, test = EXPERIMENT.data(seed=3)
    call = jax.jit(lambda params, *args: programs.functions.merge(params)(*args))

    def expected(data):
        inputs, targets, valid = padded(data)
        logits = np.asarray(call(params, jnp.asarray(inputs, jnp.int32), jnp.asarray(valid, jnp.int32)))
        right = (logits > 0) == (targets == 1)
        loss = cross_entropy(logits, targets)[valid].mean()
        return loss, right[valid].mean(), np.mean((right | ~valid).all(axis=1))

    scores = programs.evaluate(params, test)
    np.testing.assert_allclose(scores, expected(test), rtol=1e-5)
    loss_before = expected(train)[0]
    # At rate 0 the mean over an epoch's steps is the mean over its data, whatever their order.
    copies = jax.tree.map(jnp.copy, params)
    _, _, loss = programs.epoch(copies, programs.optimizer.init(copies), train, jax.random.key(0), jnp.float32(0))
    assert float(loss) == pytest.approx(loss_before, rel=1e-5)
    # Two steps of Adam: the first moves by the learning rate wherever there is a gradient, a quarter of it where
    # mixing is told to learn more slowly; the second by at most as much again.
    rate = 1e-3
    after, _, _ = programs.epoch(params, programs.optimizer.init(params), train, jax.random.key(0), jnp.float32(rate))
    moved = {path: np.abs(np.asarray(value, np.float64) - before[path]).max() / rate for path, value in after.items()}
    mixing = {path for path in moved if path.rsplit(".", 1)[-1].startswith(("mixing", "collapse"))}
    assert len(mixing) == 4
    assert min(moved.values()) > 0
    # A small parameter's second step may undo its first; the furthest of each group went on.
    assert 0.9 * 0.25 < max(moved[path] for path in mixing) < 2.01 * 0.25
    assert 0.9 < max(moved[path] for path in moved if path not in mixing) < 2.01


def test_training_stops_early_and_tests_the_best(tmp_path):
    told = []
    outcome = EXPERIMENT.run(0, tmp_path, told.append)
    losses = [y for _, y in outcome.curves["validation loss"]]
    best = int(np.argmin(losses)) + 1
    assert outcome.notes["best_epoch"] == best
    assert outcome.notes["epochs"] == len(losses) == len(told) == min(best + 2, 7)
    assert outcome.notes["stopped_early"] == (len(losses) < 7)
    assert outcome.curves["training loss"][-1][1] < outcome.curves["training loss"][0][1]
    assert set(outcome.arrays) == {
        *(f"mixing/{name}" for name in ("query", "key", "value", "collapse")),
        "patterns/effective",
        "patterns/pseudo",
    }
    model = nnx.eval_shape(lambda: Encoder(SMALL, rngs=nnx.Rngs(0)))
    assert outcome.costs["parameters"] == sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert outcome.costs["memory_bytes"] > 0
    again = EXPERIMENT.run(0, tmp_path / "again", silent)
    assert again.metrics == outcome.metrics
    assert EXPERIMENT.run(1, tmp_path / "other", silent).metrics != outcome.metrics


def test_a_run_killed_after_every_epoch_ends_with_the_same_numbers(tmp_path, monkeypatch):
    _, starts = assert_kills_change_nothing(EXPERIMENT, tmp_path, monkeypatch)
    assert starts > 2


def test_a_snapshot_of_another_model_is_refused(tmp_path):
    file = tmp_path / "snapshot.npz"
    assert load_snapshot(file, {"a": jnp.zeros(3)}) is None
    save_snapshot(file, {"a": jnp.arange(3.0)}, {"epoch": 2})
    state, meta = load_snapshot(file, {"a": jnp.zeros(3)})
    np.testing.assert_array_equal(state["a"], [0, 1, 2])
    assert meta == {"epoch": 2}
    with pytest.raises(ValueError, match="snapshot of another model"):
        load_snapshot(file, {"a": jnp.zeros(4)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_examples": 15}, "train_examples must be a positive multiple of the number of sizes, 2, got 15"),
        ({"batch_per_size": 9}, "from 1 to train_examples / sizes = 8, got 9"),
        ({"model": dataclasses.replace(SMALL, max_length=8)}, "up to 9 tokens, but model.max_length=8"),
    ],
)
def test_wrong_experiments(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EXPERIMENT, **changes)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"attention": "mha"}, 1.0),
        ({"attention": "simplicial"}, 1.0),
        ({"attention": "iha", "implementation": "reference"}, 1.0),
        ({"attention": "iha", "collapse": "across_heads"}, None),
        ({"attention": "iha"}, None),
    ],
)
def test_flops_are_those_of_the_traced_programs(options, factor):
    config = EncoderConfig(max_length=16, model_dim=24, num_heads=3, mlp_dim=20, num_pseudo_heads=4, **options)
    tokens, batch = 16, 5
    counted = encoder_flops_per_token(config, (tokens,), batch)
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    inputs = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def loss(state, inputs):
        return jnp.sum(nnx.merge(graph, state)(inputs) ** 2)

    forward = matmul_flops(loss, state, inputs) / (batch * tokens)
    both = matmul_flops(jax.value_and_grad(loss), state, inputs) / (batch * tokens)
    if factor is not None:
        # The collapse per head and its gradients are no matrix products to the tracer in every form.
        assert forward == pytest.approx(counted.model / 3, rel=0.02)
    assert both == pytest.approx(counted.executed, rel=0.03)


def test_flops_by_hand():
    # One token of each product, forward and backward, in the paper's ternary MHA model at 64 tokens.
    counted = encoder_flops_per_token(EncoderConfig(), (64,), 1)
    assert counted.model == 6 * (4 * 128 * 128 + 2 * 128 * 512 + 128 + 2 * 64 * 128)
    both = [encoder_flops_per_token(EncoderConfig(), (length,), 1).model for length in (16, 48)]
    assert encoder_flops_per_token(EncoderConfig(), (16, 48), 1).model == (both[0] * 16 + both[1] * 48) / 64
