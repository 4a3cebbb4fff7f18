"""Layers of equal structure as one: parameters with a leading ``layers`` axis, scanned over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from iha_jax.models.config import ModelConfig
from iha_jax.nn.parameters import parameter

Tree = Any


def stacked_module(make: Callable[[Array, Array], nnx.Module], keys: Array, depths: Array) -> nnx.Module:
    """A module whose parameters are those of ``make(key, depth)`` for every key, stacked along a new first axis.

    It isn't called itself: split it and hand one slice of its state at a time to its graph definition.

    Args:
      make: from a key and the layer's number to a module.
      keys: ``[layers]`` PRNG keys.
      depths: ``[layers]``, the layers' numbers in the model.
    """
    values = jax.vmap(lambda key, depth: nnx.to_pure_dict(nnx.state(make(key, depth), nnx.Param)))(keys, depths)
    # The structure needs no values; flax's own `eval_shape` keeps modules whole.
    module = nnx.eval_shape(lambda: make(keys[0], depths[0]))
    _set_parameters(module, values)
    return module


def _set_parameters(module: nnx.Module, values: dict) -> None:
    for name, attribute in list(vars(module).items()):
        if isinstance(attribute, nnx.Param):
            setattr(module, name, parameter(values[name], ("layers", *attribute.axes)))
        elif isinstance(attribute, nnx.Module):
            _set_parameters(attribute, values[name])


def stack_parameters(parameters: Tree, config: ModelConfig) -> Tree:
    """Parameters of the unrolled model as those of the scanned one.

    Args:
      parameters: nested dict, ``nnx.to_pure_dict(nnx.state(model, nnx.Param))`` of a model with
        ``scan_layers=False``, or any tree of that structure (an optimizer's moments, say).
      config: of either model; the pattern and the number of layers are read from it.

    Returns:
      The tree of the model with ``scan_layers=True``.
    """
    layers = parameters["layers"]
    if len(layers) != config.num_layers:
        raise ValueError(f"expected {config.num_layers} unrolled layers, got {len(layers)}.")
    period, repeats = len(config.pattern), config.num_repeats
    rest = {name: value for name, value in parameters.items() if name != "layers"}
    if repeats:
        rest["cycle"] = {
            i: jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[r * period + i] for r in range(repeats)))
            for i in range(period)
        }
    remainder = range(config.num_cycled_layers, config.num_layers)
    if remainder:
        rest["layers"] = {i: layers[layer] for i, layer in enumerate(remainder)}
    return rest


def unstack_parameters(parameters: Tree, config: ModelConfig) -> Tree:
    """The inverse of `stack_parameters`."""
    period, repeats = len(config.pattern), config.num_repeats
    rest = {name: value for name, value in parameters.items() if name not in ("cycle", "layers")}
    layers = {}
    for repeat in range(repeats):
        for i in range(period):
            layers[repeat * period + i] = jax.tree.map(lambda x, r=repeat: x[r], parameters["cycle"][i])
    for i in range(config.num_layers - config.num_cycled_layers):
        layers[config.num_cycled_layers + i] = parameters["layers"][i]
    return {**rest, "layers": layers}
