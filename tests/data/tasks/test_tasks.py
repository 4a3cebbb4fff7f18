"""Synthetic tasks against brute force, written from the paper's definitions with plain loops."""

import itertools

import numpy as np
import pytest

from iha_jax.data.tasks import (
    MultiKeyRecall,
    PermutationMatchCount,
    PolynomialFilters,
    RelationComposition,
    stream,
)

TASKS = (
    RelationComposition(arity=2),
    RelationComposition(arity=3, sizes=(1, 3)),
    PolynomialFilters(nodes=7, features=2, order=3),
    PermutationMatchCount(length=5, modulus=3, coefficient=7),
    MultiKeyRecall(length=63, gap=5),
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_a_batch_depends_on_seed_and_number_alone(task):
    batches = list(itertools.islice(stream(task, 4, seed=3), 3))
    again = next(stream(task, 4, seed=3, start=2))
    assert all(np.array_equal(batches[2][name], again[name]) for name in again)
    other = next(stream(task, 4, seed=4, start=2))
    assert any(other[n].shape != again[n].shape or (other[n] != again[n]).any() for n in again)
    assert not any(np.array_equal(batches[0][n], batches[1][n]) for n in ("inputs",))


# ------------------------------------------------------------------------------------------------------ relations


def composed(relation, arity):
    """Whether a path of ``arity`` related steps leads from i to j."""
    m = len(relation)
    answer = np.zeros((m, m), int)
    for i, j in itertools.product(range(m), repeat=2):
        for middle in itertools.product(range(m), repeat=arity - 1):
            path = (i, *middle, j)
            if all(relation[a][b] for a, b in itertools.pairwise(path)):
                answer[i, j] = 1
    return answer


@pytest.mark.parametrize("arity", [2, 3])
def test_composition_of_every_example(arity):
    task = RelationComposition(arity=arity)
    batch = task.sample(rng(1), 40)
    lengths = batch["weights"].sum(axis=1).astype(int)
    assert batch["inputs"].shape[1] == lengths.max()
    for x, y, w, length in zip(batch["inputs"], batch["targets"], batch["weights"], lengths, strict=True):
        m = round(length**0.5)
        assert m in task.sizes
        np.testing.assert_array_equal(w, np.arange(len(w)) < length)
        np.testing.assert_array_equal(y[:length].reshape(m, m), composed(x[:length].reshape(m, m), arity))
        assert not x[length:].any()
        assert not y[length:].any()


@pytest.mark.parametrize(("arity", "sizes", "density"), [(2, (6, 7, 8, 9, 10), 0.325), (3, (5, 6, 7, 8), 0.264)])
def test_relations_are_the_papers(arity, sizes, density):
    task = RelationComposition(arity=arity)
    assert (task.sizes, task.density, task.max_length) == (sizes, density, sizes[-1] ** 2)
    batch = task.sample(rng(2), 4000)
    valid = batch["weights"] == 1
    assert batch["inputs"][valid].mean() == pytest.approx(density, abs=0.005)
    # The densities were chosen for answers that are neither nearly all yes nor nearly all no.
    assert 0.4 < batch["targets"][valid].mean() < 0.65
    counts = np.unique_counts(valid.sum(axis=1))
    assert tuple(counts.values) == tuple(m * m for m in sizes)
    np.testing.assert_allclose(counts.counts / 4000, 1 / len(sizes), atol=0.04)


def test_wrong_relations():
    with pytest.raises(ValueError, match="arity 2 or 3, got 4"):
        RelationComposition(arity=4)
    with pytest.raises(ValueError, match="density in 0 … 1, got"):
        RelationComposition(arity=2, density=1.5)
    with pytest.raises(ValueError, match="size >= 1, got size=0"):
        RelationComposition(arity=2, sizes=(3, 0))


# ---------------------------------------------------------------------------------------------------- polynomials


def test_powers_of_the_matrix():
    task = PolynomialFilters(nodes=6, features=2, order=4, spectral_radius=0.9, seed=5, dtype="float64")
    assert max(abs(np.linalg.eigvals(task.matrix))) == pytest.approx(0.9)
    batch = task.sample(rng(), 3)
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        signal, identity = inputs[:, :2], inputs[:, 2:]
        np.testing.assert_array_equal(identity, np.eye(6))
        for power in range(4):
            expected = np.linalg.matrix_power(task.matrix, power) @ signal
            np.testing.assert_allclose(targets[:, 2 * power : 2 * power + 2], expected, rtol=1e-12, atol=1e-12)
    assert PolynomialFilters(nodes=3, features=1, order=1).sample(rng(), 2)["targets"].dtype == np.float32


def test_wrong_polynomials():
    with pytest.raises(ValueError, match="order >= 1, got order=0"):
        PolynomialFilters(nodes=3, features=1, order=0)
    with pytest.raises(ValueError, match="radius > 0, got 0"):
        PolynomialFilters(nodes=3, features=1, order=2, spectral_radius=0)


# ------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("tokens", "coefficient", "modulus", "answers"),
    [((1, 2, 3), 10, 4, (3, 1, 3)), ((1, 2, 3, 4), 10, 3, (6, 5, 5, 6))],
)
def test_the_papers_counts(tokens, coefficient, modulus, answers):
    task = PermutationMatchCount(length=len(tokens), modulus=modulus, coefficient=coefficient)
    np.testing.assert_array_equal(task.count(np.array(tokens)), answers)


@pytest.mark.parametrize(("length", "modulus", "coefficient", "top"), [(7, 5, 11, None), (4, 2, 5, 9), (1, 1, 3, 0)])
def test_counts_of_every_pair(length, modulus, coefficient, top):
    batch = PermutationMatchCount(length, modulus, coefficient, top).sample(rng(3), 20)
    assert batch["inputs"].max() <= (modulus - 1 if top is None else top)
    for tokens, answers in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        expected = [
            sum((x + coefficient * a + b) % modulus == 0 for a, b in itertools.product(tokens, repeat=2))
            for x in tokens
        ]
        assert answers == expected


def test_wrong_counts():
    with pytest.raises(ValueError, match="coefficient=10 and modulus=5"):
        PermutationMatchCount(length=4, modulus=5, coefficient=10)


# --------------------------------------------------------------------------------------------------------- recall

RECALLS = (
    MultiKeyRecall(length=40, num_keys=3, num_queries=3, gap=9),
    MultiKeyRecall(length=47, num_keys=5, num_queries=2, key_length=3, value_length=2, key_tokens=2, first_token=11),
    MultiKeyRecall(length=11, num_keys=4, num_queries=2, key_tokens=4),  # no room for filler at all
    MultiKeyRecall(length=30, num_keys=2, num_queries=1, key_length=2, key_tokens=1000, gap=20),
)


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_every_answer_can_be_looked_up(task):
    batch = task.sample(rng(4), 50)
    assert batch["inputs"].shape == batch["targets"].shape == batch["weights"].shape == (50, task.length)
    first_key = task.first_token + task.num_fillers
    first_value = first_key + task.key_tokens
    gaps = []
    for inputs, targets, weights in zip(*(batch[n].tolist() for n in ("inputs", "targets", "weights")), strict=True):
        assert inputs[1:] == targets[:-1]
        tokens = [*inputs, targets[-1]]
        assert all(task.first_token <= t < task.vocab_size for t in tokens)
        # Walk: filler tokens are skipped, everything else comes as whole pairs.
        found, at = [], 0
        while at < len(tokens):
            if tokens[at] < first_key:
                at += 1
                continue
            pair = tokens[at : at + task.pair_length]
            assert all(first_key <= t < first_value for t in pair[: task.key_length])
            assert all(first_value <= t for t in pair[task.key_length :])
            found.append((at, tuple(pair[: task.key_length]), tuple(pair[task.key_length :])))
            at += task.pair_length
        assert len(found) == task.num_keys + task.num_queries
        haystack, queries = found[: task.num_keys], found[task.num_keys :]
        values = {key: value for _, key, value in haystack}
        assert len(values) == task.num_keys
        assert len({key for _, key, _ in queries}) == task.num_queries
        assert all(values[key] == value for _, key, value in queries)
        answers = {at + task.key_length + i for at, _, _ in queries for i in range(task.value_length)}
        assert {i + 1 for i, w in enumerate(weights) if w} == answers
        gaps.append(queries[0][0] - haystack[-1][0] - task.pair_length)
    assert min(gaps) >= task.gap


def test_pairs_stand_anywhere_in_the_haystack():
    task = MultiKeyRecall(length=29, num_keys=2, num_queries=1, gap=4)
    inputs = task.sample(rng(5), 3000)["inputs"][:, : 30 - 2 - 4]
    is_key = (inputs >= task.num_fillers) & (inputs < task.num_fillers + task.key_tokens)
    # 24 places, two pairs of two: symmetric, and no place is left out.
    frequency = is_key.mean(axis=0)
    assert frequency[:23].min() > 0.04
    assert frequency[23] == 0
    np.testing.assert_allclose(frequency[:23], frequency[:23][::-1], atol=0.03)


def test_filler_may_be_text():
    task = MultiKeyRecall(length=39, num_keys=2, num_queries=1, num_fillers=1, first_token=256)
    text = np.arange(2 * 40).reshape(2, 40)
    tokens = task.sample(rng(), 2, filler=text)["inputs"]
    own = tokens >= 256
    assert (own.sum(axis=1) == 5).all()  # two pairs, and the query whose answer is the last target
    np.testing.assert_array_equal(tokens[~own], text[:, :-1][~own])
    with pytest.raises(ValueError, match=r"filler must be \[3, 40\], got \[2, 40\]"):
        task.sample(rng(), 3, filler=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 10, "num_keys": 3, "num_queries": 2, "gap": 4}, "take 14 tokens, but length=10 leaves room for 11"),
        ({"length": 90, "num_keys": 3, "num_queries": 4}, "num_queries=4 and num_keys=3"),
        ({"length": 90, "num_keys": 5, "key_tokens": 2, "key_length": 2}, "make only 4 keys of length 2"),
        ({"length": 90, "gap": -1}, "gap >= 0, got gap=-1"),
        ({"length": 0}, "length >= 1, got length=0"),
    ],
)
def test_wrong_recalls(options, message):
    with pytest.raises(ValueError, match=message):
        MultiKeyRecall(**options)
