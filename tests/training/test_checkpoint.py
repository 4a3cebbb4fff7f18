"""Checkpoints: complete or absent, exact, kept by age and by quality, and never of another model."""

import dataclasses
import gc
import json
import logging
import os
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax.data import DataPipeline
from iha_jax.training.checkpoint import Checkpoints
from iha_jax.training.config import CheckpointConfig
from iha_jax.training.state import TrainState

# Reading a damaged checkpoint, Orbax abandons the reads under way; they complain when collected.
_UNRAISABLE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected():
    """Abandoned reads are collected within the test that caused them."""
    yield
    gc.collect()


def _state(step=0, size=4, seed=0):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"layers.0.mlp.up_kernel": array(size, 3), "final_norm.scale": array(size)}
    return TrainState(
        params=params,
        optimizer=(params, {"count": jnp.int32(step)}),
        step=jnp.int32(step),
        updates=jnp.int32(step - 1),
        nonfinite=jnp.int32(0),
        nonfinite_total=jnp.int32(1),
        key=jax.random.key(seed),
    )


def _comparable(state):
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


@pytest.fixture
def iterator(tiny):
    found = DataPipeline(tiny().data).training_batches(2)
    next(found)
    yield found
    found.close()


def _saved(directory, iterator, steps, losses=None, **options):
    checkpoints = Checkpoints(directory, CheckpointConfig(**options))
    for i, step in enumerate(steps):
        checkpoints.save(_state(step, seed=step), iterator, {"step": step}, None if losses is None else losses[i])
        checkpoints.wait()
    return checkpoints


def test_everything_comes_back_as_it_was(tmp_path, iterator, tiny):
    saved = _saved(tmp_path, iterator, [7])
    saved.close()
    expected = [next(iterator) for _ in range(3)]
    other = DataPipeline(tiny().data).training_batches(2)
    again = Checkpoints(tmp_path, CheckpointConfig())
    restored = again.restore(_state(), other)
    chex.assert_trees_all_equal(_comparable(restored.state), _comparable(_state(7, seed=7)))
    chex.assert_trees_all_equal_dtypes(restored.state.params, _state().params)
    assert restored.progress == {"step": 7}
    chex.assert_trees_all_equal([next(other) for _ in range(3)], expected)
    again.close()
    other.close()
    names = {p.name for p in (tmp_path / "7").iterdir()}
    assert {"params", "optimizer", "counters", "rng", "data", "progress"} <= names


def test_an_asynchronous_save_is_not_disturbed_by_the_steps_that_follow(tmp_path, iterator):
    """The state is donated to the next step, which writes over it while the save is in flight."""
    big = {"layers.0.mlp.up_kernel": jnp.arange(4_000_000, dtype=jnp.float32), "final_norm.scale": jnp.ones((3,))}
    state = dataclasses.replace(
        _state(1), params=big, optimizer=(jax.tree.map(jnp.zeros_like, big), {"count": jnp.int32(0)})
    )
    expected = jax.tree.map(np.array, _comparable(state))
    template = jax.tree.map(jnp.zeros_like, _comparable(state))
    step = jax.jit(
        lambda s: dataclasses.replace(s, params=jax.tree.map(lambda p: p * -2 + 1, s.params), step=s.step + 1),
        donate_argnums=0,
    )
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(state, iterator, {}, None)
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    template = dataclasses.replace(template, key=jax.random.key(9))
    restored = checkpoints.restore(template, None)
    checkpoints.close()
    chex.assert_trees_all_equal(_comparable(restored.state), expected)


def test_the_newest_and_the_best_are_kept(tmp_path, iterator):
    checkpoints = _saved(
        tmp_path, iterator, range(1, 8), [5.0, 1.0, 4.0, 3.0, float("nan"), 2.0, 6.0], keep=2, keep_best=1
    )
    assert checkpoints.steps() == [2, 6, 7]
    checkpoints.close()


def test_no_checkpoint_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.restore(_state(), None) is None
    checkpoints.close()


def _files(directory):
    return sorted(p for p in pathlib.Path(directory).rglob("*") if p.is_file() and p.stat().st_size)


@_UNRAISABLE
def test_a_newest_checkpoint_cut_anywhere_is_skipped_with_a_warning_or_still_exact(tmp_path, iterator, caplog):
    original = tmp_path / "original" / "checkpoints"
    _saved(original, iterator, [1, 2]).close()
    skipped = []
    for number, name in enumerate(p.relative_to(original) for p in _files(original / "2")):
        damaged = tmp_path / str(number) / "checkpoints"
        shutil.copytree(original, damaged)
        os.truncate(damaged / name, (damaged / name).stat().st_size // 2)
        checkpoints = Checkpoints(damaged, CheckpointConfig())
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="iha_jax"):
            restored = checkpoints.restore(_state(), iterator)
        checkpoints.close()
        step = restored.progress["step"]
        chex.assert_trees_all_equal(_comparable(restored.state), _comparable(_state(step, seed=step)))
        if step == 1:
            skipped.append(name)
            assert "checkpoint 2 can't be read" in caplog.text, name
            assert (damaged.parent / "damaged-2").is_dir()
    # Orbax writes some data twice and some only for people; but at least every item must have its vital file.
    assert {name.parts[1] for name in skipped} >= {"params", "optimizer", "counters", "rng", "data", "progress"}


@_UNRAISABLE
def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path, iterator):
    directory = tmp_path / "checkpoints"
    _saved(directory, iterator, [1]).close()
    for path in (directory / "1" / "params").rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    checkpoints = Checkpoints(directory, CheckpointConfig())
    with pytest.raises(RuntimeError, match=r"none of the checkpoints \[1\].*can be read"):
        checkpoints.restore(_state(), None)
    checkpoints.close()


def test_another_models_checkpoint_is_refused_and_left_alone(tmp_path, iterator):
    _saved(tmp_path / "checkpoints", iterator, [1]).close()
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    with pytest.raises(ValueError, match=r"another model: final_norm.scale has shape \(4,\) there and \(5,\)"):
        checkpoints.restore(_state(size=5), None)
    assert checkpoints.steps() == [1]
    checkpoints.close()


def test_another_optimizers_checkpoint_is_refused_and_left_alone(tmp_path, iterator):
    _saved(tmp_path / "checkpoints", iterator, [1]).close()
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    other = dataclasses.replace(_state(), optimizer=(_state().params, {"momentum": jnp.zeros(3)}))
    with pytest.raises(ValueError, match="another optimizer"):
        checkpoints.restore(other, None)
    assert checkpoints.steps() == [1]
    checkpoints.close()


def test_the_data_state_is_plain_json_for_this_process(tmp_path, iterator):
    _saved(tmp_path, iterator, [1]).close()
    state = (tmp_path / "1" / "data" / "process_0-of-1.json").read_bytes()
    assert state == iterator.get_state()
    assert json.loads(state)
