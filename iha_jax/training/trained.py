"""A trained model, from the directory of its run."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
from flax import nnx

from iha_jax.data.tokenizers import Tokenizer, load_tokenizer
from iha_jax.models import ModelConfig, Transformer
from iha_jax.training.checkpoint import load_params
from iha_jax.training.cli import load
from iha_jax.training.config import TrainConfig
from iha_jax.training.state import ModelFunctions, Params


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run left, without its optimizer and data.

    Attributes:
      config: of the run.
      step: of the checkpoint.
      functions: the model as a function of its parameters.
      params: path → parameter.
      tokenizer: that it was trained with.
    """

    config: TrainConfig
    step: int
    functions: ModelFunctions
    params: Params
    tokenizer: Tokenizer

    @property
    def model(self) -> Transformer:
        """The decoder with these parameters."""
        return self.functions.merge(self.params)


def open_trained(path: str | os.PathLike[str]) -> TrainedModel:
    """Reads a checkpoint.

    Args:
      path: a run's directory (its newest checkpoint), or one of its ``checkpoints/STEP``.

    Raises:
      FileNotFoundError: there is no run or no such checkpoint.
      ValueError: its configuration is damaged, or the checkpoint is of another model.
    """
    run, step = run_and_step(path)
    config = load(str(run))
    functions = abstract_model(config.model)
    step, params = load_params(run, functions.params, step)
    return TrainedModel(config, step, functions, params, load_tokenizer(config.data.tokenizer))


def abstract_model(config: ModelConfig) -> ModelFunctions:
    """The configured model with shapes in place of parameters."""
    make: Any = nnx.eval_shape  # any Flax module is made, whatever its type says
    return ModelFunctions(make(lambda: Transformer(config, rngs=jax.random.key(0))))


def run_and_step(path: str | os.PathLike[str]) -> tuple[pathlib.Path, int | None]:
    """A run's directory, and the step if a path names one of its checkpoints."""
    path = pathlib.Path(path).expanduser()
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        return path.parent.parent, int(path.name)
    return path, None
