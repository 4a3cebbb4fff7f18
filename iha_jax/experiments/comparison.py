"""What a comparison is: entries that differ in one thing, the numbers they are compared by, and their results."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Progress = Callable[[str], None]

COSTS = {
    "parameters": "parameters",
    "model_flops_per_token": "model FLOPs per token",
    "executed_flops_per_token": "executed FLOPs per token",
    "wall_seconds": "training time",
    "memory_bytes": "memory",
}
"""Name → label of the costs that a report shows: FLOPs of a training step, seconds of training without compilation,
bytes that the compiled step needs."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number to compare by.

    Attributes:
      name: key in `Outcome.metrics`.
      label: for people.
      higher_is_better: whether more is better.
      percent: whether it is a share, shown in per cent.
      reference: key in `Outcome.metrics` of what a model without any skill reaches, if there is such a number.
      reference_label: for people, whose number the reference is.
    """

    name: str
    label: str
    higher_is_better: bool = True
    percent: bool = False
    reference: str | None = None
    reference_label: str = "without any skill"


@dataclasses.dataclass
class Outcome:
    """What one run found.

    Attributes:
      metrics: name → final value; one that a setting does not have is left out there.
      curves: label → points (x, y).
      costs: name in `COSTS` → value; what isn't known is left out.
      notes: anything else worth keeping, JSON values.
      arrays: pictures' data: ``mixing/<tensor>`` ``[M, N, P]`` (or a collapse ``[N, P]``), and
        ``patterns/<label>``, square maps of attention ``[count, rows, columns]``; of several layers, with
        ``<layer>/`` in front.
    """

    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Experiment(Protocol):
    """A frozen dataclass that can be run; its fields are what its results are filed under."""

    def run(self, seed: int, directory: pathlib.Path, progress: Progress) -> Outcome:
        """Runs with a seed, which decides everything random.

        Args:
          seed: at least 0.
          directory: exists and is this run's own; what an interrupted run left there may be taken up.
          progress: takes a line of text now and then.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """One cell of the grid, before seeds.

    Attributes:
      variant: what is compared ("IHA, P = 8").
      setting: under which circumstances ("ternary, learning rate 1e-3"); variants are compared within a setting.
      experiment: the run.
    """

    variant: str
    setting: str
    experiment: Experiment


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A grid of entries.

    Attributes:
      name: of its directory.
      title: of its page.
      entries: the cells; every pair of setting and variant at most once.
      metrics: what is compared, the most important first.
      baseline: the variant that others are compared with, seed by seed.
      note: what a reader must know about how it was done.
      reduced: a smaller comparison for machines without an accelerator.
    """

    name: str
    title: str
    entries: tuple[Entry, ...]
    metrics: tuple[Metric, ...]
    baseline: str
    note: str = ""
    reduced: "Comparison | None" = None

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: no entries or metrics, two entries of one name, or a baseline that isn't among the variants.
        """
        if not self.entries or not self.metrics:
            raise ValueError(f"comparison {self.name!r} needs at least one entry and one metric")
        names = [(entry.setting, entry.variant) for entry in self.entries]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ValueError(f"comparison {self.name!r} has two entries {double[1]!r} in the setting {double[0]!r}")
        if self.baseline not in self.variants:
            raise ValueError(f"the baseline must be one of {list(self.variants)}, got {self.baseline!r}")

    @property
    def variants(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(entry.variant for entry in self.entries))

    @property
    def settings(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(entry.setting for entry in self.entries))
