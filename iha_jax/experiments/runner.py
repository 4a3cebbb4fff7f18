"""Runs a grid: every entry with every seed, once, however often it is interrupted."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from iha_jax.experiments.comparison import Comparison, Entry, Outcome, Progress
from iha_jax.experiments.snapshot import load_arrays, write_atomically, write_text
from iha_jax.json_text import parse_json_object
from iha_jax.training.lock import RunLock
from iha_jax.training.serialization import differences, from_plain, to_plain

RESULT, ARRAYS = "result.json", "arrays.npz"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
      entry: what is run.
      seed: with which seed.
      directory: where its results go.
    """

    entry: Entry
    seed: int
    directory: pathlib.Path

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.entry.variant} · {self.entry.setting} · seed {self.seed}"

    def result(self) -> dict[str, Any] | None:
        """The record of a finished run, else None.

        Raises:
          ValueError: it was made with another configuration; what differs is named.
        """
        file = self.directory / RESULT
        if not file.exists():
            return None
        record = parse_json_object(file.read_bytes(), f"{file} (delete it to run that again)")
        # Through JSON, as the record went. A field that has been added since has its default there.
        stored = record["config"]
        with contextlib.suppress(ValueError):
            stored = to_plain(from_plain(type(self.entry.experiment), stored, "experiment"))
        changed = differences(stored, json.loads(json.dumps(to_plain(self.entry.experiment))))
        if changed:
            listed = "; ".join(f"{path}: {old!r} there, {new!r} here" for path, (old, new) in changed.items())
            raise ValueError(
                f"{file} was made with another configuration ({listed}): choose another --output, or delete it"
            )
        return record

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a finished run; empty if it kept none."""
        file = self.directory / ARRAYS
        if not file.exists():
            return {}
        return load_arrays(file)


def cells(comparison: Comparison, seeds: int, output: pathlib.Path) -> list[Cell]:
    """All runs, seed by seed: what is there after an interruption can be compared.

    Args:
      comparison: the grid.
      seeds: seeds 0 … ``seeds - 1``.
      output: directory of all results.
    """
    return [
        Cell(entry, seed, output / "cells" / _slug(f"{entry.setting} {entry.variant} seed {seed}"))
        for seed in range(seeds)
        for entry in comparison.entries
    ]


def run_grid(comparison: Comparison, seeds: int, output: pathlib.Path, command: str, progress: Progress) -> bool:
    """Runs what has no result yet and collects all results in ``results.jsonl``.

    Several processes may work on one grid: each takes what no other has.

    Args:
      comparison: the grid.
      seeds: how many.
      output: directory of all results.
      command: how this was started, to be written down.
      progress: takes lines of text.

    Returns:
      Whether every cell has its result.

    Raises:
      ValueError: results in ``output`` were made with another configuration.
    """
    todo = cells(comparison, seeds, output)
    # Look at all of them first: a mistaken directory should be noticed before hours of work, not after.
    missing = [cell for cell in todo if cell.result() is None]
    progress(f"{comparison.name}: {len(todo)} runs, {len(todo) - len(missing)} done, in {output}")
    for number, cell in enumerate(missing, 1):
        try:
            with RunLock(cell.directory):
                if cell.result() is None:
                    progress(f"[{number}/{len(missing)}] {cell.name}")
                    _run(comparison, cell, command, progress)
        except RuntimeError as error:
            # Only a lock says "in use"; anything else went wrong in earnest.
            if "is in use by" not in str(error):
                raise
            progress(f"[{number}/{len(missing)}] {cell.name}: another process has it")
        collect(comparison, seeds, output)
    collect(comparison, seeds, output)
    return all(cell.result() is not None for cell in todo)


def collect(comparison: Comparison, seeds: int, output: pathlib.Path) -> list[dict[str, Any]]:
    """Writes the finished runs' records to ``results.jsonl``, one a line in the grid's order, and returns them."""
    records = [record for cell in cells(comparison, seeds, output) if (record := cell.result()) is not None]
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "results.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    return records


def versions() -> dict[str, str]:
    """What results may depend on besides the configuration."""
    packages = ("iha-jax", "jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _run(comparison: Comparison, cell: Cell, command: str, progress: Progress) -> None:
    started = _now()
    outcome: Outcome = cell.entry.experiment.run(cell.seed, cell.directory, progress)
    record = {
        "comparison": comparison.name,
        "variant": cell.entry.variant,
        "setting": cell.entry.setting,
        "seed": cell.seed,
        "metrics": dict(outcome.metrics),
        "costs": dict(outcome.costs),
        "notes": dict(outcome.notes),
        "curves": {name: [list(point) for point in points] for name, points in outcome.curves.items()},
        "config": to_plain(cell.entry.experiment),
        "command": command,
        "versions": versions(),
        "started": started,
        "finished": _now(),
    }
    arrays: dict[str, Any] = dict(outcome.arrays)
    if arrays:
        write_atomically(cell.directory / ARRAYS, lambda file: np.savez_compressed(file, **arrays))
    # The result last: where it is, all else is.
    write_text(cell.directory / RESULT, json.dumps(record) + "\n")
    shown: Sequence[str] = [
        f"{m.label} {outcome.metrics[m.name]:{'.2%' if m.percent else '.4f'}}"
        for m in comparison.metrics
        if m.name in outcome.metrics
    ]
    progress(f"  {', '.join(shown)}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
