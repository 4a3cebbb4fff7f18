"""Needles among words against reading, word by word."""

import numpy as np
import pytest

from iha_jax.data.tasks import NeedleInHaystack, stream

TASKS = (
    NeedleInHaystack(length=40, num_needles=3, num_questions=3),
    NeedleInHaystack(length=53, num_needles=4, num_questions=2, value_length=3, value_words=2, filler_words=1),
    NeedleInHaystack(length=14, num_needles=4, key_words=4, value_words=4),  # no room for filler at all
)


def read(task, words):
    """(places of keys, what they say, questions with the place of their answers) of a text, as a reader finds them."""
    told, asked, at = [], [], 0
    keys = {word for word in task.vocabulary if word in task.vocabulary[2 + task.filler_words :] and word.isalpha()}
    while at < len(words):
        n = task.value_length
        if words[at] == "?":
            assert words[at + 1] in keys
            asked.append((words[at + 1], tuple(words[at + 2 : at + 2 + n]), at + 2))
            at += 2 + n
        elif words[at] in keys:
            assert words[at + 1 + n] == "."
            told.append((at, words[at], tuple(words[at + 1 : at + 1 + n])))
            at += 2 + n
        else:
            assert words[at].isalpha()
            at += 1
    return told, asked


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_answer_can_be_read(task):
    batch = task.sample(np.random.default_rng(3), 40)
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(batch, (40, task.length))
    assert len(set(task.vocabulary)) == task.vocab_size
    for inputs, targets, weights in zip(*(batch[n].tolist() for n in ("inputs", "targets", "weights")), strict=True):
        assert inputs[1:] == targets[:-1]
        words = task.text([*inputs, targets[-1]]).split()
        told, asked = read(task, words)
        values = {key: value for _, key, value in told}
        assert len(values) == len(told) == task.num_needles == len(set(values.values()))
        assert len(asked) == task.num_questions
        assert all(values[key] == value for key, value, _ in asked)
        assert all(word.isdecimal() for value in values.values() for word in value)
        answers = {place + i for _, _, place in asked for i in range(task.value_length)}
        assert {i + 1 for i, weight in enumerate(weights) if weight} == answers
        # Questions stand at the very end.
        assert min(place for _, _, place in asked) == len(words) - task.num_questions * (2 + task.value_length) + 2


def test_needles_stand_anywhere():
    task = NeedleInHaystack(length=23, num_needles=2)
    places = [at for row in task.sample(np.random.default_rng(1), 2000)["inputs"] for at, _, _ in told_of(task, row)]
    # 24 words, three of them the question: two needles of three have 17 first places, symmetric.
    frequency = np.bincount(places, minlength=19) / 2000
    assert len(frequency) == 19
    assert frequency.min() > 0.04
    np.testing.assert_allclose(frequency, frequency[::-1], atol=0.04)


def told_of(task, row):
    return read(task, [*task.text(row).split(), "0"])[0]


def test_any_needle_may_be_asked_for_again():
    task = NeedleInHaystack(length=40, num_needles=3, num_questions=3)
    rows = task.sample(np.random.default_rng(2), 300)
    counts = []
    for inputs, targets in zip(rows["inputs"], rows["targets"], strict=True):
        _, asked = read(task, task.text([*inputs, targets[-1]]).split())
        counts.append(len({key for key, _, _ in asked}))
    # 3 * 1/27, 18/27 and 6/27 of the rows ask for one, two and three different ones.
    np.testing.assert_allclose(np.bincount(counts)[1:] / 300, [1 / 9, 2 / 3, 2 / 9], atol=0.08)


def test_a_batch_depends_on_seed_and_number_alone():
    task = NeedleInHaystack(length=40)
    batches = stream(task, 4, seed=3)
    first, second = next(batches), next(batches)
    again = next(stream(task, 4, seed=3, start=1))
    assert all(np.array_equal(second[name], again[name]) for name in again)
    assert (first["inputs"] != second["inputs"]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "a whole number length >= 1, got length=0"),
        ({"length": 10, "num_needles": 3}, "3 needles and 1 questions take 12 words, but length=10 leaves room for 11"),
        ({"length": 90, "num_needles": 5, "key_words": 4}, "room for num_needles <= 4, got num_needles=5"),
        ({"length": 90, "filler_words": 9999}, "room for filler_words <= "),
        (
            {"length": 90, "num_needles": 5, "value_words": 2, "value_length": 2},
            "2 words make only 4 values of length 2",
        ),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        NeedleInHaystack(**options)
