"""A small decoder that learns to find needles in a haystack of words."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from iha_jax.data import DataConfig
from iha_jax.data.tasks import NeedleInHaystack
from iha_jax.experiments.comparison import Outcome, Progress
from iha_jax.experiments.decoder import Run, compiled, costs, on_device, stacked
from iha_jax.models import ModelConfig
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.flops import account


@dataclasses.dataclass(frozen=True)
class NeedleSearch:
    """Training of one decoder on the answers alone, with the share of answers it gets right.

    Step i of a seed depends on the seed and i alone, and so is the same for all variants; the test is the same for all
    seeds too.

    Attributes:
      task: the haystacks.
      model: the decoder; its vocabulary must hold the task's.
      optimizer: with its schedule over ``steps``.
      steps: of the optimizer.
      batch_size: haystacks in a step.
      test_rows: haystacks in an evaluation.
      evaluate_every: steps between evaluations; divides ``steps``.
    """

    task: NeedleInHaystack
    model: ModelConfig
    optimizer: OptimizerConfig
    steps: int
    batch_size: int
    test_rows: int = 512
    evaluate_every: int = 50

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes that contradict each other; both are named.
        """
        for name in ("steps", "batch_size", "test_rows", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps % self.evaluate_every:
            raise ValueError(f"evaluate_every must divide steps={self.steps}, got {self.evaluate_every}")
        if self.task.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size must hold the task's {self.task.vocab_size} words, got {self.model.vocab_size}"
            )
        _ = self.training  # checks the rest

    @property
    def training(self) -> TrainConfig:
        """The same as a configuration of `iha_jax.training`, whose optimizer and schedule are used."""
        return TrainConfig(
            name="needles",
            model=self.model,
            steps=self.steps,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            data=DataConfig(sequence_length=self.task.length),
        )

    def step_rows(self, seed: int, step: int) -> dict[str, np.ndarray]:
        """The rows of one step; weights sum to 1."""
        rows = self.task.sample(np.random.default_rng([seed, step]), self.batch_size)
        rows["weights"] /= rows["weights"].sum()
        return rows

    def test(self) -> dict[str, np.ndarray]:
        """The rows of an evaluation, weights 1 and 0."""
        # Of a stream that no training step has: those are numbered by seed and step.
        return self.task.sample(np.random.default_rng([0, 0, 1]), self.test_rows)

    def run(self, seed: int, directory: pathlib.Path, progress: Progress) -> Outcome:
        """Trains, evaluates and looks inside; see `Experiment`."""
        programs = compiled(self.training, self.evaluate_every, self.batch_size, self.batch_size)
        test, state = on_device(self.test()), Run(programs, seed, directory / "snapshot.npz")
        while state.step < self.steps:
            steps = [self.step_rows(seed, step) for step in range(state.step, state.step + self.evaluate_every)]
            loss, found = state.train(stacked(steps)), programs.evaluate(state.params, test)
            scores = {"training loss": loss, "retrieval accuracy": float(found.accuracy)}
            progress(state.add(self.evaluate_every, scores))
            state.save()
        found = programs.evaluate(state.params, test)
        counted = account(self.model, self.batch_size, self.task.length)
        return Outcome(
            metrics={
                "retrieval_accuracy": float(found.accuracy),
                "retrieval_loss": float(found.loss),
                "steps_to_90_percent": self._steps_to(0.9, state.curves["retrieval accuracy"]),
                "chance": self.task.value_words**-self.task.value_length,
                "one_of_the_needles": 1 / self.task.num_needles,
            },
            curves=state.curves,
            costs=costs(programs, state, self.model, self.batch_size, self.task.length),
            notes={
                "x_axis": "step",
                "steps": self.steps,
                "answers_tested": int(test["weights"].sum()),
                "full_count_flops_per_token": counted.full_training_per_token,
            },
            arrays={name: np.asarray(x) for name, x in programs.look(state.params, test["inputs"][:1]).items()},
        )

    def _steps_to(self, accuracy: float, curve: Sequence[tuple[int, float]]) -> int:
        """The first evaluation's step from which on accuracy was never below; all steps if there is none."""
        below = [step for step, found in curve if found < accuracy]
        first = below[-1] + self.evaluate_every if below else self.evaluate_every
        return min(first, self.steps)
