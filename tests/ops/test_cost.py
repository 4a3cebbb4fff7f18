"""What blockwise costs: memory linear in length, executed FLOPs against Algorithm 1's, from the program itself."""

import jax
import jax.numpy as jnp
import pytest

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from tests.jaxpr_flops import matmul_flops


def _problem(tokens, heads, pseudo, dim):
    x = jax.ShapeDtypeStruct((1, tokens, heads, dim), jnp.float32)
    mixing = jax.eval_shape(lambda: HeadMixing.copy(heads, pseudo))
    return x, mixing


def _forward(window, rope):
    def attend(query, key, value, mixing):
        return interleaved_head_attention(
            query, key, value, mixing, window=window, rope=rope, implementation="blockwise"
        )

    return attend


def _step(attend):
    def step(query, key, value, mixing, cotangent):
        out, vjp = jax.vjp(attend, query, key, value, mixing)
        return out, vjp(cotangent)

    return step


@pytest.mark.parametrize("positions", ["virtual", "token"])
@pytest.mark.parametrize("pseudo", [4, 8])
def test_decoding_does_not_unfold_the_cache(positions, pseudo):
    """One query of each row against a long cache, as a layer decodes: temporaries are a fraction of the cache."""
    batch, length, heads, dim = 2, 4096, 8, 64
    key = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.float32)
    query = jax.ShapeDtypeStruct((batch, 1, heads, dim), jnp.float32)
    short, long = (jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (1, length))
    mixing = jax.eval_shape(lambda: HeadMixing.copy(heads, pseudo))

    def decode(query, key, value, mixing, *integers):
        names = ("query_positions", "query_segment_ids", "key_positions", "key_segment_ids")
        return interleaved_head_attention(
            query,
            key,
            value,
            mixing,
            rope=Rope(positions=positions),
            implementation="blockwise",
            **dict(zip(names, integers, strict=True)),
        )

    compiled = jax.jit(decode).lower(query, key, key, mixing, short, short, long, long).compile()
    cache_bytes = 2 * 4 * key.size
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.25 * cache_bytes, (
        compiled.memory_analysis().temp_size_in_bytes / cache_bytes
    )


def test_temporaries_of_a_window_layer_grow_with_length_only():
    shares = []
    for tokens in (1024, 4096):
        x, mixing = _problem(tokens, 8, 4, 64)
        compiled = jax.jit(_step(_forward(64, Rope()))).lower(x, x, x, mixing, x).compile()
        shares.append(compiled.memory_analysis().temp_size_in_bytes / (4 * 4 * x.size))
    assert max(shares) <= 8
    assert shares[1] <= 1.1 * shares[0]


@pytest.mark.parametrize(("positions", "limit"), [("virtual", 1.1), ("token", 0.45)])
def test_executed_flops_at_the_papers_layer(positions, limit):
    """Against the exact window's 47 MFLOP a token (`paper.md` section 7), and three times that with backward."""
    tokens = 1000
    x, mixing = _problem(tokens, 20, 20, 128)
    attend = _forward(10, Rope(positions=positions))
    algorithm = tokens * 47e6
    assert matmul_flops(attend, x, x, x, mixing) <= limit * algorithm
    assert matmul_flops(_step(attend), x, x, x, mixing, x) <= limit * 3 * algorithm
