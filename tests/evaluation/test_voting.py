"""Votes and estimates of pass@k, worked by hand and by counting every draw."""

import itertools

import pytest

from iha_jax.evaluation.voting import grouped, majority, majority_at, mean_at, pass_at


def test_votes():
    assert majority(["7", "8", "7"]) == "7"
    assert majority(["8", "7", "7", "8"]) == "8"  # a tie: the first seen
    assert majority([None, None, None, "3"]) == "3"  # no answer doesn't vote
    assert majority([None, "4", "3", "3", None, None]) == "3"
    assert majority([None, None]) is None
    assert majority([]) is None


def test_majority_at_k():
    answers = ["1", "2", "2", None, None, None, "1", "1"]
    right = [answer == "2" for answer in answers]
    # k = 1: "1"; 2: a tie, "1"; 3: "2"; 6: "2" although three have no answer; 7: a tie, "1"; 8: "1".
    assert [majority_at(answers, right, k) for k in (1, 2, 3, 6, 7, 8)] == [0, 0, 1, 1, 0, 0]
    assert majority_at([None, None], [False, False], 2) == 0


def test_mean_at_k():
    assert [mean_at([True, False, False, True], k) for k in (1, 2, 3, 4)] == [1, 0.5, pytest.approx(1 / 3), 0.5]


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 2), (6, 5), (6, 6), (1, 1)])
def test_pass_at_k_counts_all_draws(n, c):
    for k in range(1, n + 1):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_by_hand():
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    assert pass_at(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at(200, 1, 100) == pytest.approx(0.5)


def test_answers_that_mean_the_same_vote_together():
    def same(a, b):
        return float(a) == float(b)

    assert grouped(["1.0", None, "2", "1", "2.00"], same) == ["1.0", None, "2", "1.0", "2"]


def test_wrong_counts():
    with pytest.raises(ValueError, match="k must be in 1 … 3, the number of samples, got 4"):
        pass_at(3, 1, 4)
    with pytest.raises(ValueError, match="of 3 samples 0 to 3 can be right, got 4"):
        pass_at(3, 4, 1)
    with pytest.raises(ValueError, match="k must be in 1 … 1"):
        mean_at([True], 0)
    with pytest.raises(ValueError, match="got 1 answers and 2 judgements"):
        majority_at(["1"], [True, False], 1)
