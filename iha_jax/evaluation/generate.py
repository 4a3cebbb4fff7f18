"""Completions: prompts in batches, several samples a prompt, stop texts, streaming."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.evaluation.engine import Engine, Row, bucket
from iha_jax.evaluation.sampling import Sampling
from iha_jax.training.sample import prompt_ids
from iha_jax.training.state import ModelFunctions, Params
from iha_jax.training.trained import TrainedModel

Prompt = str | Sequence[int] | np.ndarray
OnText = Callable[[int, int, str], None]
"""Told (prompt's number, sample's number, new text) as completions grow; the texts of one add up to its ``text``."""

# Tokens before a completion that its text is decoded with: tokenizers treat the start of a text differently.
_ANCHOR = 8


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model added to a prompt.

    Attributes:
      text: up to the end or the stop text, neither included.
      ids: its tokens; the last may have begun the stop text.
      finish: ``"end"`` of the document, a ``"stop"`` text, or ``"length"``.
    """

    text: str
    ids: tuple[int, ...]
    finish: Literal["end", "stop", "length"]


class Generator:
    """Writes completions with one model.

    Example::

        generator = Generator.of(open_trained("runs/tiny"))
        [[completion]] = generator.complete(["def main("], Sampling(max_new_tokens=50))
    """

    def __init__(
        self,
        functions: ModelFunctions,
        params: Params,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int = 8,
        chunk: int = 512,
        block: int = 16,
    ):
        """Compiles nothing yet.

        Args:
          functions: of a `Transformer`.
          params: path → parameter.
          tokenizer: of the model.
          max_length: the most tokens of prompt and completion together.
          batch_size: rows at a time; a prompt of several samples has as many rows.
          chunk: most tokens of a prompt read at once.
          block: tokens written between two looks for stop texts.
        """
        for name, value in (("max_length", max_length), ("batch_size", batch_size), ("chunk", chunk), ("block", block)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.tokenizer, self.max_length, self.batch_size = tokenizer, max_length, batch_size
        self.engine = Engine(functions, params, tokenizer.eos_id, chunk, block)

    @classmethod
    def of(cls, trained: TrainedModel, **options) -> "Generator":
        """For a trained model; `max_length` is the model's unless given, other options as for the constructor."""
        options.setdefault("max_length", trained.config.model.max_length)
        return cls(trained.functions, trained.params, trained.tokenizer, **options)

    def ids(self, prompt: Prompt) -> np.ndarray:
        """A prompt's tokens, int32: a text's, after the start of a document, or those given.

        Raises:
          ValueError: there are none.
        """
        if isinstance(prompt, str):
            return np.asarray(prompt_ids(self.tokenizer, prompt))[0]
        ids = np.asarray(prompt, np.int32)
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"a prompt is a text or a row of at least one token, got shape {ids.shape}")
        return ids

    def complete(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = Sampling(),
        num_samples: int = 1,
        on_text: OnText | None = None,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Completes prompts.

        Args:
          prompts: texts or rows of tokens, of any lengths.
          sampling: how.
          num_samples: completions of each prompt; the prompt is read once for all of them.
          on_text: is told of the texts as they grow.
          max_new_tokens: of every prompt, where they differ; default the sampling's.

        Returns:
          For every prompt its completions.

        Raises:
          ValueError: a prompt is empty, or with its completion longer than ``max_length``; nothing was generated.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        rows = [self.ids(prompt) for prompt in prompts]
        limits = [sampling.max_new_tokens] * len(rows) if max_new_tokens is None else list(max_new_tokens)
        for i, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            if limit < 1 or len(row) + limit > self.max_length:
                raise ValueError(
                    f"prompt {i} has {len(row)} tokens and is to get up to {limit} more, but a row takes at most "
                    f"max_length={self.max_length}: shorten it, or ask for fewer (at least 1)"
                )
        found: list[list[Completion | None]] = [[None] * num_samples for _ in rows]
        # Rows of about equal length together: less padding, fewer steps for nothing.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]) - limits[i])
        together = max(self.batch_size // num_samples, 1)
        for start in range(0, len(order), together):
            batch = order[start : start + together]
            for i, sample, completion in self._batch(batch, rows, limits, sampling, num_samples, on_text):
                found[i][sample] = completion
        return [[c for c in completions if c is not None] for completions in found]

    def _batch(
        self,
        batch: list[int],
        rows: list[np.ndarray],
        limits: list[int],
        sampling: Sampling,
        num_samples: int,
        on_text: OnText | None,
    ) -> Iterator[tuple[int, int, Completion]]:
        """Completions (prompt, sample, completion) of the prompts of one reading."""
        size = bucket(len(batch), least=1)
        prompts = [rows[i] for i in batch]
        # Rows beyond the batch's last are a token long, and done before they begin.
        filled = prompts + [prompts[-1][:1]] * (size - len(batch))
        longest = max(len(rows[i]) + limits[i] for i in batch)
        cache, logits = self.engine.read(filled, min(bucket(longest, least=64, steps=4), self.max_length))
        wanted = [(place, sample) for place in range(len(batch)) for sample in range(num_samples)]
        width = bucket(min(len(wanted), self.batch_size), least=1)
        for start in range(0, len(wanted), width):
            part = wanted[start : start + width]
            growing = [
                _Growing(self.tokenizer, prompts[place], sampling.stop, _told(on_text, batch[place], sample))
                for place, sample in part
            ]
            places = np.array([place for place, _ in part] + [0] * (width - len(part)), np.int32)
            last = len(wanted) <= width
            branch = cache if last and np.array_equal(places, np.arange(size)) else self.engine.take_rows(cache, places)
            numbers = np.array([(batch[place], sample) for place, sample in part] + [(0, 0)] * (width - len(part)))
            state = Row(
                logits=logits[places],
                keys=_keys(sampling.seed, numbers),
                counts=jnp.zeros((width,), jnp.int32),
                limits=jnp.asarray([limits[batch[place]] for place in places], jnp.int32),
                done=jnp.arange(width) >= len(part),
            )
            self._write(branch, state, sampling, growing)
            for (place, sample), text in zip(part, growing, strict=True):
                yield batch[place], sample, text.completion

    def _write(self, cache, state: Row, sampling: Sampling, growing: list["_Growing"]) -> None:
        before = np.zeros(len(state.counts), np.int32)
        while True:
            cache, state, written = self.engine.write(
                cache, state, sampling.temperature, sampling.top_k, sampling.top_p
            )
            counts, done, tokens = (np.array(x) for x in jax.device_get((state.counts, state.done, written)))
            for row, text in enumerate(growing):
                if not text.finished:
                    text.add(tokens[row, : counts[row] - before[row]].tolist(), bool(done[row]))
                    done[row] |= text.finished
            if done.all():
                return
            before, state = counts, state._replace(done=jnp.asarray(done))


class _Growing:
    """The text of one completion while it is written; holds back what may yet turn out otherwise."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stop: tuple[str, ...], tell: Callable[[str], None]):
        self._tokenizer, self._stop, self._tell = tokenizer, stop, tell
        self._anchor = prompt[-_ANCHOR:].tolist()
        self._prefix = tokenizer.decode(self._anchor)
        self._ids: list[int] = []
        self._told = 0
        self._completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self._completion is not None

    @property
    def completion(self) -> Completion:
        assert self._completion is not None, "asked before the end"
        return self._completion

    def add(self, ids: list[int], done: bool) -> None:
        """Takes more tokens; `done` after the last, be it the end's or that of the greatest length."""
        end = self._tokenizer.eos_id
        ended = False
        if end is not None and end in ids:
            ended, ids = True, ids[: ids.index(end)]
        before = len(self._ids)
        self._ids += ids
        text = self._text(len(self._ids))
        if (found := self._find_stop(text)) is not None:
            # The stop text may end before the last token: the completion ends with the token that completes it.
            length = next(n for n in range(before, len(self._ids) + 1) if self._find_stop(self._text(n)) is not None)
            self._finish(text[:found], tuple(self._ids[:length]), "stop")
        elif ended or done:
            self._finish(text, tuple(self._ids), "end" if ended else "length")
        else:
            self._say(text[: len(text) - self._unsure(text)])

    def _finish(self, text: str, ids: tuple[int, ...], finish: Literal["end", "stop", "length"]) -> None:
        self._say(text)
        self._completion = Completion(text, ids, finish)

    def _say(self, text: str) -> None:
        if len(text) > self._told:
            self._tell(text[self._told :])
            self._told = len(text)

    def _text(self, count: int) -> str:
        whole = self._tokenizer.decode(self._anchor + self._ids[:count])
        if whole.startswith(self._prefix):
            return whole[len(self._prefix) :]
        return self._tokenizer.decode(self._ids[:count])  # the prompt ended in the middle of a character

    def _find_stop(self, text: str) -> int | None:
        return min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)

    def _unsure(self, text: str) -> int:
        """Characters at the end that the next token may change: a part of one, or the beginning of a stop text."""
        unsure = len(text) - len(text.rstrip("\ufffd"))
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), unsure, -1):
                if text.endswith(stop[:n]):
                    unsure = n
                    break
        return unsure


def _told(on_text: OnText | None, prompt: int, sample: int) -> Callable[[str], None]:
    if on_text is None:
        return lambda text: None
    return lambda text: on_text(prompt, sample, text)


def _keys(seed: int, numbers: np.ndarray) -> jax.Array:
    """Keys ``[B]`` of (prompt, sample) ``[B, 2]``."""
    key = jax.random.key(seed)
    return jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, n[0]), n[1]))(jnp.asarray(numbers, jnp.int32))
