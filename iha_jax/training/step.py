"""One optimizer step and one evaluation step, as pure functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from iha_jax.training.config import TrainConfig
from iha_jax.training.optimizer import norms_by_kind, schedule
from iha_jax.training.state import ModelFunctions, Params, TrainState

Batch = Mapping[str, Array]
Metrics = dict[str, Array]


def token_losses(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Cross entropy of every target in nats, and the log of the softmax's denominator; float32."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: it fuses, and its gradient is no scatter.
    hit = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    return log_z - jnp.sum(jnp.where(hit, logits, 0), axis=-1), log_z


def weighted_sums(
    model: Any, batch: Batch, z_loss: float, dropout_key: Array | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """Sums over a micro-batch; nothing is divided yet, so that micro-batches add up exactly.

    Args:
      model: called with tokens, positions and segment ids.
      batch: arrays [B, T]: inputs, targets, positions, segment_ids, weights.
      z_loss: weight of ``log_z ** 2``.
      dropout_key: None, no dropout.

    Returns:
      The objective's sum, and the sums "loss" (nats), "z_loss", "correct" and "weight".
    """
    dropout = {} if dropout_key is None else {"dropout_key": dropout_key}
    logits = model(batch["inputs"], positions=batch["positions"], segment_ids=batch["segment_ids"], **dropout)
    losses, log_z = token_losses(logits, batch["targets"])
    weights = batch["weights"]
    # Where the weight is 0 (padding may hold anything) the value must not matter, not even a NaN.
    losses = jnp.where(weights > 0, losses, 0)
    log_z = jnp.where(weights > 0, log_z, 0)
    hits = jnp.argmax(logits, axis=-1) == batch["targets"]
    sums = {
        "loss": jnp.sum(losses * weights),
        "z_loss": jnp.sum(jnp.square(log_z) * weights),
        "correct": jnp.sum(hits * weights),
        "weight": jnp.sum(weights),
    }
    return sums["loss"] + z_loss * sums["z_loss"], jax.lax.stop_gradient(sums)


def summed_gradient(
    functions: ModelFunctions, params: Params, batch: Batch, key: Array, z_loss: float
) -> tuple[Params, Metrics]:
    """Gradient of the objective's *sum* over all micro-batches, and the sums.

    Args:
      functions: the model.
      params: path → parameter.
      batch: arrays [A, B, T], A micro-batches.
      key: of the dropout, folded with the micro-batch's number.
      z_loss: weight of the z-loss.
    """

    def objective(params: Params, micro: Batch, key: Array) -> tuple[Array, Metrics]:
        return weighted_sums(functions.merge(params), micro, z_loss, key)

    gradient = jax.grad(objective, has_aux=True)
    count = batch["inputs"].shape[0]
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    if count == 1:
        return gradient(params, {name: column[0] for name, column in batch.items()}, keys[0])

    def add(total, micro):
        return jax.tree.map(jnp.add, total, gradient(params, *micro)), None

    shapes = jax.eval_shape(gradient, params, {name: column[0] for name, column in batch.items()}, keys[0])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zeros, (dict(batch), keys))[0]


def checksum(tokens: Int[Array, "A B T"]) -> UInt32[Array, ""]:
    """A number that changes with any token or its place in the batch, however batch and devices are divided."""
    a, b, t = tokens.shape
    place = jnp.arange(a * b * t, dtype=jnp.uint32).reshape(tokens.shape)
    mixed = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + place * jnp.uint32(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # two rounds of a multiplicative hash
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def make_train_step(
    config: TrainConfig, functions: ModelFunctions, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The function (state, batch [A, B, T]) → (state, metrics); the state may be donated.

    A step whose loss or gradient isn't finite, or whose batch has no weight at all, changes neither
    parameters nor optimizer state; the first kind is counted.
    """
    rate = schedule(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        gradient, sums = summed_gradient(functions, state.params, batch, key, config.z_loss)
        weight = jnp.maximum(sums["weight"], 1e-9)
        empty = sums["weight"] == 0
        gradient = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradient)
        gradient_norms = norms_by_kind(gradient)
        norm = _total(gradient_norms)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)

        def apply(_):
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return params, optimizer_state, norms_by_kind(updates)

        def keep(_):
            return state.params, state.optimizer, {kind: jnp.zeros_like(n) for kind, n in gradient_norms.items()}

        params, optimizer_state, update_norms = jax.lax.cond(finite & ~empty, apply, keep, None)
        bad = (~finite).astype(jnp.int32)
        new_state = dataclasses.replace(
            state,
            params=params,
            optimizer=optimizer_state,
            step=state.step + 1,
            updates=state.updates + (finite & ~empty).astype(jnp.int32),
            nonfinite=jnp.where(finite, 0, state.nonfinite + 1),
            nonfinite_total=state.nonfinite_total + bad,
        )
        param_norms = norms_by_kind(params)
        metrics = {
            "loss": sums["loss"] / weight,
            "accuracy": sums["correct"] / weight,
            "z_loss": sums["z_loss"] / weight,
            "tokens": sums["weight"],
            "data_checksum": checksum(batch["inputs"]),
            "learning_rate": rate(state.updates),
            "nonfinite": new_state.nonfinite,
            "nonfinite_total": new_state.nonfinite_total,
            "grad_norm": norm,
            "update_norm": _total(update_norms),
            "param_norm": _total(param_norms),
        }
        for name, norms in (("grad", gradient_norms), ("update", update_norms), ("param", param_norms)):
            metrics |= {f"{name}_norm/{kind}": value for kind, value in norms.items()}
        return new_state, metrics

    return train_step


def make_eval_step(functions: ModelFunctions) -> Callable[[Params, Batch], Metrics]:
    """The function (params, batch [B, T]) → sums "loss", "correct", "weight" without dropout."""

    def eval_step(params: Params, batch: Batch) -> Metrics:
        return weighted_sums(functions.merge(params), batch, 0.0)[1]

    return eval_step


def split_micro_batches(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Arrays [A · B, T] as [A, B, T]."""
    return {name: column.reshape(count, -1, *column.shape[1:]) for name, column in batch.items()}


def _total(norms: Mapping[str, Array]) -> Array:
    return jnp.sqrt(sum((jnp.square(n) for n in norms.values()), start=jnp.float32(0)))
