"""What is measured, seen from a benchmark: something that goes on with texts."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.sampling import Sampling
from iha_jax.training.trained import open_trained


class Answerer(Protocol):
    """Goes on with prompts, each by itself."""

    def __call__(self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """The likeliest continuation of each prompt, up to a stop text, which isn't part of it."""
        ...


class Sampler(Protocol):
    """Something that can also go on with a prompt in several ways."""

    def sample(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        seed: int = 0,
        temperature: float = 1.0,
    ) -> list[list[str]]:
        """``num_samples`` continuations of each prompt; the same for the same seed."""
        ...


class ModelAnswerer(Answerer, Sampler, Protocol):
    """A model with its tokenizer.

    Attributes:
      name: for people.
      tokenizer: that prompts are measured with.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102


def model_answerer(checkpoint: str | os.PathLike[str]) -> ModelAnswerer:
    """A trained model as an answerer.

    Args:
      checkpoint: a run's directory (its newest checkpoint), or one of its ``checkpoints/STEP``.

    Raises:
      FileNotFoundError: there is no run or no such checkpoint.
      ValueError: its configuration is damaged, or the checkpoint is of another model.
    """
    trained = open_trained(checkpoint)
    return _Model(f"{trained.config.name}, step {trained.step}", trained.tokenizer, Generator.of(trained))


@dataclasses.dataclass(frozen=True)
class _Model:
    name: str
    tokenizer: Tokenizer
    generator: Generator

    def __call__(self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        sampling = Sampling(max_new_tokens=max_new_tokens, stop=tuple(stop))
        return [completion.text for (completion,) in self.generator.complete(prompts, sampling)]

    def sample(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        seed: int = 0,
        temperature: float = 1.0,
    ) -> list[list[str]]:
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop=tuple(stop), seed=seed)
        found = self.generator.complete(prompts, sampling, num_samples)
        return [[completion.text for completion in completions] for completions in found]
