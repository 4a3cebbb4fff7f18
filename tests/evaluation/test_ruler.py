"""RULER's questions: what is in them, where, how long they are, and how answers are scored."""

import collections
import json
import re

import numpy as np
import pytest

from iha_jax.data.sources import stdlib_paths
from iha_jax.data.tokenizers import load_tokenizer, train_tokenizer
from iha_jax.data.words import ADJECTIVES, NOUNS
from iha_jax.evaluation.ruler import TASKS, Plan, evaluate, samples, score
from iha_jax.evaluation.ruler.__main__ import main
from iha_jax.evaluation.ruler.haystacks import NOISE, Essay, load_essay, placed
from iha_jax.evaluation.ruler.report import page, table
from iha_jax.evaluation.ruler.runner import Record
from iha_jax.evaluation.ruler.tasks import WITHOUT_DEPTH
from iha_jax.viz.drawing import linear

NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")
KEYS = {"niah_multikey_1": 4, "niah_multiquery": 4}
DEPTHS = (0.0, 30.0, 62.5, 100.0)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    texts = []
    for source in stdlib_paths()[:25]:
        with open(source, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    train_tokenizer(texts, 1000, path)
    return load_tokenizer(str(path))


def haystack_of(text):
    """What stands between instruction and question."""
    start = re.search(r"afterwards\.\n|following text\.\n\n|most often\.\n|coded words\. ", text).end()
    return text[start : re.search(r"\n(What (is|are all) the special|Question:)", text).start()]


def oracle(prompts, *, max_new_tokens, stop=()):
    """Finds the answers by reading: a line for every kind of question."""
    answers = []
    for text in prompts:
        body = haystack_of(text)
        if "special magic" in text:
            question = text[text.rindex("What ") :]
            keys = re.findall(r"[\w-]+", re.search(r" for (.*) mentioned in the provided text[?]", question).group(1))
            answers.append(", ".join(v for k, v in NEEDLE.findall(body) if k in keys))
        elif "variable" in text:
            value = re.search(r"assigned the value (\d+) in", text).group(1)
            assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body))
            holders = {value}
            while (more := {name for name, of in assigned.items() if of in holders}) - holders:
                holders |= more
            answers.append(" ".join(holders - {value}))
        elif "numbered list" in text:
            counts = collections.Counter(re.findall(r"\d+\. (\S+)", body))
            answers.append(" ".join(word for word, _ in counts.most_common(10)))
        else:
            counts = collections.Counter(word for word in body.split() if word != "...")
            answers.append(" ".join(word for word, _ in counts.most_common(3)))
    return answers


def silent(prompts, *, max_new_tokens, stop=()):
    return [""] * len(prompts)


# ------------------------------------------------------------------------------------------------------- questions


@pytest.mark.parametrize("task", TASKS)
def test_a_question_has_its_answers_at_the_depth_asked_and_just_fits(task, tokenizer):
    for length, count in ((3333, 1), (1500, 4)):
        depths = () if task in WITHOUT_DEPTH else DEPTHS
        found = list(samples(task, tokenizer, length, count, depths=depths, seed=1))
        assert [sample.index for sample in found] == list(range(count))
        for sample in found:
            tokens = len(tokenizer.encode(sample.text)) + 1  # the start of document
            assert tokens == sample.tokens
            assert 0.99 * length <= tokens + sample.answer_tokens <= length, (tokens, sample.answer_tokens)
            assert sample.answer_tokens >= len(tokenizer.encode(" " + ", ".join(sample.references)))
            body = haystack_of(sample.text)
            if task.startswith("niah"):
                check_needles(sample, body)
            elif task == "vt":
                check_chain(sample, body)
            else:
                check_counts(sample, body)
    assert len({sample.references for sample in found}) == 4


def check_needles(sample, body):
    needles = NEEDLE.findall(body)
    keys, values = [key for key, _ in needles], [value for _, value in needles]
    assert len(set(values)) == len(values)
    assert body.count("special magic") == len(needles)
    for value in sample.references:
        assert sample.prompt.count(value) == 1
    multivalue = sample.task == "niah_multivalue"
    assert len(sample.references) == (4 if multivalue or sample.task == "niah_multiquery" else 1)
    assert len(set(keys)) == (1 if multivalue else len(keys))
    if sample.task in ("niah_multikey_2", "niah_multikey_3"):
        # Nothing but needles, and at most a part of a noise line.
        assert len(needles) > 5 or len(body) < 1000
        assert re.sub(r"\s", "", NEEDLE.sub("", body)) in re.sub(r"\s", "", NOISE * 2)
    else:
        assert len(needles) == KEYS.get(sample.task, 4 if multivalue else 1)
    question = sample.prompt[sample.prompt.rindex("\nWhat ") :]
    asked = [key for key in dict.fromkeys(keys) if f" {key}" in question]
    assert len(asked) == (4 if sample.task == "niah_multiquery" else 1)
    assert {value for key, value in needles if key in asked} == set(sample.references)
    assert sample.depth == DEPTHS[sample.index]
    check_depths(sample, body, [f"is: {value}." for value in sample.references], 1 if len(asked) == 1 else 4)


def check_depths(sample, body, statements, count):
    """Each statement begins where its depth says, give or take half a sentence, with the others taken out."""
    spans = [
        (m.start(), m.end())
        for m in re.finditer(r"One of the special magic [^\n]*? is: \S+\.\s?|VAR \w+ = [^\n]*\n?", body)
    ]
    distracting = sample.task in ("niah_multikey_2", "niah_multikey_3")
    rest = len(body) - (0 if distracting else sum(end - start for start, end in spans))
    pieces = re.split(r"(?<=[.!?])\s+|\n", body)
    slack = max(map(len, pieces)) / 2 + 2 + (max(end - start for start, end in spans) if distracting else 0)
    if sample.task in ("niah_single_1", "vt"):
        slack = len(NOISE) / 2 + 2  # a noise line is one unit
    for statement, depth in zip(statements, sample.depths, strict=True):
        at = body.index(statement)
        at = max(start for start, _ in spans if start <= at)
        before = at - (0 if distracting else sum(end - start for start, end in spans if end <= at))
        assert abs(before - depth / 100 * rest) <= slack, (sample.task, depth, before, rest, slack)


def check_chain(sample, body):
    assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body)
    assert len(assigned) == 5 == len(set(sample.references))
    value = re.search(r"assigned the value (\d{5}) in", sample.prompt).group(1)
    assert assigned == list(zip(sample.references, (value, *sample.references[:-1]), strict=True))
    check_depths(sample, body, [f"VAR {name} = " for name in sample.references], 1)


def check_counts(sample, body):
    if sample.task == "cwe":
        listed = re.findall(r"(\d+)\. (\S+)", body)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = collections.Counter(word for _, word in listed)
        repeats = {counts[word] for word in sample.references}
        assert repeats in ({30}, {6})
        most_others = 3 if repeats == {30} else 1
        assert all(n <= most_others for word, n in counts.items() if word not in sample.references)
        assert len(sample.references) == 10
    else:
        counts = collections.Counter(body.split())
        ranked = [word for word, _ in counts.most_common()]
        assert ranked[0] == "..."
        assert tuple(ranked[1:4]) == sample.references
        assert counts[ranked[3]] > counts[ranked[4]]
        assert counts[ranked[1]] / counts[ranked[2]] == pytest.approx((3 / 2) ** 2, rel=0.25)
        assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])


def test_one_seed_one_question_whatever_the_count(tokenizer):
    def made(count, **options):
        return [sample.text for sample in samples("niah_multikey_1", tokenizer, 1000, count, **options)]

    assert made(3)[:2] == made(2)
    assert not set(made(3)) & set(made(3, seed=1))
    assert len(set(made(3))) == 3


def test_depths_drawn_at_random_are_all_over():
    found = [sample.depths for sample in samples("niah_multiquery", load_tokenizer("bytes"), 1500, 30)]
    grid = np.linspace(0, 100, 40)
    assert all(min(abs(grid - depth)) < 1e-9 for depths in found for depth in depths)
    assert all(len(set(depths)) == 4 for depths in found)
    assert min(map(min, found)) < 15
    assert max(map(max, found)) > 85


def test_no_compound_word_is_part_of_another():
    assert not [(a, b) for a in ADJECTIVES for b in ADJECTIVES if a != b and b.endswith(a)]
    assert len(set(ADJECTIVES + NOUNS)) == len(ADJECTIVES) + len(NOUNS)


def test_wrong_questions():
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(ValueError, match="unknown task 'niah': expected one of niah_single_1, "):
        next(samples("niah", tokenizer, 1000, 1))
    with pytest.raises(ValueError, match="0 to 100, got 101"):
        next(samples("vt", tokenizer, 1000, 1, depths=(101.0,)))
    with pytest.raises(
        ValueError, match=r"vt at length 300 \(less 42 for the answer\): the shortest prompt has 4\d\d tok"
    ):
        next(samples("vt", tokenizer, 300, 1))
    with pytest.raises(FileNotFoundError, match=r"no haystack at 'nowhere\.txt'"):
        next(samples("niah_single_2", tokenizer, 1000, 1, haystack="nowhere.txt"))


# ------------------------------------------------------------------------------------------------------- haystacks


def test_prose_of_a_file_is_taken_from_its_beginning_and_round_again(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_text("One two three. Four\nfive six! " + "word " * 70)
    essay = load_essay(str(path))
    assert essay.first(5) == ["One two three.", "Four five"]
    around = essay.first(6 + 70 + 2)
    assert [len(sentence.split()) for sentence in around] == [3, 3, 60, 10, 2]
    assert around[-1] == "One two"
    (sample,) = samples("niah_single_2", load_tokenizer("bytes"), 1200, 1, haystack=str(path))
    assert "One two three. Four five six!" in sample.prompt
    path.write_text(" \n")
    with pytest.raises(ValueError, match="has no words"):
        Essay(iter(())).first(1)


def test_prose_of_the_library_is_prose():
    text = " ".join(load_essay().first(5000))
    assert sum(c.isalpha() or c in " .,'" for c in text) / len(text) > 0.95
    assert ">>>" not in text


def test_where_sentences_are_put():
    sentences = ["a" * 9, "b" * 9, "c" * 19]  # ends at 0, 10, 20, 40
    assert placed(sentences, [(0.0, "x")])[0] == "x"
    assert placed(sentences, [(100.0, "x")])[3] == "x"
    assert placed(sentences, [(36.0, "x")])[1] == "x"  # 14.4 is nearer to 10
    assert placed(sentences, [(39.0, "x")])[2] == "x"  # 15.6 to 20
    assert placed(sentences, [(25.0, "x"), (100.0, "z"), (25.0, "y")]) == ["a" * 9, "x", "y", "b" * 9, "c" * 19, "z"]


# --------------------------------------------------------------------------------------------------------- scoring


def test_scores_by_hand():
    assert score("It is ABC-12, I think", ["abc-12"]) == 1
    assert score("red and blue", ["Red", "green", "BLUE", "white"]) == 0.5
    assert score("", ["1"]) == 0


@pytest.mark.parametrize(("answerer", "expected"), [(oracle, 1.0), (silent, 0.0)])
def test_the_ends_of_the_scale(answerer, expected):
    plan = Plan(lengths=(2000,), samples=3, depths=(10.0, 90.0), batch_size=2)
    records = evaluate(answerer, load_tokenizer("bytes"), plan)
    assert len(records) == 3 * len(TASKS)
    assert {(record.task, record.score) for record in records} == {(task, expected) for task in TASKS}
    assert {r.depth for r in records if r.task == "vt"} == {10.0, 90.0}
    assert {r.depth for r in records if r.task == "cwe"} == {None}


def test_table_and_page():
    def record(task, length, depth, score):
        return Record(task, length, depth, 0, length - 9, ("1",), "x", score)

    records = [
        *(record("vt", 100, 0.0, 1.0), record("vt", 100, 0.0, 0.5), record("vt", 100, 50.0, 0.0)),
        *(record("vt", 200, 0.0, 0.25), record("fwe", 100, None, 1.0)),
    ]
    lines = [line.split() for line in table(records).splitlines()]
    assert lines == [
        ["task", "depth", "100", "200"],
        ["vt", "all", "50.0", "25.0"],
        ["0", "%", "75.0", "25.0"],
        ["50", "%", "0.0", "–"],
        ["fwe", "all", "100.0", "–"],
        ["average", "75.0", "25.0"],
    ]
    shown = page(records, "A <page>")
    assert "A &lt;page&gt;" in shown
    assert shown.count("<table class=heat>") == 1  # one task with depths
    assert 'alt="75.0 at 100 tokens, depth 0 %"' in shown
    assert not re.search(r'(src|href)="(?!data:)', shown)


def test_colours_go_in_equal_steps():
    colours = linear(np.array([0.0, 50.0, 100.0, np.nan]), 100.0)
    np.testing.assert_array_equal(colours, [[255] * 3, [132, 152, 181], [8, 48, 107], [200] * 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("vt", "niah")}, r"unknown tasks \['niah'\]"),
        ({"tasks": ()}, "needs tasks and lengths"),
        ({"lengths": (0,)}, "lengths must be at least 1, got 0"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"depths": (-1.0,)}, "0 to 100, got -1"),
    ],
)
def test_wrong_plans(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)


class Oracle:
    name, tokenizer, context, truncated = "an oracle", load_tokenizer("bytes"), 1200, 0

    def __call__(self, prompts, *, max_new_tokens, stop=()):
        return oracle(prompts, max_new_tokens=max_new_tokens)


def test_command_line(tmp_path, capsys):
    opened = []

    def open_model(path, max_length):
        opened.append((path, max_length))
        return Oracle()

    out = tmp_path / "results"
    arguments = ["runs/x", "--tasks", "vt", "fwe", "--lengths", "1000", "1500", "--samples", "2", "--depths", "0", "50"]
    assert main([*arguments, "--out", str(out)], open_model) == 0
    assert opened == [("runs/x", 1500)]
    said = capsys.readouterr()
    assert "average" in said.out
    assert "above 1200 are beyond" in said.err
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(r["task"], r["length"], r["depth"], r["score"]) for r in records[:3]] == [
        *(("vt", 1000, 0.0, 1.0), ("vt", 1000, 50.0, 1.0), ("vt", 1500, 0.0, 1.0))
    ]
    assert len(records) == 8
    assert "RULER, an oracle" in (out / "report.html").read_text()
    with pytest.raises(SystemExit, match="error: vt at length 100"):
        main(["runs/x", "--tasks", "vt", "--lengths", "100", "--out", str(out)], open_model)
