"""Runs interrupted at any moment end as if they had never been: bit for bit."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from iha_jax.training.checkpoint import Checkpoints
from iha_jax.training.display import Display
from iha_jax.training.lock import RunLock
from iha_jax.training.loop import NonFiniteError, Trainer
from iha_jax.training.metrics import read_json_lines
from iha_jax.training.serialization import to_json
from iha_jax.training.signals import StopRequested, StopSignals

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Every run compiles the same few programs: keep them on disk for this file's runs."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture
def config(tiny):
    """Dropout, accumulation, packing, evaluations and checkpoints at different steps."""
    base = tiny(steps=7, micro_batches=2)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.1),
        checkpoint=dataclasses.replace(base.checkpoint, every=4, keep=10),
    )


def _run(config, hook=None):
    """One attempt at a run in this process; ``hook(trainer)`` may arrange an interruption."""
    with StopSignals(lambda text: None) as stop, RunLock(config.run_directory):
        trainer = Trainer(config, stop, Display(config.steps, bar=False, line_every=10**9))
        try:
            if hook is not None:
                hook(trainer)
            trainer.resume()
            trainer.compile()
            trainer.train()
            trainer.finish()
            return "done"
        except StopRequested:
            return stop.received
        finally:
            trainer.close()


def _outcome(config):
    """Everything that must not differ: the final state, the data's position and the series of metrics."""
    with StopSignals(lambda text: None) as stop:
        trainer = Trainer(config, stop, Display(config.steps, bar=False))
        trainer.resume()
        state, progress = trainer.state, trainer._progress
        position = trainer._iterator.get_state()
        trainer.close()
    timing = ("seconds_per_step", "tokens_per_second", "data_wait", "model_flops_per_second")
    lines = [{k: v for k, v in line.items() if k not in timing} for line in _metrics(config)]
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return jax.tree.map(np.asarray, state), progress, position, lines


def _metrics(config):
    return read_json_lines(config.run_directory / "metrics.jsonl")


def _send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # give the listening thread its turn
        time.sleep(0.02)
        if any(stop.received for stop in _LISTENING):
            return


_LISTENING = []


def _before(trainer, name, at):
    """Sends SIGTERM just before the ``at``-th call of a method."""
    _LISTENING[:] = [trainer._stop]
    original, calls = getattr(trainer, name), []

    def wrapped(*arguments, **options):
        calls.append(None)
        if len(calls) == at:
            _send()
        return original(*arguments, **options)

    setattr(trainer, name, wrapped)


def _in_compile(trainer):
    """SIGTERM while a compilation that takes long is under way."""
    _LISTENING[:] = [trainer._stop]
    original = trainer._stop.run

    def slow(call):
        def compiling():
            _send()
            time.sleep(1)
            return call()

        trainer._stop.run = original
        return original(compiling)

    trainer._stop.run = slow


def _in_evaluation(trainer):
    _LISTENING[:] = [trainer._stop]
    pipeline = trainer._pipeline
    original = pipeline.held_out_batches

    def batches(*arguments):
        for i, batch in enumerate(original(*arguments)):
            if i == 1:
                _send()
            yield batch

    pipeline.held_out_batches = batches


def _in_save(trainer):
    """SIGTERM when an asynchronous save has begun and hasn't finished."""
    _LISTENING[:] = [trainer._stop]
    original = trainer._checkpoints.save

    def save(*arguments):
        original(*arguments)
        _send()

    trainer._checkpoints.save = save


@pytest.fixture
def expected(config):
    reference = dataclasses.replace(config, name="reference")
    assert _run(reference) == "done"
    return _outcome(reference)


@pytest.mark.slow
def test_interrupted_anywhere_equals_uninterrupted(config, expected):
    moments = {
        "compile": _in_compile,
        "step": lambda trainer: _before(trainer, "_one_step", 3),
        "evaluation": _in_evaluation,
        "save": _in_save,
    }
    for name, hook in moments.items():
        run = dataclasses.replace(config, name=name)
        assert _run(run, hook) == "SIGTERM", name
        saved = Checkpoints(run.run_directory / "checkpoints", run.checkpoint)
        steps = saved.steps()
        saved.close()
        assert steps, f"{name}: the interruption saved nothing"
        assert steps[-1] < run.steps
        assert _run(run) == "done", name
        chex.assert_trees_all_equal(_outcome(run), expected)
    # Several interruptions in one run.
    run = dataclasses.replace(config, name="often")
    for _ in range(2):
        assert _run(run, moments["step"]) == "SIGTERM"
    assert _run(run) == "done"
    chex.assert_trees_all_equal(_outcome(run), expected)


def test_metrics_hold_the_recipe(config, expected):
    state, progress, _, lines = expected
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert [line["step"] for line in lines if "held_out/loss" in line] == [3, 6, 7]
    assert steps[-1]["data_crc"] == progress["data_crc"]
    assert int(state.step) == int(state.updates) == 7
    for name in ("grad_norm/mixing", "update_norm/matrix", "param_norm/embedding", "learning_rate", "accuracy"):
        assert steps[-1][name] > 0
    held_out = next(line for line in lines if "held_out/loss" in line)
    assert held_out["mixing/mixing_query/from_copy"] > 0
    assert held_out["mixing/mixing_query/spread"] > 0


def test_sigkill_during_a_save_costs_only_the_steps_since_the_last_checkpoint(config, expected, tmp_path):
    run = dataclasses.replace(config, name="killed")
    path = tmp_path / "config.json"
    path.write_text(to_json(run))
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "from iha_jax.training import checkpoint\n"
        "original, calls = checkpoint.Checkpoints.save, []\n"
        "def save(self, *arguments):\n"
        "    original(self, *arguments)\n"
        "    calls.append(0)\n"
        "    if len(calls) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.Checkpoints.save = save\n"
        "import train; train.main()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(path)], env=_environment(), capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert _run(run) == "done"
    chex.assert_trees_all_equal(_outcome(run), expected)


def test_train_py_stops_with_a_clear_line_and_refuses_a_second_process(config, tmp_path):
    run = dataclasses.replace(config, name="command", steps=100_000)
    path = tmp_path / "config.json"
    path.write_text(to_json(run))
    command = [sys.executable, str(ROOT / "train.py"), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment())
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 5/"):
            break
    second = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"in use by process {process.pid}" in second.stderr
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM received: saving, then exiting" in rest
    assert "saved step" in rest.splitlines()[-1]
    assert "Traceback" not in rest


def test_nothing_non_finite_is_saved_and_the_run_aborts(config):
    run = dataclasses.replace(
        config, name="bad", micro_batches=1, max_nonfinite=2, checkpoint=dataclasses.replace(config.checkpoint, every=1)
    )

    def poison(trainer):
        original = trainer._one_step

        def one_step():
            if trainer._done == 3:
                iterator = trainer._iterator
                trainer._iterator = _Poisoned(iterator)
            original()

        trainer._one_step = one_step

    with pytest.raises(NonFiniteError, match=r"2 steps in a row were not finite, up to step 5"):
        _run(run, poison)
    state, *_ = _outcome(run)
    chex.assert_tree_all_finite((state.params, state.optimizer))
    assert int(state.updates) == 3
    bad = [line for line in _metrics(run) if line.get("nonfinite")]
    assert [line["nonfinite_total"] for line in bad] == [1] or [line["nonfinite_total"] for line in bad] == [1, 2]


class _Poisoned:
    def __init__(self, iterator):
        self._iterator = iterator

    def __next__(self):
        batch = next(self._iterator)
        return {**batch, "weights": batch["weights"] * np.float32("nan")}

    def __getattr__(self, name):
        return getattr(self._iterator, name)


def test_resume_modes_and_changes(config, capsys):
    short = dataclasses.replace(config, name="modes", steps=4, resume="must")
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume"):
        _run(short)
    assert _run(dataclasses.replace(short, resume="auto")) == "done"
    with pytest.raises(FileExistsError, match="already has a run at step 4"):
        _run(dataclasses.replace(short, resume="never"))
    wider = dataclasses.replace(config.model, model_dim=32)
    with pytest.raises(ValueError, match="another model"):
        _run(dataclasses.replace(short, resume="auto", model=wider))
    capsys.readouterr()
    assert _run(dataclasses.replace(short, resume="must", steps=5)) == "done"
    assert "note: steps was 4" in capsys.readouterr().out
    content = json.loads((short.run_directory / "config.json").read_text())
    assert content["steps"] == 5
    assert content["model"]["iha"]["window"] == 4


def _environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = os.environ.get("XLA_FLAGS", "")  # the same device, hence the same sums
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
