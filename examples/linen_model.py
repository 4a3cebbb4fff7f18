"""IHA in a Flax Linen model.

    python examples/linen_model.py

A small causal model learns to repeat the first half of its input.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from iha_jax import Rope
from iha_jax.nn import linen as iha

VOCABULARY, HALF, WIDTH, HEADS = 12, 8, 32, 4


class Model(nn.Module):
    """Embedding, two blocks, logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(1.0))(tokens)
        for i in range(2):
            attention = iha.InterleavedHeadAttention(
                HEADS, WIDTH, num_pseudo_heads=2, rope=Rope(theta=100.0), name=f"attention_{i}"
            )
            x = x + attention(nn.RMSNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.RMSNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.RMSNorm()(x))


def main(steps: int = 400) -> list[float]:
    """Trains; returns the losses of the second half's tokens."""
    model, optimizer = Model(), optax.adam(3e-3)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2 * HALF), jnp.int32))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        half = jax.random.randint(key, (32, HALF), 0, VOCABULARY)
        tokens = jnp.concatenate([half, half], axis=1)

        def loss(params):
            logits = jnp.asarray(model.apply(params, tokens[:, :-1]))[:, HALF - 1 :]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, HALF:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(i + 1))
        losses.append(float(value))
        if i % 100 == 0 or i == steps - 1:
            print(f"step {i}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args().steps)
