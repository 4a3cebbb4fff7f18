"""A small decoder on text, and on text with multi-key recall: the paper's mechanisms side by side at any scale."""

import dataclasses
import pathlib

import numpy as np

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.data.tasks import MultiKeyRecall
from iha_jax.experiments.comparison import Outcome, Progress
from iha_jax.experiments.decoder import Programs, Rows, Run, compiled, costs, on_device, stacked
from iha_jax.experiments.text import Text, load_text
from iha_jax.models import ModelConfig
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.flops import account


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Training of one decoder, with held-out loss and, if asked, accuracy of recall.

    A step has ``batch_size`` rows of text and ``recall_rows`` of recall: pairs of key and value strewn into text, then
    queries. The loss is the mean over the text's tokens plus ``recall_weight`` times the mean over the answers'. Step i
    of a seed depends on the seed and i alone, and so is the same for all variants; what is held out and tested is the
    same for all seeds too.

    Attributes:
      model: the decoder; its vocabulary must hold the tokenizer's tokens and the task's.
      optimizer: with its schedule over ``steps``.
      steps: of the optimizer.
      batch_size: rows of text in a step.
      sequence_length: T.
      recall: the task, or None for text alone; its tokens lie beyond the text's.
      recall_rows: rows of the task in a step; 0 if and only if there is none.
      recall_weight: of the task's loss.
      source: of the text.
      tokenizer: as in `DataConfig`.
      held_out_fraction: share of the documents that is never trained on.
      held_out_rows: rows of text in an evaluation.
      recall_test_rows: rows of the task in an evaluation.
      evaluate_every: steps between evaluations; divides ``steps``.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    steps: int
    batch_size: int
    sequence_length: int
    recall: MultiKeyRecall | None = None
    recall_rows: int = 0
    recall_weight: float = 1.0
    source: SourceConfig = SourceConfig()  # noqa: RUF009 (frozen)
    tokenizer: str = "bytes"
    held_out_fraction: float = 0.02
    held_out_rows: int = 256
    recall_test_rows: int = 512
    evaluate_every: int = 50

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes that contradict each other; both are named.
        """
        for name in ("steps", "batch_size", "sequence_length", "held_out_rows", "recall_test_rows", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps % self.evaluate_every:
            raise ValueError(f"evaluate_every must divide steps={self.steps}, got {self.evaluate_every}")
        if (self.recall is None) != (self.recall_rows == 0):
            raise ValueError(
                f"recall_rows must be 0 without a recall task and more with one, got recall_rows={self.recall_rows} "
                f"and {'no task' if self.recall is None else 'a task'}"
            )
        if self.recall is not None and self.recall.length != self.sequence_length:
            raise ValueError(f"recall.length must be sequence_length={self.sequence_length}, got {self.recall.length}")
        if self.recall is not None and self.recall.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size must hold the recall task's {self.recall.vocab_size} tokens, got "
                f"{self.model.vocab_size}"
            )
        _ = self.training  # checks the rest

    @property
    def training(self) -> TrainConfig:
        """The same as a configuration of `iha_jax.training`, whose optimizer and schedule are used."""
        return TrainConfig(
            name="comparison",
            model=self.model,
            steps=self.steps,
            batch_size=self.batch_size + self.recall_rows,
            optimizer=self.optimizer,
            data=DataConfig(sources=(self.source,), tokenizer=self.tokenizer, sequence_length=self.sequence_length),
        )

    def text(self) -> Text:
        """The text, read once.

        Raises:
          ValueError: its tokens are more than the model's vocabulary, or not apart from the task's.
        """
        text = load_text(self.source, self.tokenizer, self.held_out_fraction, self.sequence_length + 1)
        if text.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size must hold the tokenizer's {text.vocab_size} tokens, got {self.model.vocab_size}"
            )
        if self.recall is not None and self.recall.first_token < text.vocab_size:
            raise ValueError(
                f"recall.first_token must be beyond the tokenizer's {text.vocab_size} tokens, got "
                f"{self.recall.first_token}"
            )
        return text

    def programs(self) -> Programs:
        """What runs compiled, compiled once for all seeds."""
        rows = self.batch_size + self.recall_rows
        return compiled(self.training, self.evaluate_every, rows, min(self.batch_size, rows))

    def step_rows(self, seed: int, step: int) -> dict[str, np.ndarray]:
        """The rows of one step: text, then recall; a step's weights of each kind sum to the kind's weight."""
        text, rng = self.text(), np.random.default_rng([seed, step])
        rows = _text_rows(text.windows(rng, self.batch_size, self.sequence_length + 1))
        if self.recall is None:
            return rows
        filler = text.windows(rng, self.recall_rows, self.sequence_length + 1)
        asked = self.recall.sample(rng, self.recall_rows, filler)
        asked["weights"] *= np.float32(self.recall_weight / asked["weights"].sum())
        return {name: np.concatenate([rows[name], asked[name]]) for name in rows}

    def tests(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
        """The rows of an evaluation, weights 1 and 0: held-out text, and recall in held-out text."""
        text, length = self.text(), self.sequence_length + 1
        held_out = _text_rows(text.held_out_windows(self.held_out_rows, length))
        held_out["weights"] = np.ones_like(held_out["weights"])
        if self.recall is None:
            return held_out, None
        filler = text.held_out_windows(self.recall_test_rows, length)
        # Of a stream that no training step has: those are numbered by seed and step.
        return held_out, self.recall.sample(np.random.default_rng([0, 0, 1]), self.recall_test_rows, filler)

    def run(self, seed: int, directory: pathlib.Path, progress: Progress) -> Outcome:
        """Trains, evaluates and looks inside; see `Experiment`."""
        text, programs = self.text(), self.programs()
        held_out, asked = (None if rows is None else on_device(rows) for rows in self.tests())
        assert held_out is not None
        state = Run(programs, seed, directory / "snapshot.npz")
        while state.step < self.steps:
            steps = [self.step_rows(seed, step) for step in range(state.step, state.step + self.evaluate_every)]
            loss = state.train(stacked(steps))
            scores = {
                "training loss": loss,
                "held-out bits per byte": text.bits_per_byte(float(programs.evaluate(state.params, held_out).loss)),
            }
            if asked is not None:
                scores["recall accuracy"] = float(programs.evaluate(state.params, asked).accuracy)
            progress(state.add(self.evaluate_every, scores))
            state.save()
        return self._outcome(text, programs, state, held_out, asked)

    def _outcome(self, text: Text, programs: Programs, state: Run, held_out: Rows, asked: Rows | None) -> Outcome:
        metrics = {"bits_per_byte": state.curves["held-out bits per byte"][-1][1]}
        if text.bigram is not None:
            nats = text.bigram.nats_per_token([{name: np.asarray(x) for name, x in held_out.items()}])
            metrics["bigram_bits_per_byte"] = text.bits_per_byte(nats)
        if asked is not None and self.recall is not None:
            found = programs.evaluate(state.params, asked)
            metrics |= {
                "recall_accuracy": float(found.accuracy),
                "recall_loss": float(found.loss),
                "recall_chance": 1 / self.recall.value_tokens,
            }
        rows, shown = self.batch_size + self.recall_rows, held_out if asked is None else asked
        return Outcome(
            metrics=metrics,
            curves=state.curves,
            costs=costs(programs, state, self.model, rows, self.sequence_length),
            notes={
                "x_axis": "step",
                "steps": self.steps,
                "full_count_flops_per_token": account(self.model, rows, self.sequence_length).full_training_per_token,
                "training_tokens_of_text": len(text.train),
                "text": text.fingerprint,
            },
            arrays={name: np.asarray(x) for name, x in programs.look(state.params, shown["inputs"][:1]).items()},
        )


def _text_rows(windows: np.ndarray) -> dict[str, np.ndarray]:
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": np.full(inputs.shape, 1 / inputs.size, np.float32)}
