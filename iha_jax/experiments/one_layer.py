"""The one-layer experiment of the paper's appendix D: an encoder learns to compose relations."""

import dataclasses
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from iha_jax.data.tasks import RelationComposition
from iha_jax.experiments.comparison import Outcome, Progress
from iha_jax.experiments.encoder_flops import encoder_flops_per_token
from iha_jax.experiments.snapshot import Snapshots
from iha_jax.models.encoder import Encoder, EncoderConfig
from iha_jax.training.optimizer import kind_of
from iha_jax.training.state import ModelFunctions, Params
from iha_jax.viz import attention_patterns

Data = tuple[tuple[Array, Array], ...]
"""Inputs and targets, int8 ``[examples, m²]``, for every size m."""


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """Training of one encoder with early stopping.

    The paper pads a batch to its longest example. Here every batch has the same number of examples of each size m
    and nothing is padded: each size is its own program, and a step sums their gradients. Data are generated once,
    stay on the device, and an epoch is one call. All that is random follows from the seed, so that variants run with
    one seed see the same examples in the same order.

    Attributes:
      task: which composition.
      model: the encoder; ``max_length`` must cover the task.
      learning_rate: of Adam, constant.
      train_examples: a multiple of the number of sizes; likewise the next two.
      validation_examples: for early stopping.
      test_examples: for the result, at the parameters of the best validation loss.
      batch_per_size: examples of every size in a step.
      max_epochs: the most epochs.
      patience: epochs without a better validation loss after which training stops.
      mixing_lr_multiplier: of the learning rate of mixing tensors and collapse.
    """

    task: RelationComposition
    model: EncoderConfig
    learning_rate: float
    train_examples: int = 40_000
    validation_examples: int = 5_000
    test_examples: int = 5_000
    batch_per_size: int = 16
    max_epochs: int = 200
    patience: int = 10
    mixing_lr_multiplier: float = 1.0

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: numbers of examples that can't be spread evenly, or fewer positions than tokens.
        """
        sizes = len(self.task.sizes)
        for name in ("train_examples", "validation_examples", "test_examples"):
            count = getattr(self, name)
            if count < sizes or count % sizes:
                raise ValueError(f"{name} must be a positive multiple of the number of sizes, {sizes}, got {count}")
        if not 1 <= self.batch_per_size <= self.train_examples // sizes:
            raise ValueError(
                f"batch_per_size must be from 1 to train_examples / sizes = {self.train_examples // sizes}, got "
                f"{self.batch_per_size}"
            )
        if self.task.max_length > self.model.max_length:
            raise ValueError(
                f"the task has up to {self.task.max_length} tokens, but model.max_length={self.model.max_length}"
            )

    def data(self, seed: int) -> tuple[Data, Data, Data]:
        """Training, validation and test data of a seed, on the device."""

        def split(index: int, count: int) -> Data:
            sizes = self.task.sizes
            parts = (
                self.task.of_size(np.random.default_rng([seed, index, size]), count // len(sizes), size)
                for size in sizes
            )
            return tuple((jnp.asarray(inputs), jnp.asarray(targets)) for inputs, targets in parts)

        counts = (self.train_examples, self.validation_examples, self.test_examples)
        train, validation, test = (split(index, count) for index, count in enumerate(counts))
        return train, validation, test

    def run(self, seed: int, directory: pathlib.Path, progress: Progress) -> Outcome:
        """Trains, tests and looks inside; see `Experiment`."""
        train, validation, test = self.data(seed)
        programs = _programs(dataclasses.replace(self, learning_rate=0.0))
        key = jax.random.fold_in(jax.random.key(seed), 1)
        state = _Run(programs.init(jax.random.key(seed)), programs.optimizer, directory / "snapshot.npz")
        rate = jnp.float32(self.learning_rate)
        while state.epoch < self.max_epochs and state.epoch - state.best_epoch < self.patience:
            start = time.perf_counter()
            state.params, state.optimizer, loss = programs.epoch(
                state.params, state.optimizer, train, jax.random.fold_in(key, state.epoch), rate
            )
            loss = float(loss)
            state.seconds += time.perf_counter() - start
            scores = programs.evaluate(state.params, validation)
            better = state.add(loss, float(scores.loss), float(scores.accuracy))
            progress(
                f"epoch {state.epoch}: loss {loss:.4f}, validation loss {float(scores.loss):.4f}, accuracy "
                f"{float(scores.accuracy):.2%}{' *' if better else ''}  {state.seconds / state.epoch:.1f} s an epoch"
            )
            state.save()
        scores = programs.evaluate(state.best, test)
        yes = np.mean(np.concatenate([np.asarray(targets).ravel() for _, targets in test]))
        flops = encoder_flops_per_token(self.model, tuple(m * m for m in self.task.sizes), self.batch_per_size)
        points = range(1, state.epoch + 1)
        return Outcome(
            metrics={
                "test_accuracy": float(scores.accuracy),
                "test_all_right": float(scores.all_right),
                "test_loss": float(scores.loss),
                "always_the_same": float(max(yes, 1 - yes)),
            },
            curves={name: list(zip(points, values, strict=True)) for name, values in state.curves.items()},
            costs={
                "parameters": sum(x.size for x in state.best.values()),
                "model_flops_per_token": flops.model,
                "executed_flops_per_token": flops.executed,
                "wall_seconds": state.seconds,
                "memory_bytes": programs.memory,
            },
            notes={
                "epochs": state.epoch,
                "best_epoch": state.best_epoch,
                "stopped_early": state.epoch < self.max_epochs,
            },
            arrays={name: np.asarray(x) for name, x in programs.look(state.best, test[0][0][:1]).items()},
        )


class Scores(NamedTuple):
    """Means over tokens, and the share of examples with every token right."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    all_right: Float[Array, ""]


class _Programs(NamedTuple):
    functions: ModelFunctions
    optimizer: optax.GradientTransformation
    init: Any
    epoch: Any
    evaluate: Any
    look: Any
    memory: int


@functools.lru_cache(maxsize=4)
def _programs(experiment: OneLayer) -> _Programs:
    """Compiled functions; the learning rate is an argument, so that a grid compiles every variant once."""
    config = experiment.model
    functions = ModelFunctions(nnx.eval_shape(lambda: Encoder(config, rngs=jax.random.key(0))))
    optimizer = optax.scale_by_adam()
    factors = {path: experiment.mixing_lr_multiplier if kind_of(path) == "mixing" else 1.0 for path in functions.params}

    def token_losses(params: Params, inputs: Int[Array, "B T"], targets: Int[Array, "B T"]) -> tuple[Array, Array]:
        logits = functions.merge(params)(inputs.astype(jnp.int32))
        losses = optax.sigmoid_binary_cross_entropy(logits, targets.astype(logits.dtype))
        return losses, (logits > 0) == (targets > 0)

    def epoch(params: Params, moments: Any, data: Data, key: Key[Array, ""], rate: Float[Array, ""]):
        size, per_size = experiment.batch_per_size, data[0][0].shape[0]
        steps = per_size // size
        tokens = size * sum(inputs.shape[1] for inputs, _ in data)
        orders = jnp.stack([jax.random.permutation(k, per_size) for k in jax.random.split(key, len(data))], axis=1)
        orders = orders[: steps * size].reshape(steps, size, len(data))

        def loss_of(params: Params, rows: Int[Array, "b sizes"]) -> Array:
            losses = (
                jnp.sum(token_losses(params, inputs[rows[:, i]], targets[rows[:, i]])[0])
                for i, (inputs, targets) in enumerate(data)
            )
            return sum(losses, start=jnp.float32(0)) / tokens

        def step(carry, rows):
            params, moments = carry
            loss, gradient = jax.value_and_grad(loss_of)(params, rows)
            directions: Any
            directions, moments = optimizer.update(gradient, moments)
            params = {path: params[path] - rate * factors[path] * directions[path] for path in params}
            return (params, moments), loss

        (params, moments), losses = jax.lax.scan(step, (params, moments), orders)
        return params, moments, jnp.mean(losses)

    @jax.jit
    def evaluate(params: Params, data: Data) -> Scores:
        tokens = sum(inputs.size for inputs, _ in data)
        examples = sum(inputs.shape[0] for inputs, _ in data)
        totals = jnp.zeros(3)
        for inputs, targets in data:

            def sums(example: tuple[Array, Array]) -> Float[Array, "3"]:
                losses, correct = token_losses(params, example[0][None], example[1][None])
                return jnp.stack([jnp.sum(losses), jnp.sum(correct, dtype=jnp.float32), jnp.all(correct) * 1.0])

            # Batches of examples, so that memory is that of a training step at most; any remainder is handled.
            batch = min(experiment.batch_per_size, inputs.shape[0])
            totals += jnp.sum(jax.lax.map(sums, (inputs, targets), batch_size=batch), axis=0)
        return Scores(totals[0] / tokens, totals[1] / tokens, totals[2] / examples)

    @jax.jit
    def look(params: Params, tokens: Int[Array, "1 T"]) -> dict[str, Array]:
        """Mixing tensors, and the attention patterns of one example."""
        model = functions.merge(params)
        layer, arrays = model.attention, {}
        if mixing := getattr(layer, "mixing", None):
            arrays = {f"mixing/{name}": getattr(mixing, name) for name in ("query", "key", "value", "collapse")}
        patterns = attention_patterns(layer, model.embed(tokens.astype(jnp.int32)))
        return arrays | {f"patterns/{name}": value for name, value in patterns.items()}

    @jax.jit
    def init(key: Key[Array, ""]) -> Params:
        return ModelFunctions(Encoder(config, rngs=key)).params

    sizes = experiment.task.sizes
    per_size = experiment.train_examples // len(sizes)
    data = tuple((jax.ShapeDtypeStruct((per_size, m * m), jnp.int8),) * 2 for m in sizes)
    params = jax.eval_shape(init, jax.random.key(0))
    arguments = (params, jax.eval_shape(optimizer.init, params), data, jax.random.key(0), jnp.float32(0))
    compiled = jax.jit(epoch, donate_argnums=(0, 1)).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    memory = 0 if analysis is None else analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return _Programs(functions, optimizer, init, compiled, evaluate, look, memory)


class _Run:
    """What changes from epoch to epoch, kept in a file so that an interrupted run goes on where it was."""

    def __init__(self, params: Params, optimizer: optax.GradientTransformation, file: pathlib.Path):
        self.params, self.optimizer = params, optimizer.init(params)
        self.best = jax.tree.map(jnp.copy, params)
        self.epoch = self.best_epoch = 0
        self.best_loss = float("inf")
        self.seconds = 0.0
        self.curves: dict[str, list[float]] = {
            name: [] for name in ("training loss", "validation loss", "validation accuracy")
        }
        self._file = Snapshots(file)
        found = self._file.load((self.params, self.optimizer, self.best))
        if found is not None:
            (self.params, self.optimizer, self.best), meta = found
            self.epoch, self.best_epoch, self.best_loss = meta["epoch"], meta["best_epoch"], meta["best_loss"]
            self.seconds, self.curves = meta["seconds"], meta["curves"]

    def add(self, loss: float, validation_loss: float, accuracy: float) -> bool:
        """Takes an epoch's numbers; whether it is the best so far."""
        self.epoch += 1
        for name, value in zip(self.curves, (loss, validation_loss, accuracy), strict=True):
            self.curves[name].append(value)
        better = validation_loss < self.best_loss
        if better:
            self.best_loss, self.best_epoch = validation_loss, self.epoch
            # A copy: the next epoch is given the buffers of these.
            self.best = jax.tree.map(jnp.copy, self.params)
        return better

    def save(self) -> None:
        """Writes the file, every few seconds at most."""
        meta = {name: getattr(self, name) for name in ("epoch", "best_epoch", "best_loss", "seconds", "curves")}
        self._file.save((self.params, self.optimizer, self.best), meta)
