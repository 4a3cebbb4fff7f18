"""A comparison whose experiments take no time, and whose numbers are known."""

import contextlib
import dataclasses

import numpy as np

from iha_jax.experiments import Comparison, Entry, Metric, Outcome, snapshot


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def assert_kills_change_nothing(experiment, directory, monkeypatch):
    """Runs once in one go, and once killed after every evaluation but the first since it was started.

    Returns:
      The outcome, and how often the second run was started.
    """
    monkeypatch.setattr(snapshot, "_SECONDS_BETWEEN", 0)
    for name in ("whole", "killed"):
        (directory / name).mkdir()
    whole = experiment.run(2, directory / "whole", lambda line: None)
    starts, killed = 0, None
    while killed is None:
        lines = 0

        def progress(line):
            nonlocal lines
            lines += 1
            if lines == 2:
                raise Killed  # its first evaluation is saved, this one is lost

        starts += 1
        with contextlib.suppress(Killed):
            killed = experiment.run(2, directory / "killed", progress)
    assert killed.metrics == whole.metrics
    assert killed.curves == whole.curves
    assert killed.notes == whole.notes
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(killed.arrays[name], array)
    return whole, starts


@dataclasses.dataclass(frozen=True)
class Known:
    """Reaches ``base + gain * seed / 10`` and draws a curve towards it."""

    base: float
    gain: float = 0.0
    mixes: bool = False

    def run(self, seed, directory, progress):
        progress("working")
        value = self.base + self.gain * seed / 10
        arrays = {}
        if self.mixes:
            rng = np.random.default_rng(seed)
            arrays = {f"mixing/{name}": rng.normal(size=(4, 4, 3)) for name in ("query", "key", "value")}
            arrays["mixing/collapse"] = rng.normal(size=(4, 3))
            arrays["patterns/pseudo"] = rng.random((4, 15, 15))
        arrays["patterns/effective"] = np.eye(5)[None].repeat(4, axis=0)
        return Outcome(
            metrics={"accuracy": value, "loss": 1 - value, "chance": 0.5},
            curves={"validation accuracy": [(i, value * i / 4) for i in range(1, 5 + seed)]},
            costs={"parameters": 1000, "model_flops_per_token": 2.5e6, "memory_bytes": 3 * 2**20},
            notes={"epochs": 4 + seed},
            arrays=arrays,
        )


def comparison(**changes):
    entries = tuple(
        Entry(variant, setting, Known(base + shift, gain, mixes))
        for setting, shift in (("easy", 0.2), ("hard <1>", 0.0))
        for variant, base, gain, mixes in (("plain", 0.5, 0.0, False), ("mixed & more", 0.6, 0.5, True))
    )
    metrics = (
        Metric("accuracy", "test accuracy", percent=True, reference="chance"),
        Metric("loss", "test loss", higher_is_better=False),
    )
    whole = Comparison(
        name="known", title="Known & <sure>", entries=entries, metrics=metrics, baseline="plain", note="A note."
    )
    return dataclasses.replace(whole, **changes)
