"""AdamW and Muon with decay and learning rates by parameter path; warm-up and cosine with a floor."""

import collections
import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from iha_jax.training.config import OptimizerConfig, TrainConfig

Params = dict[str, Array]

# Kinds of parameters, by the last names of their paths. Paths rather than numbers of axes: a stack of layers
# adds an axis to every parameter.
_KINDS: tuple[tuple[str, str], ...] = (
    ("mixing", r"(^|\.)(mixing_(query|key|value)|collapse|talking_(logits|weights))$"),
    # Differential attention's λ scales a map as a norm's parameters scale features.
    ("norm", r"(^|\.)([a-z_0-9]*norm[a-z_0-9]*\.[a-z_]+|scale|lambda_[a-z_0-9]+)$"),
    ("bias", r"(^|[._])bias$"),
    ("embedding", r"(^|\.)(table|head_kernel)$"),
)
KINDS = ("matrix", "embedding", "mixing", "norm", "bias")
_DECAYED = ("matrix", "embedding")


def kind_of(path: str) -> str:
    """What a parameter is: "mixing", "norm", "bias", "embedding" or "matrix"."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, path)), "matrix")


def schedule(config: TrainConfig) -> optax.Schedule:
    """Optimizer step → learning rate: linear from 0, then cosine to the floor, then the floor.

    The first step already moves: step i of the warm-up has ``peak · (i + 1) / warmup``.
    """
    peak, final, warmup = config.optimizer.peak_lr, config.optimizer.final_lr, config.optimizer.warmup_steps
    span = config.decay_steps - warmup

    def learning_rate(step):
        step = jnp.asarray(step, jnp.float32)
        rising = peak * (step + 1) / max(warmup, 1)
        progress = jnp.clip((step - warmup) / span, 0, 1)
        falling = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return jnp.where(step < warmup, rising, falling)

    return learning_rate


def multipliers(config: OptimizerConfig, paths: list[str]) -> dict[str, float]:
    """Path → factor of the learning rate."""

    def factor(path: str) -> float:
        group = _group(config, path)
        if group is not None:
            return group.lr_multiplier
        return config.mixing_lr_multiplier if kind_of(path) == "mixing" else 1.0

    return {path: factor(path) for path in paths}


def decay_mask(config: OptimizerConfig, paths: list[str]) -> dict[str, bool]:
    """Path → whether the parameter is decayed."""

    def decayed(path: str) -> bool:
        group = _group(config, path)
        return group.weight_decay if group is not None else kind_of(path) in _DECAYED

    return {path: decayed(path) for path in paths}


def make_optimizer(
    config: TrainConfig, params: Params, axes: Mapping[str, tuple[str | None, ...]]
) -> optax.GradientTransformation:
    """The gradient transformation: clip, direction, decay, multipliers, schedule.

    Args:
      config: the run's configuration.
      params: path → parameter (or its shape).
      axes: path → logical axis names, which tell Muon what a matrix's rows and columns are.

    Raises:
      ValueError: a group's pattern matches no parameter.
    """
    options, paths = config.optimizer, list(params)
    for group in options.groups:
        if not any(re.search(group.pattern, path) for path in paths):
            raise ValueError(f"optimizer.groups: {group.pattern!r} matches no parameter; there are {paths}")
    factors = multipliers(options, paths)
    adam = optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps)
    direction = adam
    if options.name == "muon":
        direction = _muon(options, params, axes, adam)
    clip = optax.identity() if options.clip_norm is None else optax.clip_by_global_norm(options.clip_norm)
    return optax.chain(
        clip,
        direction,
        optax.add_decayed_weights(options.weight_decay, decay_mask(options, paths)),
        _scaled(factors),
        optax.scale_by_learning_rate(schedule(config)),
    )


def norms_by_kind(tree: Any) -> dict[str, Float[Array, ""]]:
    """Kind of parameter → Euclidean norm of its part of the tree, float32."""
    squares: dict[str, Any] = collections.defaultdict(float)
    for path, leaf in tree.items():
        squares[kind_of(path)] += jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {kind: jnp.sqrt(total) for kind, total in squares.items()}


def _group(config: OptimizerConfig, path: str):
    return next((group for group in config.groups if re.search(group.pattern, path)), None)


def _muon(
    options: OptimizerConfig,
    params: Params,
    axes: Mapping[str, tuple[str | None, ...]],
    adam: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon for the matrices, with Adam's root-mean-square update so that both share a learning rate."""
    sides = {path: _matrix_sides(axes[path]) for path in params if kind_of(path) == "matrix"}
    sides = {path: pair for path, pair in sides.items() if all(pair)}
    numbers = {path: optax.contrib.MuonDimensionNumbers(*pair) for path, pair in sides.items()}
    labels = {path: "muon" if path in numbers else "adam" for path in params}

    def dimensions(masked: Any) -> Any:
        # Optax has masked Adam's parameters out of this tree; those leaves stay as they are.
        return {path: numbers.get(path, leaf) for path, leaf in masked.items()}

    def size(path: str) -> float:
        # An orthogonal matrix has a root mean square of 1 / sqrt(its longer side); 0.2 is what AdamW's updates
        # have in practice (arXiv 2502.16982).
        return 0.2 * max(math.prod(params[path].shape[i] for i in side) for side in sides[path]) ** 0.5

    muon = optax.contrib.scale_by_muon(beta=options.muon_beta, weight_dimension_numbers=dimensions)
    scales = {path: size(path) if path in numbers else 1.0 for path in params}
    return optax.chain(optax.partition({"muon": muon, "adam": adam}, labels), _scaled(scales))


def _scaled(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies every update by the factor of its path."""

    def scale(updates: Any, _: Any) -> Any:
        return {path: update * factors[path] for path, update in updates.items()}

    return optax.stateless(scale)


def _matrix_sides(axes: tuple[str | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which axes of a parameter are a matrix's input and which its output; "layers" is a batch of matrices."""
    rest = [i for i, name in enumerate(axes) if name != "layers"]
    # Projections back to the residual stream read [heads, head_dim, embed] or [mlp, embed], all others [embed, …].
    inputs = rest[:-1] if rest and axes[rest[-1]] == "embed" else rest[:1]
    return tuple(inputs), tuple(i for i in rest if i not in inputs)
