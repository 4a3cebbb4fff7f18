"""IHA in plain JAX: a function of arrays, parameters in a dict, no module library.

    python examples/plain_jax.py

One attention layer learns to copy the token that stood three places earlier.
"""

import argparse

import jax
import jax.numpy as jnp

from iha_jax import HeadMixing, Rope, interleaved_head_attention

VOCABULARY, LENGTH, DISTANCE = 16, 32, 3
HEADS, DIM, PSEUDO = 4, 16, 2


def initial(key: jax.Array) -> dict:
    """Parameters: projections as usual, and the four mixing tensors, which are a pytree of arrays like any other."""
    keys = jax.random.split(key, 7)
    width = HEADS * DIM
    normal = jax.random.normal
    mixing = HeadMixing.copy(HEADS, PSEUDO)
    # Copies alone are all alike and stay so; a little noise tells pseudo-heads apart.
    leaves, tree = jax.tree.flatten(mixing)
    noisy = [x + 0.1 * normal(k, x.shape) for x, k in zip(leaves, jax.random.split(keys[5], len(leaves)), strict=True)]
    return {
        "embedding": normal(keys[0], (VOCABULARY, width)),
        **{name: normal(k, (width, HEADS, DIM)) / width**0.5 for name, k in zip("qkv", keys[1:4], strict=True)},
        "out": normal(keys[4], (HEADS, DIM, width)) / width**0.5,
        "mixing": jax.tree.unflatten(tree, noisy),
        "head": normal(keys[6], (width, VOCABULARY)) / width**0.5,
    }


def logits(params: dict, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    query, key, value = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
    heads = interleaved_head_attention(query, key, value, params["mixing"], causal="virtual", rope=Rope(theta=100.0))
    return (x + jnp.einsum("btnh,nhd->btd", heads, params["out"])) @ params["head"]


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    """Cross entropy of the token DISTANCE places earlier, where there is one."""
    log_probabilities = jax.nn.log_softmax(logits(params, tokens))[:, DISTANCE:]
    return -jnp.take_along_axis(log_probabilities, tokens[:, :-DISTANCE, None], axis=-1).mean()


@jax.jit
def step(params: dict, momentum: dict, key: jax.Array) -> tuple[dict, dict, jax.Array]:
    tokens = jax.random.randint(key, (16, LENGTH), 0, VOCABULARY)
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum), momentum, value


def main(steps: int = 400) -> list[float]:
    """Trains; returns the losses."""
    params = initial(jax.random.key(0))
    momentum = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for i in range(steps):
        params, momentum, value = step(params, momentum, jax.random.key(i + 1))
        losses.append(float(value))
        if i % 100 == 0 or i == steps - 1:
            print(f"step {i}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args().steps)
