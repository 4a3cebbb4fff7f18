"""A small decoder on text, and on text with multi-key recall: the paper's mechanisms side by side at any scale."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from iha_jax.data import DataConfig, SourceConfig
from iha_jax.data.tasks import MultiKeyRecall
from iha_jax.experiments.comparison import Outcome, Progress
from iha_jax.experiments.snapshot import Snapshots
from iha_jax.experiments.text import Text, load_text
from iha_jax.models import ModelConfig, Transformer
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.flops import account
from iha_jax.training.optimizer import make_optimizer
from iha_jax.training.state import ModelFunctions, Params
from iha_jax.training.step import token_losses
from iha_jax.viz import layer_inputs, pictures_of

Rows = Mapping[str, Array]
"""int32 "inputs" and "targets", float32 "weights", each ``[..., B, T]``."""


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
        text, programs = self.text(), _programs(self)
        held_out, asked = (
            None if rows is None else {name: jnp.asarray(x) for name, x in rows.items()} for rows in self.tests()
        )
        assert held_out is not None
        state = _Run(programs, seed, directory / "snapshot.npz")
        while state.step < self.steps:
            steps = [self.step_rows(seed, step) for step in range(state.step, state.step + self.evaluate_every)]
            rows = {name: jnp.asarray(np.stack([step[name] for step in steps])) for name in steps[0]}
            start = time.perf_counter()
            state.params, state.optimizer, loss = programs.train(state.params, state.optimizer, rows)
            loss = float(loss)
            state.seconds += time.perf_counter() - start
            scores = {
                "training loss": loss,
                "held-out bits per byte": text.bits_per_byte(float(programs.evaluate(state.params, held_out).loss)),
            }
            if asked is not None:
                scores["recall accuracy"] = float(programs.evaluate(state.params, asked).accuracy)
            state.add(self.evaluate_every, scores)
            told = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            progress(f"step {state.step}: {told}  {state.seconds / state.step:.3f} s a step")
            state.save()
        return self._outcome(text, programs, state, held_out, asked)

    def _outcome(self, text: Text, programs: "_Programs", state: "_Run", held_out: Rows, asked: Rows | None) -> Outcome:
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
        counted = account(self.model, self.batch_size + self.recall_rows, self.sequence_length)
        shown = held_out if asked is None else asked
        return Outcome(
            metrics=metrics,
            curves=state.curves,
            costs={
                "parameters": sum(x.size for x in state.params.values()),
                "model_flops_per_token": counted.model_training_per_token,
                "executed_flops_per_token": counted.executed_training_per_token,
                "wall_seconds": state.seconds,
                "memory_bytes": programs.memory,
            },
            notes={
                "x_axis": "step",
                "steps": self.steps,
                "full_count_flops_per_token": counted.full_training_per_token,
                "training_tokens_of_text": len(text.train),
                "text": text.fingerprint,
            },
            arrays={name: np.asarray(x) for name, x in programs.look(state.params, shown["inputs"][:1]).items()},
        )


class Scores(NamedTuple):
    """Means over the tokens that have weight."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


class _Programs(NamedTuple):
    init: Any
    train: Any
    evaluate: Any
    look: Any
    memory: int


@functools.lru_cache(maxsize=32)
def _programs(experiment: LanguageModel) -> _Programs:
    """Compiled functions: a grid goes through its variants once for every seed, and compiles each once."""
    config = experiment.model
    functions = ModelFunctions(nnx.eval_shape(lambda: Transformer(config, rngs=jax.random.key(0))))
    optimizer = make_optimizer(experiment.training, functions.params, functions.axes)

    def train_step(carry: tuple[Params, Any], rows: Rows) -> tuple[tuple[Params, Any], Array]:
        params, moments = carry

        def loss_of(params: Params) -> Array:
            losses, _ = token_losses(functions.merge(params)(rows["inputs"]), rows["targets"])
            return jnp.sum(losses * rows["weights"])

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates: Any
        updates, moments = optimizer.update(gradient, moments, params)
        return ({path: params[path] + updates[path] for path in params}, moments), loss

    def train(params: Params, moments: Any, rows: Rows):
        (params, moments), losses = jax.lax.scan(train_step, (params, moments), rows)
        return params, moments, jnp.mean(losses)

    @jax.jit
    def evaluate(params: Params, rows: Rows) -> Scores:
        def sums(row: Rows) -> Float[Array, "3"]:
            logits = functions.merge(params)(row["inputs"][None])
            losses, _ = token_losses(logits, row["targets"][None])
            right = jnp.argmax(logits[0], axis=-1) == row["targets"]
            weights = row["weights"]
            return jnp.stack([jnp.sum(losses[0] * weights), jnp.sum(right * weights), jnp.sum(weights)])

        batch = min(experiment.batch_size, rows["inputs"].shape[0])
        loss, right, weight = jnp.sum(jax.lax.map(sums, rows, batch_size=batch), axis=0)
        return Scores(loss / weight, right / weight)

    @jax.jit
    def look(params: Params, tokens: Int[Array, "1 T"]) -> dict[str, Array]:
        """Mixing tensors and attention patterns of the first and the last layer."""
        layers = layer_inputs(functions.merge(params), tokens)
        chosen = {place: layers[place] for place in (next(iter(layers)), list(layers)[-1])}
        return {
            f"{place}/{name}": array
            for place, (layer, x) in chosen.items()
            for name, array in pictures_of(layer, x).items()
        }

    @jax.jit
    def init(key: Key[Array, ""]) -> tuple[Params, Any]:
        params = ModelFunctions(Transformer(config, rngs=key)).params
        return params, optimizer.init(params)

    shape = (experiment.evaluate_every, experiment.batch_size + experiment.recall_rows, experiment.sequence_length)
    integers, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    rows = {"inputs": integers, "targets": integers, "weights": weights}
    params, moments = jax.eval_shape(init, jax.random.key(0))
    compiled = jax.jit(train, donate_argnums=(0, 1)).lower(params, moments, rows).compile()
    analysis = compiled.memory_analysis()
    memory = 0 if analysis is None else analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return _Programs(init, compiled, evaluate, look, memory)


class _Run:
    """What changes as training goes on, kept in a file so that an interrupted run goes on where it was."""

    def __init__(self, programs: _Programs, seed: int, file: pathlib.Path):
        self.params, self.optimizer = programs.init(jax.random.key(seed))
        self.step, self.seconds = 0, 0.0
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self._file = Snapshots(file)
        found = self._file.load((self.params, self.optimizer))
        if found is not None:
            (self.params, self.optimizer), meta = found
            self.step, self.seconds = meta["step"], meta["seconds"]
            self.curves = {name: [(x, y) for x, y in points] for name, points in meta["curves"].items()}

    def add(self, steps: int, scores: Mapping[str, float]) -> None:
        """Takes what an evaluation after so many more steps found."""
        self.step += steps
        for name, value in scores.items():
            self.curves.setdefault(name, []).append((self.step, value))

    def save(self) -> None:
        """Writes the file, every few seconds at most."""
        meta = {"step": self.step, "seconds": self.seconds, "curves": self.curves}
        self._file.save((self.params, self.optimizer), meta)


def _text_rows(windows: np.ndarray) -> dict[str, np.ndarray]:
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": np.full(inputs.shape, 1 / inputs.size, np.float32)}
