"""The compiled programs of generation and scoring, over the base-head cache.

A prompt is read in chunks, a completion is written token by token, both in the cache that every attention layer has:
base keys and values, a ring of W tokens where there is a window. Shapes come in few sizes (`bucket`), because every
new one is compiled.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from iha_jax.evaluation.sampling import choose
from iha_jax.models.transformer import TransformerCache
from iha_jax.training.state import ModelFunctions, Params


def bucket(n: int, least: int = 16, steps: int = 1) -> int:
    """The smallest size from n on, of so many an octave; at least `least`, a power of two."""
    size = least
    while size < n:
        size *= 2
    if size == least or steps == 1:
        return size
    step = max(size // 2 // steps, 1)
    return size // 2 + -(-(n - size // 2) // step) * step


class Row(NamedTuple):
    """Where the rows of a batch stand: all arrays ``[B]``.

    Attributes:
      logits: float32 ``[B, V]``, of the next token.
      keys: of the draws.
      counts: int32, tokens written so far.
      limits: int32, the most tokens.
      done: whether the row has ended.
    """

    logits: Float[Array, "B V"]
    keys: Key[Array, "B"]
    counts: Int[Array, "B"]
    limits: Int[Array, "B"]
    done: Bool[Array, "B"]


class Engine:
    """The programs for one model."""

    def __init__(
        self, functions: ModelFunctions, params: Params, end_id: int | None, chunk: int = 512, block: int = 16
    ):
        """Keeps the parameters where they are.

        Args:
          functions: of a model with ``init_cache`` and ``decode``.
          params: path → parameter.
          end_id: the token that ends a completion, or None.
          chunk: most tokens of a prompt read at once.
          block: tokens written between two looks from the host.
        """
        self._functions, self._params = functions, params
        self._end_id, self._chunk, self.block = end_id, chunk, block
        self._read = jax.jit(self._read_chunk, donate_argnums=(1,))
        self._score = jax.jit(self._score_chunk, donate_argnums=(1,))
        self._write = jax.jit(self._write_block, static_argnames=("greedy", "top_k"), donate_argnums=(1,))
        self._cache = jax.jit(self._new_cache, static_argnums=(1, 2))
        self._rows = jax.jit(lambda cache, rows: cache.take_rows(rows))

    def read(self, prompts: list[np.ndarray], max_length: int) -> tuple[TransformerCache, Float[Array, "B V"]]:
        """Reads prompts.

        Args:
          prompts: ids of every row, none empty.
          max_length: of the cache: the most tokens of a row, completion included.

        Returns:
          The cache, and the logits of every row's next token.
        """
        tokens, ids = self._pad(prompts)
        cache, logits = self._cache(self._params, len(prompts), max_length), None
        for tokens_part, ids_part in self._chunks(tokens, ids):
            cache, new = self._read(self._params, cache, tokens_part, ids_part)
            ends = (ids_part.sum(axis=1) > 0)[:, None]
            logits = new if logits is None else jnp.where(ends, new, logits)
        assert logits is not None
        return cache, logits

    def score(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of every token given those before it.

        Args:
          rows: ids, each of at least two.

        Returns:
          float32 ``[B, L]`` and bool ``[B, L]`` (L the longest row's length less 1): of each token but the first its
          log-probability, and whether it was the likeliest; 0 and True beyond a row's end.
        """
        length = max(len(row) for row in rows) - 1
        inputs, ids = self._pad([row[:-1] for row in rows])
        targets, _ = self._pad([row[1:] for row in rows])
        cache = self._cache(self._params, len(rows), inputs.shape[1])
        found = []
        for part in self._chunks(inputs, ids, targets):
            cache, *scores = self._score(self._params, cache, *part)
            found.append(jax.device_get(scores))
        log_probabilities, likeliest = (np.concatenate(parts, axis=1)[:, :length] for parts in zip(*found, strict=True))
        return log_probabilities, likeliest

    def write(
        self, cache: TransformerCache, rows: Row, temperature: float, top_k: int | None, top_p: float
    ) -> tuple[TransformerCache, Row, Int[Array, "B block"]]:
        """Writes up to `block` tokens of every row, until all are done.

        Returns:
          The cache, the rows, and the tokens; a row's are as many as its count grew by, the end's token included.
        """
        restricted = None if top_p == 1 else jnp.float32(top_p)
        return self._write(
            self._params, cache, rows, jnp.float32(temperature), restricted, greedy=temperature == 0, top_k=top_k
        )

    def take_rows(self, cache: TransformerCache, rows: np.ndarray) -> TransformerCache:
        """The cache of other rows: some of it, in any order and number."""
        return self._rows(cache, rows)

    def _pad(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        longest = max(len(row) for row in rows)
        size = bucket(longest) if longest <= self._chunk else -(-longest // self._chunk) * self._chunk
        tokens, ids = np.zeros((2, len(rows), size), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], ids[i, : len(row)] = row, 1
        return tokens, ids

    def _chunks(self, *arrays: np.ndarray):
        for start in range(0, arrays[0].shape[1], self._chunk):
            yield tuple(array[:, start : start + self._chunk] for array in arrays)

    # ---------------------------------------------------------------------------------------- traced

    def _new_cache(self, params: Params, batch: int, max_length: int) -> TransformerCache:
        return self._functions.merge(params).init_cache(batch, max_length)

    def _read_chunk(self, params: Params, cache: TransformerCache, tokens: Array, ids: Array) -> tuple[Any, Array]:
        last = jnp.maximum(ids.sum(axis=1, dtype=jnp.int32) - 1, 0)
        logits, cache = self._functions.merge(params).decode(tokens, cache, segment_ids=ids, logits_at=last[:, None])
        return cache, logits[:, 0]

    def _score_chunk(
        self, params: Params, cache: TransformerCache, tokens: Array, ids: Array, targets: Array
    ) -> tuple[Any, Array, Array]:
        logits, cache = self._functions.merge(params).decode(tokens, cache, segment_ids=ids)
        of_target = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
        log_probabilities = of_target - jax.nn.logsumexp(logits, axis=-1)
        real = ids > 0
        return (
            cache,
            jnp.where(real, log_probabilities, 0.0),
            jnp.where(real, jnp.argmax(logits, axis=-1) == targets, True),
        )

    def _write_block(
        self,
        params: Params,
        cache: TransformerCache,
        rows: Row,
        temperature: Array,
        top_p: Array | None,
        *,
        greedy: bool,
        top_k: int | None,
    ) -> tuple[TransformerCache, Row, Array]:
        def goes_on(carry: tuple) -> Array:
            step, _, rows, _ = carry
            return (step < self.block) & ~jnp.all(rows.done)

        def step(carry: tuple) -> tuple:
            step, cache, rows, written = carry
            draws = jax.vmap(jax.random.fold_in)(rows.keys, rows.counts)
            token = choose(rows.logits, draws, 0 if greedy else temperature, top_k, top_p)
            written = written.at[:, step].set(token)
            counts = rows.counts + ~rows.done
            done = rows.done | (counts >= rows.limits)
            if self._end_id is not None:
                done |= token == self._end_id
            # A row that is done writes nothing more: its token is padding.
            logits, cache = self._functions.merge(params).decode(
                token[:, None], cache, segment_ids=(~done).astype(jnp.int32)[:, None]
            )
            return step + 1, cache, Row(logits[:, 0], rows.keys, counts, rows.limits, done), written

        written = jnp.zeros((rows.counts.shape[0], self.block), jnp.int32)
        _, cache, rows, written = jax.lax.while_loop(goes_on, step, (jnp.int32(0), cache, rows, written))
        return cache, rows, written
