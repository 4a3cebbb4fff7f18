"""What is measured, seen from a benchmark: something that goes on with texts."""

import os
from collections.abc import Sequence
from typing import Protocol

from iha_jax.data.tokenizers import Tokenizer


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
    """
    raise NotImplementedError(f"no generator to open {os.fspath(checkpoint)!r} with")
