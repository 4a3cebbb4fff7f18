"""Whole runs: what they write besides checkpoints, their memory, and directories that can't be written."""

import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

import train
from iha_jax.data import SourceConfig
from iha_jax.training.checkpoint import Checkpoints
from iha_jax.training.config import CheckpointConfig, EvaluationConfig, LogConfig
from iha_jax.training.display import Display
from iha_jax.training.lock import RunLock
from iha_jax.training.loop import Trainer
from iha_jax.training.serialization import to_json
from iha_jax.training.signals import StopSignals
from tests.privileges import unprivileged


def _run(config, hook=None):
    with StopSignals(lambda text: None) as stop, RunLock(config.run_directory):
        trainer = Trainer(config, stop, Display(config.steps, bar=False, line_every=10**9))
        try:
            if hook is not None:
                hook(trainer)
            trainer.resume()
            trainer.compile()
            trainer.train()
            trainer.finish()
        finally:
            trainer.close()


@pytest.mark.parametrize("steps_traced", [1, 100])
def test_tensorboard_and_a_profile_of_a_run(tiny, steps_traced, capsys):
    pytest.importorskip("tensorboardX")
    # 100 steps are more than the run has: the trace must be written all the same.
    log = LogConfig(every=1, tensorboard=True, profile_start=2, profile_steps=steps_traced)
    config = tiny(steps=4, log=log)
    _run(config)
    events = b"".join(p.read_bytes() for p in (config.run_directory / "tensorboard").iterdir())
    for name in (b"loss", b"held_out/loss", b"grad_norm/mixing", b"learning_rate", b"tokens_per_second"):
        assert name in events
    (trace,) = (config.run_directory / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 0
    assert f"profile of the steps up to {min(2 + steps_traced, 4)} in" in capsys.readouterr().out


def test_a_profile_outside_the_run_is_refused(tiny):
    with pytest.raises(ValueError, match=r"log.profile_start must be a step of the run, 0 … 5, got 6 with steps 6"):
        tiny(log=LogConfig(profile_start=6))


def test_a_directory_that_cannot_be_written_is_one_line(tiny, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # not pytest's own: only its owner may look inside that one
        path = pathlib.Path(folder, "config.json")
        path.write_text(to_json(tiny(directory=folder)))
        os.chmod(folder, 0o555)
        monkeypatch.setattr(sys, "argv", ["train.py", str(path)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back what main replaces
        with unprivileged(), pytest.raises(SystemExit, match=rf"^error: .*Permission denied: '{folder}/run'$"):
            train.main()
        os.chmod(folder, 0o755)


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_the_checkpoints_before_stay(tiny, tmp_path):
    # A limit on file sizes stands for the full disk: the system refuses the write in the same way. It is enough for
    # the metrics, and too little for the optimizer's arrays.
    script = (
        "import resource, sys\n"
        "from iha_jax.training import checkpoint\n"
        "save = checkpoint.Checkpoints.save\n"
        "def full_from_step_4(self, state, *arguments):\n"
        "    if int(state.step) == 4:\n"
        "        self.wait()\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "    save(self, state, *arguments)\n"
        "checkpoint.Checkpoints.save = full_from_step_4\n"
        "import train; train.main()\n"
    )
    path = tmp_path / "config.json"
    config = tiny()
    path.write_text(to_json(config))
    root = str(pathlib.Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # its files would be refused, too
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: a checkpoint in {config.run_directory}/checkpoints could not be written; is the")
    saved = Checkpoints(config.run_directory / "checkpoints", config.checkpoint)
    assert saved.steps() == [2]
    saved.close()


def _resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the resident memory is read from /proc")
def test_memory_is_flat_over_2000_steps(tiny, tmp_path):
    text = tmp_path / "long"
    text.mkdir()
    for i in range(40):
        words = (str(i * j % 997) for j in range(3000))
        (text / f"{i}.txt").write_text(f"document {i}: " + " ".join(words))
    base = tiny()
    config = dataclasses.replace(
        base,
        steps=2000,
        batch_size=32,  # 20 KB a batch: one kept at each step would show as 8 MB in 400 steps
        data=dataclasses.replace(base.data, sources=(SourceConfig("files", str(text)),)),
        # TensorStore's report of its own metrics, which Orbax asks for at every save, is never freed (up to 0.7 MB
        # a save, whatever the model): few saves.
        checkpoint=CheckpointConfig(every=300, keep=2),
        evaluation=EvaluationConfig(every=100, rows=4),
        log=LogConfig(every=10),
    )
    steps, seen = (350, 750, 1150, 1550, 1950), {}

    def hook(trainer):
        original = trainer._one_step

        def one_step():
            if trainer._done in steps:
                trainer._checkpoints.wait()
                gc.collect()
                seen[trainer._done] = (_resident_bytes(), len(jax.live_arrays()))
            original()

        trainer._one_step = one_step

    _run(config, hook)
    resident, arrays = zip(*(seen[step] for step in steps), strict=True)
    print(json.dumps({"MiB": [size / 2**20 for size in resident], "arrays": arrays}))
    assert len(set(arrays)) == 1
    # The allocator extends its heap now and then, by 6 MB or more; what is kept at each step shows in every stretch.
    assert np.median(np.diff(resident)) < 4 * 2**20
