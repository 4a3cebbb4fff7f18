"""What a step changes: parameters, optimizer, counters, random key; and the model as a pure function of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

Params = dict[str, Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "optimizer", "step", "updates", "nonfinite", "nonfinite_total", "key"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run, a pytree.

    Attributes:
      params: path → parameter.
      optimizer: the optax state.
      step: batches consumed, int32.
      updates: times the parameters changed, int32: what the schedule counts.
      nonfinite: non-finite steps in a row up to now, int32.
      nonfinite_total: non-finite steps in all, int32.
      key: constant; a step's dropout key is made of it and ``step``.
    """

    params: Params
    optimizer: Any
    step: Int[Array, ""]
    updates: Int[Array, ""]
    nonfinite: Int[Array, ""]
    nonfinite_total: Int[Array, ""]
    key: Key[Array, ""]


class ModelFunctions:
    """An NNX model split into its parameters and pure functions of them.

    Splitting once and merging under the trace keeps every transformation plain JAX: jit, grad and scan see
    arrays only.

    Attributes:
      axes: path → logical axis names of the parameter.
    """

    def __init__(self, model: nnx.Module):
        self._static, params, self._rest = nnx.split(model, nnx.Param, ...)
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._paths = [_path(keys) for keys, _ in leaves]
        self._initial = {path: leaf for path, (_, leaf) in zip(self._paths, leaves, strict=True)}
        variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
        self.axes: dict[str, tuple[str | None, ...]] = {
            path: tuple(variable.get_metadata().get("axes") or (None,) * leaf.ndim)
            for (path, leaf), variable in zip(self._initial.items(), variables, strict=True)
        }

    @property
    def params(self) -> Params:
        """Path → the parameter the model was made with (or its shape)."""
        return dict(self._initial)

    def merge(self, params: Params) -> Any:
        """The model with other parameters (path → parameter)."""
        state = jax.tree.unflatten(self._structure, [params[path] for path in self._paths])
        return nnx.merge(self._static, state, self._rest)


def initial_state(functions: ModelFunctions, optimizer: Any, seed: int) -> TrainState:
    """The state before the first step.

    Args:
      functions: of the model, with its initial parameters.
      optimizer: an optax transformation.
      seed: of the dropout keys.
    """

    def zero() -> Array:
        # One array for each counter: the state is donated, and a buffer can be given away only once.
        return jnp.zeros((), jnp.int32)

    params = functions.params
    return TrainState(
        params=params,
        optimizer=optimizer.init(params),
        step=zero(),
        updates=zero(),
        nonfinite=zero(),
        nonfinite_total=zero(),
        key=jax.random.key(seed),
    )


def _path(keys: tuple[Any, ...]) -> str:
    """Names of a key path, as "layers.0.attention.mixing_query"; a variable's own ``value`` is left out."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))).strip(".") for k in keys]
    return ".".join(name for name in names if name not in ("value", "raw_value"))
