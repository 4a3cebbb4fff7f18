"""Training of a small decoder on rows made beforehand: what experiments with a decoder share."""

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from iha_jax.experiments.snapshot import Snapshots
from iha_jax.models import ModelConfig, Transformer
from iha_jax.training.config import TrainConfig
from iha_jax.training.flops import account
from iha_jax.training.optimizer import make_optimizer
from iha_jax.training.state import ModelFunctions, Params
from iha_jax.training.step import token_losses
from iha_jax.training.trained import abstract_model
from iha_jax.viz import layer_inputs, pictures_of

Rows = Mapping[str, Array]
"""int32 "inputs" and "targets", float32 "weights", each ``[..., B, T]``."""


class Scores(NamedTuple):
    """Means over the tokens that have weight."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


class Programs(NamedTuple):
    """Compiled functions and what they need.

    Attributes:
      init: (key) → parameters and the optimizer's moments.
      train: (parameters, moments, rows ``[steps, B, T]``) → both after so many steps, and the mean loss.
      evaluate: (parameters, rows ``[rows, T]``) → `Scores`.
      look: (parameters, tokens ``[1, T]``) → arrays of the first and the last layer, as reports draw them.
      memory: bytes that a step needs.
    """

    init: Any
    train: Any
    evaluate: Any
    look: Any
    memory: int


@functools.lru_cache(maxsize=32)
def compiled(training: TrainConfig, steps: int, rows: int, evaluation_batch: int) -> Programs:
    """The functions of an experiment: a grid goes through its variants once for every seed, and compiles each once.

    Args:
      training: model, optimizer with its schedule, and sequence length.
      steps: of the optimizer in one call of ``train``.
      rows: B.
      evaluation_batch: rows evaluated at once.
    """
    config = training.model
    functions = abstract_model(config)
    optimizer = make_optimizer(training, functions.params, functions.axes)

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

        batch = min(evaluation_batch, rows["inputs"].shape[0])
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

    shape = (steps, rows, training.data.sequence_length)
    integers, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    given = {"inputs": integers, "targets": integers, "weights": weights}
    params, moments = jax.eval_shape(init, jax.random.key(0))
    compiled = jax.jit(train, donate_argnums=(0, 1)).lower(params, moments, given).compile()
    analysis = compiled.memory_analysis()
    memory = 0 if analysis is None else analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return Programs(init, compiled, evaluate, look, memory)


class Run:
    """What changes as training goes on, kept in a file so that an interrupted run goes on where it was."""

    def __init__(self, programs: Programs, seed: int, file: pathlib.Path):
        self.params, self.optimizer = programs.init(jax.random.key(seed))
        self.step, self.seconds = 0, 0.0
        self._programs = programs
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self._file = Snapshots(file)
        found = self._file.load((self.params, self.optimizer))
        if found is not None:
            (self.params, self.optimizer), meta = found
            self.step, self.seconds = meta["step"], meta["seconds"]
            self.curves = {name: [(x, y) for x, y in points] for name, points in meta["curves"].items()}

    def train(self, rows: Rows) -> float:
        """Some steps, whose number is not counted before `add`; their mean loss."""
        start = time.perf_counter()
        self.params, self.optimizer, loss = self._programs.train(self.params, self.optimizer, rows)
        loss = float(loss)
        self.seconds += time.perf_counter() - start
        return loss

    def add(self, steps: int, scores: Mapping[str, float]) -> str:
        """Takes what an evaluation after so many more steps found; gives a line about it."""
        self.step += steps
        for name, value in scores.items():
            self.curves.setdefault(name, []).append((self.step, value))
        told = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        return f"step {self.step}: {told}  {self.seconds / self.step:.3f} s a step"

    def save(self) -> None:
        """Writes the file, every few seconds at most."""
        meta = {"step": self.step, "seconds": self.seconds, "curves": self.curves}
        self._file.save((self.params, self.optimizer), meta)


def on_device(rows: Mapping[str, np.ndarray]) -> Rows:
    """The same rows as device arrays."""
    return {name: jnp.asarray(x) for name, x in rows.items()}


def stacked(steps: Sequence[Mapping[str, np.ndarray]]) -> Rows:
    """The rows of consecutive steps as `Programs.train` takes them."""
    return {name: jnp.asarray(np.stack([step[name] for step in steps])) for name in steps[0]}


def costs(programs: Programs, run: Run, model: ModelConfig, rows: int, length: int) -> dict[str, float]:
    """What a finished run cost, under the names of `iha_jax.experiments.comparison.COSTS`."""
    counted = account(model, rows, length)
    return {
        "parameters": sum(x.size for x in run.params.values()),
        "model_flops_per_token": counted.model_training_per_token,
        "executed_flops_per_token": counted.executed_training_per_token,
        "wall_seconds": run.seconds,
        "memory_bytes": programs.memory,
    }
