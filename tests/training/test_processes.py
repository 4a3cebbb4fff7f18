"""Runs of several processes: the same numbers as of one, and together to the end, whatever ends them."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from iha_jax import compat
from iha_jax.training.config import DistributedConfig, EvaluationConfig, MeshConfig
from iha_jax.training.display import Display
from iha_jax.training.loop import Trainer
from iha_jax.training.metrics import read_json_lines
from iha_jax.training.placement import Placement
from iha_jax.training.processes import Processes, connected
from iha_jax.training.signals import StopRequested, StopSignals
from tests.training.launch import Launch


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, for all runs of this file."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def config(tiny, tmp_path):
    """Packing that pads, documents of very unequal length, and accumulation."""
    for path in (tmp_path / "text").iterdir():
        path.unlink()
    for i, length in enumerate((40, 700, 3000, 90, 1500, 10, 2000, 300)):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i}: " + " ".join(str(i * j % 97) for j in range(length)))
    base = tiny(steps=4, batch_size=16, micro_batches=2, evaluation=EvaluationConfig(every=10, rows=12, batch_size=8))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_heads=4, model_dim=32, vocab_size=264, dropout=0.1),
        data=dataclasses.replace(base.data, packing="fit"),
        # Adam divides a gradient by its own size; see test_placement.
        optimizer=dataclasses.replace(base.optimizer, eps=1e-3),
        mesh=MeshConfig(),
    )


@pytest.fixture
def plain(config):
    """The same with a model that compiles in a moment."""
    model = dataclasses.replace(config.model, num_layers=1, model_dim=16, pattern=("mha",))
    return dataclasses.replace(config, model=model)


def alone(config, **changes):
    """The run in this process, on its eight devices."""
    config = dataclasses.replace(config, **changes)
    with StopSignals(lambda text: None) as stop:
        trainer = Trainer(config, stop, Display(config.steps, bar=False, quiet=True))
        try:
            trainer.resume()
            trainer.compile()
            trainer.train()
            trainer.finish()
        finally:
            trainer.close()
    return series(config)


def series(config):
    """What must not depend on the number of processes, by step."""
    lines = read_json_lines(config.run_directory / "metrics.jsonl")
    names = ("loss", "grad_norm", "held_out/loss", "tokens_total", "data_crc")
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key[1] == "data_crc":  # of every token of every step and its place: none lost, none repeated
            assert found[key] == value, key
        else:
            np.testing.assert_allclose(found[key], value, rtol=1e-6, atol=1e-6, err_msg=str(key))


def test_two_processes_equal_one(plain, cache):
    plain = dataclasses.replace(plain, steps=3)
    two = dataclasses.replace(plain, name="two")
    with Launch(two, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
        first, second = launch.output(0), launch.output(1)
    assert "step 3: held-out loss" in first
    assert "held-out" not in second
    assert_same(series(two), alone(plain, name="one"))
    positions = sorted(p.name for p in (two.run_directory / "checkpoints" / "3" / "data").glob("process_*"))
    assert positions == ["process_0-of-2.json", "process_1-of-2.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data=2, fsdp=2, tensor=2),
        MeshConfig(fsdp=1, tensor=4, context=2),  # both processes hold every row
        MeshConfig(replica=2, fsdp=2, context=2),
    ],
    ids=str,
)
def test_two_processes_equal_one_on_any_mesh(config, cache, mesh):
    two = dataclasses.replace(config, name="two", mesh=mesh)
    with Launch(two, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
    assert_same(series(two), alone(config, name="one", mesh=mesh))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_another_number_of_processes_goes_on(plain, cache):
    expected = alone(plain, name="whole", steps=60)
    run = dataclasses.replace(plain, name="stopped", steps=60)
    with Launch(run, 2, 4, cache) as launch:
        launch.wait_for("step 3/60")
        launch.processes[1].send_signal(signal.SIGTERM)
        assert launch.finish() == [128 + signal.SIGTERM] * 2, launch.output(0) + launch.output(1)
        first, second = launch.output(0), launch.output(1)
    assert "SIGTERM received by process 1: saving, then exiting" in first
    assert "SIGTERM received by process 1: saving, then exiting" in second
    assert "saved step" in first.splitlines()[-1]
    assert "Traceback" not in first + second
    steps = max(step for step, _ in series(run))
    assert 3 <= steps < 60
    assert_same(alone(run, mesh=MeshConfig(fsdp=4, tensor=2)), expected)


@pytest.mark.slow
def test_a_signal_to_both_processes_stops_both_and_the_run_goes_on_in_two_or_one(plain, cache):
    """Ended by a preemption of all machines at once; the second half has the same mesh, or one process and another."""
    first_mesh, other_mesh = MeshConfig(data=2, fsdp=4), MeshConfig(fsdp=2, context=2, tensor=2)
    plain = dataclasses.replace(plain, steps=60, mesh=first_mesh)
    whole = dataclasses.replace(plain, name="whole")
    with Launch(whole, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
    run = dataclasses.replace(plain, name="stopped")
    with Launch(run, 2, 4, cache) as launch:
        launch.wait_for("step 3/60")
        for process in launch.processes:
            process.send_signal(signal.SIGTERM)
        assert launch.finish() == [128 + signal.SIGTERM] * 2, launch.output(0) + launch.output(1)
        outputs = [launch.output(i) for i in range(2)]
    assert "SIGTERM received by process" in outputs[0]  # the first to be heard; process 0 speaks for all
    for output in outputs:
        assert "Traceback" not in output
        assert "error: " not in output
    assert "saved step" in outputs[0].splitlines()[-1]
    saved = max(int(p.name) for p in (run.run_directory / "checkpoints").iterdir() if p.name.isdigit())
    assert 3 <= saved < 60
    assert max(step for step, _ in series(run)) <= saved
    copy = dataclasses.replace(run, name="stopped-too")
    shutil.copytree(run.run_directory, copy.run_directory)
    expected = series(whole)
    # As many processes and the same mesh: the same sums in the same order.
    with Launch(run, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
        assert f"resuming {run.run_directory} at step {saved}" in launch.output(0)
    assert series(run) == expected
    assert_same(alone(copy, mesh=other_mesh), expected)


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_run_goes_on_in_two_or_one(plain, cache):
    """After the crash of one machine the run is, from the last checkpoint on, what it would have been without."""
    first_mesh, other_mesh = MeshConfig(data=2, fsdp=4), MeshConfig(fsdp=2, context=2, tensor=2)
    run = dataclasses.replace(
        plain,
        name="killed",
        steps=4000,  # until it is killed; the schedule must not follow them
        optimizer=dataclasses.replace(plain.optimizer, decay_steps=40),
        checkpoint=dataclasses.replace(plain.checkpoint, every=4),
        mesh=first_mesh,
    )
    arguments = ("--distributed.heartbeat-timeout", "10")
    with Launch(run, 2, 4, cache, *arguments) as launch:
        launch.wait_for("step 9/4000")
        launch.processes[1].kill()
        killed = time.monotonic()
        codes = launch.finish(timeout=120)
        assert time.monotonic() - killed < 60
        assert codes[0] not in (0, None)
        assert codes[1] == -signal.SIGKILL
        output = launch.output(0)
    # Whichever notices first: the missing heartbeat, or a sum that breaks off.
    assert "error: " in output or "another task died" in output
    assert any(words in output for words in ("process 1 is gone", "another process died", "another task died"))
    saved = max(int(p.name) for p in (run.run_directory / "checkpoints").iterdir() if p.name.isdigit())
    assert saved >= 4
    run = dataclasses.replace(run, steps=saved + 6)
    copy = dataclasses.replace(run, name="killed-too")
    shutil.copytree(run.run_directory, copy.run_directory)
    whole = dataclasses.replace(run, name="whole")
    with Launch(whole, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
    expected = series(whole)
    assert {step for step, name in expected if name == "data_crc"} == set(range(1, saved + 7))
    # As many processes and the same mesh: the same sums in the same order.
    with Launch(run, 2, 4, cache) as launch:
        assert launch.finish() == [0, 0], launch.output(0) + launch.output(1)
        assert f"resuming {run.run_directory} at step {saved}" in launch.output(0)
    assert series(run) == expected
    assert_same(alone(copy, mesh=other_mesh), expected)


def test_a_process_left_alone_gives_up_and_says_what_to_check():
    code = (
        "from iha_jax.training.config import DistributedConfig\n"
        "from iha_jax.training.processes import connected\n"
        "connected(DistributedConfig(coordinator='127.0.0.1:9', processes=2, process=1, start_timeout=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: process 1 of 2 waited 1 s (distributed.start_timeout) for the others at 127.0.0.1:9" in done.stderr
    assert "every worker runs this same command" in done.stderr


@pytest.fixture
def bare(monkeypatch):
    """No cluster around, and nothing in the environment."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_where_nothing_is_said_a_process_is_alone(bare):
    assert connected(DistributedConfig()).count == 1
    assert connected(DistributedConfig("auto", "localhost:1", 1, 0)).count == 1
    assert connected(DistributedConfig("never", "localhost:1", 2, 0)).count == 1
    bare.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")  # for the clusters that JAX knows; there is none
    assert connected(DistributedConfig()).count == 1
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "n1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}.items():
        bare.setenv(f"SLURM_{name}", value)
    assert compat.cluster_processes() == 1
    assert connected(DistributedConfig()).count == 1
    bare.setenv("SLURM_NTASKS", "many")
    with pytest.raises(RuntimeError, match=r"looks like a cluster.*'many'.*distributed.mode never to run alone"):
        connected(DistributedConfig())


@pytest.mark.parametrize(
    ("values", "environment", "message"),
    [
        ({"processes": 2, "process": 0}, {}, r"distributed.coordinator must be given, too.*'processes': 2"),
        ({"coordinator": "a:1", "process": 0}, {}, r"distributed.processes must be given, too"),
        ({"coordinator": "a", "processes": 2, "process": 0}, {}, r"must be host:port, as .* got 'a'"),
        ({}, {"JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES must be a number, got 'two'"),
        ({"coordinator": "a:1", "processes": 2}, {"JAX_PROCESS_ID": "2"}, r"process must be below .* got 2 and 2"),
    ],
)
def test_what_is_missing_or_wrong_is_named(bare, values, environment, message):
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        connected(DistributedConfig(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"processes": 0}, r"distributed.processes must be at least 1, got 0"),
        ({"heartbeat_timeout": 1}, r"distributed.heartbeat_timeout must be at least 2, got 1"),
        ({"processes": 2, "process": 2}, r"process must be below distributed.processes, got 2 and 2"),
    ],
)
def test_ranges_of_the_distributed_values(values, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**values)


def test_several_processes_must_use_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"takes 4 of the 8 devices of 2 processes"):
        Placement(MeshConfig(fsdp=4))


class Together(Processes):
    """Processes that are threads: the protocol without the network."""

    def __init__(self, index, count, store, changed):
        self.index, self.count = index, count
        self._store, self._changed, self._calls = store, changed, {}

    def share(self, topic, value):
        self._calls[topic] = number = self._calls.get(topic, 0) + 1
        keys = [("share", topic, number, i) for i in range(self.count)]
        with self._changed:
            self._store[keys[self.index]] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(key in self._store for key in keys))
            return [self._store[key] for key in keys]

    def post(self, topic, text):
        with self._changed:
            self._store.setdefault(topic, text)
            self._changed.notify_all()

    def watch(self, topic, heard):
        def wait():
            with self._changed:
                self._changed.wait_for(lambda: topic in self._store)
                text = self._store[topic]
            heard(text)

        threading.Thread(target=wait, daemon=True).start()


def test_a_signal_heard_by_one_process_stops_all():
    """The real signal, in one of three: from its handler through the store to the others."""
    count, store, changed = 3, {}, threading.Condition()
    told = [[] for _ in range(count)]
    processes = [Together(i, count, store, changed) for i in range(count)]
    stops = [StopSignals(told[i].append, processes[i]) for i in range(count)]
    passed = [0] * count

    def work(i):
        while passed[i] < 5000:
            time.sleep(0.001 * (i + 1))
            try:
                stops[i].check()
            except StopRequested:
                return
            passed[i] += 1

    for i in (0, 2):
        processes[i].watch("stop", stops[i]._agree)
    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 2)]
    with stops[1]:  # it watches by itself, and takes this process's signals
        for thread in threads:
            thread.start()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        work(1)
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert len(set(passed)) == 1
    assert 0 < passed[0] < 5000
    assert [stop.received for stop in stops] == ["SIGTERM"] * count
    assert [stop.exit_code for stop in stops] == [128 + signal.SIGTERM] * count
    # The first speaks for all, and the one that heard it.
    assert told == [["SIGTERM received by process 1: saving, then exiting"]] * 2 + [[]]


@pytest.mark.parametrize("moment", ["check", "run", "between"])
def test_all_processes_stop_at_the_same_point(moment):
    count, store, changed = 3, {}, threading.Condition()
    processes = [Together(i, count, store, changed) for i in range(count)]
    stops = [StopSignals(lambda text: None, p) for p in processes]
    for stop, process in zip(stops, processes, strict=True):
        process.watch("stop", stop._agree)
    passed = [0] * count
    reached = threading.Barrier(count + 1)

    def work(i):
        try:
            for point in range(1000):
                if point == 5:
                    reached.wait()
                time.sleep(0.001 * (i + 1))  # one is fast, another slow
                if moment == "run" and point == 5:
                    stops[i].run(lambda: time.sleep(30))
                stops[i].check()
                passed[i] += 1
        except StopRequested:
            return
        raise AssertionError("never stopped")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    reached.wait()
    if moment != "check":
        time.sleep(0.05)
    processes[1].post("stop", "SIGTERM 1")
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert len(set(passed)) == 1
    assert passed[0] < 900
    if moment == "run":  # at once, not after 30 s
        assert passed[0] == 5
    assert {stop.received for stop in stops} == {"SIGTERM"}
