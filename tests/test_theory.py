"""The constructions do what the theorems say; counts and bounds against independent computations."""

import dataclasses
import itertools
import pathlib
import re

import numpy as np
import pytest

from iha_jax import theory

RNG = np.random.default_rng(0)
DOCS = pathlib.Path(__file__).parents[1] / "docs"


def random_matrix(n):
    """Of spectral radius 1."""
    matrix = RNG.normal(size=(n, n))
    return matrix / np.abs(np.linalg.eigvals(matrix)).max()


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("interleaved", [True, False])
def test_polynomial_filters_of_forty_powers(interleaved):
    n, d = 50, 3
    matrix, x = random_matrix(n), RNG.normal(size=(n, d))
    powers = [np.linalg.matrix_power(matrix, j) for j in range(40)]
    for k in range(1, 41):
        layer = theory.polynomial_filters(matrix, d, k, interleaved=interleaved)
        heads = int(np.ceil(np.sqrt(k))) if interleaved else k
        assert layer.num_heads == heads == theory.heads_needed(k, interleaved)
        got = layer(theory.with_identity(x))
        assert got.shape == (n, d * (heads**2 if interleaved else heads))
        # Block by block: late powers of A are small, and must not hide behind early ones.
        for j in range(k):
            assert relative(got[:, j * d : (j + 1) * d], powers[j] @ x) < 1e-8
        mixing = () if layer.mixing is None else dataclasses.astuple(layer.mixing)
        counted = sum(x.size for x in (layer.query, layer.key, layer.value, *mixing))
        assert counted == layer.num_parameters
        assert counted == theory.polynomial_filter_parameters(n, d, k, interleaved=interleaved)


def test_one_head_fewer_breaks_filters():
    """No h-1 heads reach what h do, whatever their weights, and the construction's own error is no less."""
    n, d = 50, 3
    shift = np.roll(np.eye(n), 1, axis=1)
    for matrix in (random_matrix(n), shift):
        powers = np.stack([np.linalg.matrix_power(matrix, j) for j in range(40)])
        for k in range(2, 41):
            for interleaved in (True, False):
                heads = theory.heads_needed(k, interleaved) - 1
                bound = theory.pattern_bound(powers[:k], heads**2 if interleaved else heads)
                assert bound > 1e-7
                if matrix is shift:  # powers of a shift are nearly orthogonal: a missing one is wholly missing
                    assert bound > 0.9 * np.sqrt(1 - (heads**2 if interleaved else heads) / k)
    # The construction with a head too few: what it lacks, no linear readout of many inputs' outputs restores.
    k = 10
    for interleaved in (True, False):
        few = theory.heads_needed(k, interleaved) - 1
        layer = theory.polynomial_filters(shift, d, k, interleaved=interleaved, num_heads=few)
        targets, outputs = [], []
        for _ in range(20):
            x = RNG.normal(size=(n, d))
            outputs.append(layer(theory.with_identity(x)))
            targets.append(np.linalg.matrix_power(shift, k - 1) @ x)
        outputs, targets = np.concatenate(outputs), np.concatenate(targets)
        readout = np.linalg.lstsq(outputs, targets, rcond=None)[0]
        assert relative(outputs @ readout, targets) > 0.9


def count_by_hand(tokens, coefficient, modulus):
    return [sum((x + coefficient * a + b) % modulus == 0 for a, b in itertools.product(tokens, tokens)) for x in tokens]


def test_cpm3_on_a_thousand_random_sequences():
    for _ in range(1000):
        n, modulus = int(RNG.integers(1, 13)), int(RNG.integers(2, 9))
        coefficient = int(RNG.integers(2 * modulus + 1, 60))
        tokens = RNG.integers(0, 30, n)
        expected = count_by_hand(tokens.tolist(), coefficient, modulus)
        for interleaved in (True, False):
            model = theory.CountPermutationMatch3.build(n, coefficient, modulus, interleaved=interleaved)
            assert model(tokens).tolist() == expected
            assert model.attention.num_heads == (int(np.ceil(np.sqrt(n))) if interleaved else n)
            formula = theory.polynomial_filter_parameters(n, 1, n, interleaved=interleaved)
            assert model.num_attention_parameters == formula


def test_cpm3_worked_cases():
    gathered = theory.cyclic_gather(4)(theory.with_identity(np.array([[1.0], [2], [3], [4]])))
    assert gathered.tolist() == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2], [4, 1, 2, 3]]
    build = theory.CountPermutationMatch3.build
    assert build(3, 10, 4)(np.array([1, 2, 3])).tolist() == [3, 1, 3]
    assert build(4, 10, 3)(np.array([1, 2, 3, 4])).tolist() == [6, 5, 5, 6]
    with pytest.raises(ValueError, match="coefficient=8 and modulus=4"):
        build(3, 8, 4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_one_head_fewer_breaks_cpm3(interleaved):
    """The gather then misses a token: inputs that differ in it alone look alike there, but have other counts."""
    n = 5  # with two interleaved heads one token out of five is unseen; with four heads of five likewise
    heads = theory.heads_needed(n, interleaved) - 1
    model = theory.CountPermutationMatch3.build(n, 10, 4, interleaved=interleaved, num_heads=heads)
    one, other = np.array([1, 2, 3, 4, 1]), np.array([1, 2, 3, 4, 2])
    gather = theory.cyclic_gather(n, interleaved=interleaved, num_heads=heads)
    rows = [gather(theory.with_identity(x[:, None].astype(float)))[0] for x in (one, other)]
    np.testing.assert_array_equal(*rows)
    assert model(one)[0] == model(other)[0]
    counts = [count_by_hand(x.tolist(), 10, 4)[0] for x in (one, other)]
    assert counts[0] != counts[1]


@pytest.mark.parametrize("kind", ["linear", "softmax", "hard"])
@pytest.mark.parametrize("pseudo", [1, 2, 3, 5])
def test_interleaved_attention_includes_multi_head(kind, pseudo):
    n, d, h, v, heads = 11, 7, 5, 3, 4
    layer = theory.AlgebraicAttention(*(RNG.normal(size=(heads, d, width)) for width in (h, h, v)), kind)
    x = RNG.normal(size=(n, d))
    # By hand, head for head.
    expected = []
    for query, key, value in zip(layer.query, layer.key, layer.value, strict=True):
        scores = (x @ query) @ (x @ key).T
        if kind == "softmax":
            scores = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        elif kind == "hard":
            scores = np.eye(n)[scores.argmax(axis=1)]
        expected.append(scores @ x @ value)
    expected = np.concatenate(expected, axis=1)
    assert relative(layer(x), expected) < 1e-12
    interleaved = theory.as_interleaved(layer, pseudo)
    assert relative(interleaved(x), expected) < 1e-12
    assert interleaved.num_parameters == layer.num_parameters + 4 * heads**2 * pseudo
    with pytest.raises(ValueError, match="mixing"):
        theory.as_interleaved(interleaved, pseudo)


def test_separation_on_equal_tokens():
    n, d, h, v = 6, 5, 4, 3
    query, key, value = (RNG.normal(size=(d, width)) / d for width in (h, h, v))
    layer = theory.separating(query, key, value)
    token = RNG.normal(size=d)
    outputs = {}
    for factor in (1.0, 2.0, -3.0):
        out = layer(np.tile(factor * token, (n, 1)))
        product = factor**2 * (token @ query) @ (token @ key)
        np.testing.assert_allclose(out, np.tile(np.tanh(product) * factor * token @ value, (n, 1)), rtol=1e-12)
        outputs[factor] = out[0]
    assert relative(outputs[2.0], 2 * outputs[1.0]) > 0.1  # not linear
    # Every multi-head attention is, to rounding, with either softmax: f(a x + b y) = a f(x) + b f(y).
    other = RNG.normal(size=d)
    for kind in ("softmax", "hard"):
        mha = theory.AlgebraicAttention(*(RNG.normal(size=(8, d, width)) for width in (h, h, v)), kind)
        f = lambda token: mha(np.tile(token, (n, 1)))[0]  # noqa: E731
        assert relative(f(2 * token - 3 * other), 2 * f(token) - 3 * f(other)) < 1e-13
    # So is the head with its value copied instead of negated.
    same = dataclasses.replace(layer.mixing, value=np.ones((1, 1, 2)))
    copied = dataclasses.replace(layer, mixing=same)
    np.testing.assert_allclose(copied(np.tile(2 * token, (n, 1)))[0], 2 * token @ value, rtol=1e-12)


def test_shapes_that_do_not_fit_are_named():
    query, value = np.zeros((2, 3, 4)), np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"\(2, 3, 5\)"):
        theory.AlgebraicAttention(query, value, value)
    with pytest.raises(ValueError, match="'quadratic'"):
        theory.AlgebraicAttention(query, query, value, "quadratic")
    with pytest.raises(ValueError, match="2 heads"):
        theory.AlgebraicAttention(query, query, value, mixing=theory.Mixing.copy(3, 2))
    with pytest.raises(ValueError, match="num_patterns"):
        theory.heads_needed(0)


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "theory.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(block, names)
