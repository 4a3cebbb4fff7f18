"""The train step as a program for a mesh: what it takes, where that lives, and its lowering. Nothing is allocated."""

import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from iha_jax.models import Transformer
from iha_jax.training.config import TrainConfig
from iha_jax.training.optimizer import make_optimizer
from iha_jax.training.placement import Placement
from iha_jax.training.state import ModelFunctions, TrainState, initial_state
from iha_jax.training.step import make_train_step


class StepProgram:
    """A run's train step, from its configuration and devices alone.

    Attributes:
      functions: the model's.
      optimizer: an optax transformation.
      num_parameters: of the model.
    """

    def __init__(self, config: TrainConfig, placement: Placement):
        """Traces the model's shapes.

        Args:
          config: of the run, its model resolved.
          placement: the devices, real or of a topology to compile for.
        """
        self._config, self._placement = config, placement
        self.functions = ModelFunctions(nnx.eval_shape(self._model))
        self.optimizer = make_optimizer(config, self.functions.params, self.functions.axes)
        self.num_parameters = sum(math.prod(p.shape) for p in self.functions.params.values())

    def initial_state(self) -> TrainState:
        """The state before the first step; traceable."""
        return initial_state(ModelFunctions(self._model()), self.optimizer, self._config.seed)

    def state_shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`.

        Raises:
          ValueError: if a parameter's size does not divide on the mesh.
        """
        return self._placement.shapes(self.initial_state, self.functions.axes)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The same of a batch: ``[A, B, T]``, A micro-batches."""
        config = self._config
        shape = (config.micro_batches, config.micro_batch_size, config.data.sequence_length)
        place = functools.partial(self._placement.batch_shape, shape)
        integers = ("inputs", "targets", "segment_ids", "positions")
        return {**{name: place(np.int32) for name in integers}, "weights": place(np.float32)}

    def lower(self, state: TrainState) -> jax.stages.Lowered:
        """The step lowered for the devices; its state is donated, and the new one lies as the old one.

        Args:
          state: arrays, or what `state_shapes` returns.
        """
        placement = self._placement
        step = jax.jit(
            make_train_step(self._config, self.functions, self.optimizer),
            donate_argnums=0,
            out_shardings=None if placement.mesh is None else (jax.tree.map(lambda x: x.sharding, state), None),
        )
        with placement.active():
            return step.lower(state, self.batch_shapes())

    def _model(self) -> Any:
        return Transformer(self._config.model, rngs=nnx.Rngs(self._config.seed))
