"""IHA in an encoder-decoder: self attention without a mask, causal self attention, and cross attention.

    python examples/encoder_decoder.py

The model learns to write its input in reverse. Cross attention takes the encoder's output as ``context``; with
``causal=None`` every pseudo-query sees every pseudo-key of it.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from iha_jax import InterleavedHeadAttention, Rope

VOCABULARY, LENGTH, WIDTH, HEADS = 12, 10, 48, 4
START = VOCABULARY  # what the decoder's input begins with


def attention(rngs: nnx.Rngs, **options) -> InterleavedHeadAttention:
    return InterleavedHeadAttention(HEADS, WIDTH, num_pseudo_heads=2, rngs=rngs, **options)


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """One block each."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY + 1, WIDTH, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        rope = Rope(theta=100.0)
        self.encoder = attention(rngs, causal=None, rope=rope)
        self.encoder_mlp = FeedForward(rngs)
        self.decoder = attention(rngs, causal="virtual", rope=rope)
        # Positions of the two sides are compared by the rotation, so that places can be found across them.
        self.cross = attention(rngs, causal=None, rope=rope)
        self.decoder_mlp = FeedForward(rngs)
        self.norms = nnx.data([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(5)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        x = self.embedding(source)
        x = self.encoder_mlp(x + self.encoder(self.norms[0](x)))
        context = self.norms[1](x)
        y = self.embedding(target)
        y = y + self.decoder(self.norms[2](y))
        y = self.decoder_mlp(y + self.cross(self.norms[3](y), context=context))
        return self.head(self.norms[4](y))


def main(steps: int = 400) -> list[float]:
    """Trains; returns the losses."""
    static, params = nnx.split(Model(nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        source = jax.random.randint(key, (32, LENGTH), 0, VOCABULARY)
        wanted = source[:, ::-1]
        given = jnp.concatenate([jnp.full((32, 1), START, wanted.dtype), wanted[:, :-1]], axis=1)

        def loss(params):
            logits = nnx.merge(static, params)(source, given)
            return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

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
