"""Wrong calls of the operation: what was given, what was expected."""

import functools

import chex
import jax
import numpy as np
import pytest

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from tests.ops.cases import naming

B, T, N, K, H, P = 2, 5, 4, 2, 6, 3


def array(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def integers(*shape):
    return np.ones(shape, np.int32)


def mixing(**replaced):
    parts = {"query": (N, N, P), "key": (K, K, P), "value": (K, K, P), "collapse": (N, P)}
    return HeadMixing(**{name: array(*replaced.get(name, shape)) for name, shape in parts.items()})


GOOD = {
    "query": array(B, T, N, H),
    "key": array(B, T, K, H),
    "value": array(B, T, K, H),
    "mixing": mixing(),
}
LONGER = {"key": array(B, 7, K, H), "value": array(B, 7, K, H)}

# What is changed in a right call, and what the message must name.
WRONG = {
    "three axes": ({"query": array(T, N, H)}, ["query", "[B, T, N, H]", "(5, 4, 6)"]),
    "four axes of value": ({"value": array(B, T, H)}, ["value", "(2, 5, 6)"]),
    "integers": ({"key": integers(B, T, K, H)}, ["key", "float", "int32"]),
    "empty": ({"query": array(B, 0, N, H)}, ["query", "empty", "(2, 0, 4, 6)"]),
    "dtypes": ({"key": array(B, T, K, H, dtype="float16")}, ["float32", "float16"]),
    "value length": ({"value": array(B, 7, K, H)}, ["(2, 5, 2, 6)", "(2, 7, 2, 6)"]),
    "value heads": ({"value": array(B, T, N, H)}, ["(2, 5, 2, 6)", "(2, 5, 4, 6)"]),
    "batch": ({"query": array(3, T, N, H)}, ["batch", "3", "2"]),
    "head dimension": ({"query": array(B, T, N, 8)}, ["head dimension", "8", "6"]),
    "heads do not divide": ({"query": array(B, T, 5, H)}, ["K=2", "N=5"]),
    "mixing type": ({"mixing": array(N, N, P)}, ["HeadMixing", "ndarray"]),
    "mixing axes": ({"mixing": mixing(query=(N, P))}, ["mixing.query", "[N, N, P]", "(4, 3)"]),
    "mixing query": ({"mixing": mixing(query=(N, 5, P))}, ["mixing.query", "[4, 4, 3]", "[4, 5, 3]"]),
    "mixing key": ({"mixing": mixing(key=(N, N, P))}, ["mixing.key", "K=2", "[2, 2, 3]", "[4, 4, 3]"]),
    "mixing value": ({"mixing": mixing(value=(K, K, 4))}, ["mixing.value", "[2, 2, 3]", "[2, 2, 4]"]),
    "collapse": ({"mixing": mixing(collapse=(P, N))}, ["mixing.collapse", "[4, 3]", "[4, 4, 3]", "[3, 4]"]),
    "no pseudo-heads": (
        {"mixing": mixing(query=(N, N, 0), key=(K, K, 0), value=(K, K, 0), collapse=(N, 0))},
        ["P=0"],
    ),
    "causal": ({"causal": "tokens"}, ['"virtual"', '"token"', "'tokens'"]),
    "causal true": ({"causal": True}, ['"virtual"', "True"]),
    "window zero": ({"window": 0}, ["window", ">= 1", "0"]),
    "window not whole": ({"window": 2.5}, ["window", "2.5"]),
    "window true": ({"window": True}, ["window", "True"]),
    "window auto": ({"window": "auto"}, ["window", "'auto'"]),
    "rope type": ({"rope": 10_000.0}, ["Rope", "float"]),
    "rope odd": (
        {"query": array(B, T, N, 7), "key": array(B, T, K, 7), "rope": Rope()},
        ["even", "H=7"],
    ),
    "soft cap": ({"logits_soft_cap": 0.0}, ["logits_soft_cap", "> 0", "0.0"]),
    "soft cap negative": ({"logits_soft_cap": -1.0}, ["logits_soft_cap", "> 0", "-1.0"]),
    "causal cross": (LONGER, ["T=5", "S=7", "query_positions", "key_positions"]),
    "token causal cross": ({**LONGER, "causal": "token"}, ["'token'", "T=5", "S=7"]),
    "query positions only": (
        {**LONGER, "query_positions": integers(B, T)},
        ["query_positions", "key_positions", "T=5", "S=7"],
    ),
    "query ids only": (
        {**LONGER, "causal": None, "query_segment_ids": integers(B, T)},
        ["query_segment_ids", "key_segment_ids", "T=5", "S=7"],
    ),
    "key positions only": ({"key_positions": integers(B, T)}, ["key_positions", "query_positions"]),
    "position shape": ({"query_positions": integers(T)}, ["query_positions", "(2, 5)", "(5,)"]),
    "position dtype": ({"query_positions": array(B, T)}, ["query_positions", "integers", "float32"]),
    "id shape": ({"key_segment_ids": integers(B, 6)}, ["key_segment_ids", "(2, 5)", "(2, 6)"]),
    "id dtype": ({"query_segment_ids": array(B, T)}, ["query_segment_ids", "integers", "float32"]),
    "implementation": ({"implementation": "flash"}, ["reference", "blockwise", "pallas", "'flash'"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    changes, essentials = WRONG[name]
    with pytest.raises(ValueError, match=naming(*essentials)):
        interleaved_head_attention(**{**GOOD, **changes})


@pytest.mark.parametrize("implementation", [None, "reference", "blockwise"])
def test_the_right_call_is_right(implementation):
    operation = functools.partial(interleaved_head_attention, implementation=implementation)
    out = operation(**GOOD)
    chex.assert_shape(out, (B, T, N, H))
    # Every key and value is 1, mixing tensors too: values are K, outputs K * P.
    chex.assert_trees_all_close(out, np.full(out.shape, K * P, np.float32), rtol=1e-6)
    chex.assert_trees_all_close(jax.jit(operation)(**GOOD), out, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_numpy_integers_are_whole_numbers_too(implementation):
    """A window read from a config or computed with NumPy."""
    plain = interleaved_head_attention(**GOOD, window=2, implementation=implementation)
    numpy = interleaved_head_attention(**GOOD, window=np.int64(2), implementation=implementation)
    np.testing.assert_array_equal(plain, numpy)


def test_a_kernel_that_cannot_serve_says_why():
    half = {name: x.astype(np.float16) for name, x in GOOD.items() if name != "mixing"}
    with pytest.raises(NotImplementedError, match=naming("float16", "blockwise")):
        interleaved_head_attention(**{**GOOD, **half}, implementation="pallas")
