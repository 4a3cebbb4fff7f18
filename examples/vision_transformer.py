"""IHA in a vision transformer: no mask at all (``causal=None``), learned positions instead of RoPE.

    python examples/vision_transformer.py

Images of 16 x 16 with two bright shapes; the class says whether the two are alike: a question about two places at once.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from iha_jax import InterleavedHeadAttention

SIZE, PATCH, WIDTH, HEADS = 16, 4, 48, 4
PATCHES = (SIZE // PATCH) ** 2
SHAPES = np.array(
    [
        [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]],
        [[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]],
        [[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]],
    ],
    np.float32,
)


def images(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [count, 16, 16] and whether their two shapes are alike, half of the time."""
    alike = rng.random(count) < 0.5
    first = rng.integers(0, 3, count)
    second = np.where(alike, first, (first + rng.integers(1, 3, count)) % 3)
    found = 0.2 * rng.standard_normal((count, SIZE, SIZE)).astype(np.float32)
    for i in range(count):
        for place, shape in zip(rng.choice(PATCHES, 2, replace=False), (first[i], second[i]), strict=True):
            row, column = divmod(int(place), SIZE // PATCH)
            rows, columns = slice(row * PATCH, (row + 1) * PATCH), slice(column * PATCH, (column + 1) * PATCH)
            found[i, rows, columns] += SHAPES[shape]
    return found, alike.astype(np.int32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.data([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = InterleavedHeadAttention(HEADS, WIDTH, num_pseudo_heads=2, causal=None, rope=None, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nnx.Module):
    """Patches, two blocks, a mean, two classes."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Linear(PATCH * PATCH, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, PATCHES, WIDTH)))
        self.blocks = nnx.data([Block(rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        side = SIZE // PATCH
        x = x.reshape(-1, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, PATCH * PATCH)
        x = self.patches(x) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def main(steps: int = 400) -> list[float]:
    """Trains; returns the losses."""
    static, params = nnx.split(VisionTransformer(nnx.Rngs(0)))
    optimizer, rng = optax.adam(2e-3), np.random.default_rng(0)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, pixels, labels):
        def loss(params):
            logits = nnx.merge(static, params)(pixels)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for i in range(steps):
        params, state, value = step(params, state, *images(rng, 64))
        losses.append(float(value))
        if i % 100 == 0 or i == steps - 1:
            print(f"step {i}: loss {losses[-1]:.3f}")
    pixels, labels = images(rng, 512)
    right = jnp.argmax(jax.jit(nnx.merge(static, params).__call__)(pixels), axis=-1) == labels
    print(f"accuracy on new images: {float(right.mean()):.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args().steps)
