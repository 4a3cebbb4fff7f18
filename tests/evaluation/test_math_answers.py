"""Final answers found in worked solutions, and which of them mean the same."""

import json

import pytest

from iha_jax.evaluation import math_answers
from iha_jax.evaluation.math_answers import (
    boxed,
    canonical,
    equivalence,
    gsm8k_answer,
    math_answer,
    same_answer,
)
from tests.evaluation.data import data_file


@pytest.fixture(params=["math-verify", "exact match of canonical forms"])
def judged_by(request, monkeypatch):
    if request.param != "math-verify":
        monkeypatch.setattr(math_answers, "_math_verify", lambda: None)
    else:
        pytest.importorskip("math_verify")
    assert equivalence() == request.param
    return request.param


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \left\{ x \mid x^{2} > 1 \right\} }", r"\left\{ x \mid x^{2} > 1 \right\}"),
        (r"\fbox{a} \boxed {b{c}{d{e}}}", "b{c}{d{e}}"),
        (r"\boxed{3} and then \boxed{4", "3"),  # the last is not complete
        ("nothing", None),
    ],
)
def test_boxes(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $-5.50", "-5.5"),
        ("It costs $1,000,000 in all.", "1000000"),
        ("First 3, then 10.0 apples", "10"),
        ("about 3/4 of it", "3/4"),
        ("#### none, though 3 stood there", "3"),
        ("no number", None),
        ("version v2 and x3", None),
    ],
)
def test_numbers(text, answer):
    assert gsm8k_answer(text) == answer


def test_where_answers_of_mathematics_stand():
    assert math_answer(r"Hence $x = \boxed{7}$. The answer is 8.") == "7"
    assert math_answer("The answer is $\\pi$.\nThat was it.") == "$\\pi$"
    assert math_answer("Answer: 1/2\nsome 3") == "1/2"
    assert math_answer("we get 5, no, 6") == "6"
    assert math_answer("hm") is None
    assert math_answer(r"\boxed{}") is None


SAME = [
    ("1/2", r"\frac{1}{2}"),
    (r"\dfrac12", r"\frac{1}{2}"),
    ("$1,000$", "1000"),
    ("x = 5", "5.0"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("90^\\circ", "90"),
    (r"-\frac{3}{4}", "-3/4"),
]
DIFFERENT = [("1/2", "1/3"), ("x+1", "x-1"), ("(1,2)", "(2,1)"), ("-5", "5"), ("12", "1,2")]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_the_same(judged_by, first, second):
    assert same_answer(first, second)
    assert same_answer(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_not_the_same(judged_by, first, second):
    assert not same_answer(first, second)


def test_what_only_math_verify_knows():
    pytest.importorskip("math_verify")
    for first, second in (("0.5", r"\frac{1}{2}"), (r"x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", r"\{2,1\}")):
        assert canonical(first) != canonical(second)
        assert same_answer(first, second)


def test_an_answer_too_large_to_write_down_takes_seconds():
    pytest.importorskip("math_verify")
    assert not same_answer("5", "9^{9^{9^{9}}}")


def test_every_reference_is_found_in_its_own_solution(judged_by):
    for line in data_file("gsm8k_test.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert gsm8k_answer(answer) == answer.rpartition("#### ")[2].replace(",", "")
    missed = []
    for line in data_file("math500_test.jsonl").read_text().splitlines():
        row = json.loads(line)
        if canonical(math_answer(row["solution"]) or "") != canonical(row["answer"]):
            missed.append((math_answer(row["solution"]), row["answer"]))
    assert not missed
