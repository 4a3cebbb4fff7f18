"""What is measured, seen from a benchmark: something that goes on with texts."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.evaluation.generate import Generator, Prompt
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
      context: tokens that the model is made for.
      truncated: prompts so far that lost their beginning.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102
    @property
    def context(self) -> int: ...  # noqa: D102
    @property
    def truncated(self) -> int: ...  # noqa: D102


def model_answerer(
    checkpoint: str | os.PathLike[str], max_length: int | None = None, truncate: bool = False
) -> ModelAnswerer:
    """A trained model as an answerer.

    Args:
      checkpoint: a run's directory (its newest checkpoint), or one of its ``checkpoints/STEP``.
      max_length: the most tokens of a prompt and its answer together; default what the model is made for. More is
        computed as well, positions going on.
      truncate: whether a prompt that is too long loses its beginning; else it is an error.

    Raises:
      FileNotFoundError: there is no run or no such checkpoint.
      ValueError: its configuration is damaged, or the checkpoint is of another model.
    """
    trained = open_trained(checkpoint)
    context = trained.config.model.max_length
    generator = Generator.of(trained, max_length=context if max_length is None else max_length)
    return _Model(f"{trained.config.name}, step {trained.step}", trained.tokenizer, context, generator, truncate)


@dataclasses.dataclass
class _Model:
    name: str
    tokenizer: Tokenizer
    context: int
    generator: Generator
    truncate: bool
    truncated: int = 0

    def __call__(self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        sampling = Sampling(max_new_tokens=max_new_tokens, stop=tuple(stop))
        return [
            completion.text
            for (completion,) in self.generator.complete(self._fitted(prompts, max_new_tokens), sampling)
        ]

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
        found = self.generator.complete(self._fitted(prompts, max_new_tokens), sampling, num_samples)
        return [[completion.text for completion in completions] for completions in found]

    def _fitted(self, prompts: Sequence[str], room: int) -> Sequence[Prompt]:
        keep = self.generator.max_length - room
        if not self.truncate or keep < 1:
            return prompts
        rows = [self.generator.ids(prompt) for prompt in prompts]
        self.truncated += sum(len(row) > keep for row in rows)
        return [row[-keep:] for row in rows]
