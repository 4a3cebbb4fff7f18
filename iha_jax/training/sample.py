"""A completion by the model's cache: the prompt in one chunk, then a token at a time, all compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.training.state import ModelFunctions, Params


def make_sampler(functions: ModelFunctions, count: int, temperature: float):
    """The function (params, prompt [1, t], key) → sampled ids, int32 [count].

    Args:
      functions: of a model with ``init_cache`` and ``decode``.
      count: tokens to add.
      temperature: 0 takes the likeliest.
    """

    def choose(logits: Array, key: Array) -> Array:
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def sample(params: Params, prompt: Int[Array, "1 t"], key: Array) -> Int[Array, "n"]:
        model = functions.merge(params)
        cache = model.init_cache(1, prompt.shape[1] + count)
        logits, cache = model.decode(prompt, cache)

        def step(carry, key):
            logits, cache = carry
            token = choose(logits, key)
            logits, cache = functions.merge(params).decode(token[:, None], cache)
            return (logits[:, -1], cache), token[0]

        return jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, count))[1]

    return sample


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> Int[Array, "1 t"]:
    """A prompt as the model saw documents begin: the start id, then the text; int32 [1, t]."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = np.concatenate([np.asarray(start, np.int32), tokenizer.encode(prompt)])
    if not len(ids):
        raise ValueError("an empty prompt needs a tokenizer with a start id")
    return jnp.asarray(ids, jnp.int32)[None]


def until_end(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The text of sampled ids, up to the first end of document."""
    ids = np.asarray(ids)
    if tokenizer.eos_id is not None and (ends := np.flatnonzero(ids == tokenizer.eos_id)).size:
        ids = ids[: ends[0]]
    return tokenizer.decode(ids.tolist())
