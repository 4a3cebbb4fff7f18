"""Benchmarks from files: prompts, judgements, scores; and that the right programs pass and wrong ones don't."""

import gzip
import json

import pytest

from iha_jax.data.tokenizers import load_tokenizer
from iha_jax.evaluation.benchmarks import Options, evaluate, main
from iha_jax.evaluation.code_execution import Limits, run_all
from iha_jax.evaluation.problems import code_of, load_benchmark
from tests.evaluation.data import data_file

GSM8K = [
    {"question": "How many legs have two dogs?", "answer": "Two dogs have 2*4=<<2*4=8>>8 legs.\n#### 8"},
    {"question": "And three?", "answer": "3*4=<<3*4=12>>12\n#### 12"},
    {"question": "A thousand?", "answer": "#### 4,000"},
]
MATH = [
    {"problem": "Half?", "solution": r"It is \boxed{\frac{1}{2}}.", "answer": r"\frac{1}{2}"},
    {"problem": "Two?", "solution": r"\boxed{2}", "answer": "2"},
]
MBPP = [
    {"task_id": 3, "text": "Say one.", "code": "def one():\r\n  return 1", "test_list": ["assert one() == 1"]},
    {"task_id": 11, "text": "Add.", "code": "def add(a, b):\n  return a + b", "test_list": ["assert add(1, 2) == 3"]},
    {
        **{"task_id": 12, "text": "Root.", "code": "def root(x):\n  return math.sqrt(x)"},
        **{"test_list": ["assert root(4) == 2"], "test_setup_code": "import math"},
    },
    {"task_id": 511, "text": "Not of the test split.", "code": "", "test_list": []},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'import math\n\n\ndef down(x):\n    """Round down."""\n',
        "entry_point": "down",
        "canonical_solution": "    return math.floor(x)\n",
        "test": "def check(candidate):\n    assert candidate(1.5) == 1\n",
    }
]


def write(path, rows):
    text = "\n".join(map(json.dumps, rows)) + "\n"
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


class Scripted:
    """Says what it is told to, by a piece of the prompt's end."""

    name, tokenizer = "a script", load_tokenizer("bytes")

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def _of(self, prompt):
        return next(texts for key, texts in self.answers.items() if key in prompt[-200:])

    def __call__(self, prompts, *, max_new_tokens, stop=()):
        self.asked.append((max_new_tokens, stop))
        return [self._of(prompt)[0] for prompt in prompts]

    def sample(self, prompts, *, num_samples, max_new_tokens, stop=(), seed=0, temperature=1.0):
        self.asked.append((num_samples, seed, temperature))
        return [self._of(prompt)[:num_samples] for prompt in prompts]


# --------------------------------------------------------------------------------------------------------- prompts


def test_worked_examples_are_not_asked(tmp_path):
    file = write(tmp_path / "a.jsonl", GSM8K)
    plain = load_benchmark("gsm8k", file)
    assert [problem.reference for problem in plain.problems] == ["8", "12", "4000"]
    assert "Problem: And three?\nSolution:" in plain.problems[1].prompt
    assert "dogs" not in plain.problems[1].prompt
    (second, third) = load_benchmark("gsm8k", file, shots=1).problems
    assert second.name == "gsm8k/1"
    assert "Problem: How many legs have two dogs?\nSolution: Two dogs have 2*4=8 legs.\n#### 8\n\n" in second.prompt
    assert second.prompt.endswith("Problem: And three?\nSolution:")
    assert "three" not in third.prompt
    assert len(load_benchmark("gsm8k", file, limit=2).problems) == 2


def test_examples_of_programs_come_from_before_the_test_split(tmp_path):
    benchmark = load_benchmark("mbpp", write(tmp_path / "m.jsonl", MBPP), shots=1)
    assert [problem.name for problem in benchmark.problems] == ["mbpp/11", "mbpp/12"]
    for problem in benchmark.problems:
        assert "Task: Say one.\nIt must pass these tests:\nassert one() == 1" in problem.prompt
        assert "```python\ndef one():\n  return 1\n```\n" in problem.prompt
        assert problem.prompt.endswith("```python\n")


def test_where_the_code_is():
    assert code_of("    return 1\n") == "    return 1\n"
    assert code_of("Here:\n```python\nx = 1\n```\nand\n```\ny\n```") == "x = 1"
    assert code_of("```\nx = 1") == "x = 1"
    assert code_of("x = 1\n```\nDone.") == "x = 1\n"
    assert code_of("    return 1\n```") == "    return 1\n"


@pytest.mark.parametrize(
    ("name", "rows", "shots", "message"),
    [
        ("gsm8k", [{"question": "?"}], 0, r"line 1: no 'answer'; expected question, answer"),
        ("gsm8k", GSM8K, 3, "no problem left beside 3 worked examples"),
        ("mbpp", MBPP, 2, "mbpp has 1 worked examples in this file, got shots=2"),
        ("humaneval", HUMANEVAL, 1, "no worked examples, got shots=1"),
        ("aime", GSM8K, 0, "unknown benchmark 'aime': expected one of gsm8k, math500, mbpp, humaneval"),
    ],
)
def test_wrong_files(tmp_path, name, rows, shots, message):
    with pytest.raises(ValueError, match=message):
        load_benchmark(name, write(tmp_path / "x.jsonl", rows), shots)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a file of JSON lines"):
        load_benchmark("gsm8k", tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n{")
    with pytest.raises(ValueError, match="line 2 isn't JSON"):
        load_benchmark("gsm8k", tmp_path / "x.jsonl")


# ---------------------------------------------------------------------------------------------------------- scores


def test_one_answer_each(tmp_path):
    model = Scripted({"two dogs": ["It is 8.\n#### 8.00"], "three": ["12 or 13"], "thousand": ["no idea"]})
    benchmark = load_benchmark("gsm8k", write(tmp_path / "a.jsonl", GSM8K))
    lines = []
    result = evaluate(benchmark, model, Options(batch_size=2), lines.append)
    assert [one.answers for one in result.problems] == [("8",), ("13",), (None,)]
    assert [one.right for one in result.problems] == [(True,), (False,), (False,)]
    assert result.scores == {"exact match": pytest.approx(100 / 3)}
    assert model.asked == [(512, ("\nProblem:",))] * 2
    assert lines == ["gsm8k: 2 of 3 problems, 50.0% right", "gsm8k: 3 of 3 problems, 33.3% right"]


def test_several_answers_each(tmp_path):
    half = [r"\boxed{1/2}", r"\boxed{\dfrac12}", "hm", r"\boxed{3}"]
    model = Scripted({"Half": half, "Two": [r"\boxed{}", "", "", r"\boxed{2}"]})
    benchmark = load_benchmark("math500", write(tmp_path / "m.jsonl", MATH))
    result = evaluate(benchmark, model, Options(samples=4, seed=7, temperature=0.5))
    assert model.asked == [(4, 7, 0.5)]
    # Half: right, right, none, wrong. Two: none, none, none, right.
    assert result.problems[0].answers[0] == result.problems[0].answers[1]
    assert [one.right for one in result.problems] == [(True, True, False, False), (False, False, False, True)]
    by_hand = {
        **{"mean@1": 50, "mean@2": 50, "mean@4": (50 + 25) / 2},
        **{"pass@1": (50 + 25) / 2, "pass@2": 100 * ((1 - 1 / 6) + 0.5) / 2, "pass@4": 100},
        **{"Maj@1": 50, "Maj@2": 50, "Maj@4": 100},
    }
    assert result.scores == pytest.approx(by_hand)
    assert "Maj@4   100.00" in result.table()


def test_programs_are_run(tmp_path):
    answers = {
        "Add.": ["def add(a, b):\n  return a + b\n", "def add(a, b):\n  return a - b\n", "while True: pass", ""],
        "Root.": [
            "def root(x):\n  return math.sqrt(x)\n```\nSee?",
            "import os\nos._exit(0)",
            "def root(x): return 2",
            "1 +",
        ],
    }
    benchmark = load_benchmark("mbpp", write(tmp_path / "m.jsonl", MBPP))
    result = evaluate(benchmark, Scripted(answers), Options(samples=4, limits=Limits(wall_seconds=3)))
    assert [one.right for one in result.problems] == [(True, False, False, False), (True, False, True, False)]
    told = [answer.split(":")[0] for one in result.problems for answer in one.answers]
    assert told == ["passed", "failed", "timed out", "failed", "passed", "exited", "passed", "failed"]
    assert result.scores["pass@1"] == pytest.approx(100 * (0.25 + 0.5) / 2)
    assert not any(name.startswith("Maj") for name in result.scores)


def test_functions_are_completed_or_given_whole(tmp_path):
    benchmark = load_benchmark("humaneval", write(tmp_path / "h.jsonl.gz", HUMANEVAL))
    for answer, right in (
        ("    return math.floor(x)\n", True),
        ("    return math.ceil(x)\n", False),
        ("Sure:\n```python\ndef down(x):\n    return math.floor(x)\n```", True),
        ("", False),
    ):
        result = evaluate(benchmark, Scripted({"down": [answer]}))
        assert result.scores == {"pass@1": 100.0 * right}, answer


def test_command_line(tmp_path, capsys):
    file, out = write(tmp_path / "a.jsonl", GSM8K), tmp_path / "out"
    opened = []
    model = Scripted({"three": ["#### 12", "#### 1"], "thousand": ["4000", "4000"]})
    arguments = ["runs/x", "--task", "gsm8k", "--file", str(file), "--shots", "1", "--samples", "2", "--out", str(out)]
    model.truncated = 3

    def open_model(*options):
        opened.append(options)
        return model

    assert main([*arguments, "--max-length", "99"], open_model) == 0
    assert opened == [("runs/x", 99, True)]
    told = capsys.readouterr().out
    assert "gsm8k, 2 problems, judged by the number" in told
    assert "mean@2   75.00" in told
    assert "3 prompts were too long" in told
    rows = [json.loads(line) for line in (out / "gsm8k.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows] == [[True, False], [True, True]]
    with pytest.raises(SystemExit, match="error: no benchmark at"):
        main([*arguments[:4], str(tmp_path / "none.jsonl")], open_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 or None, got 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


# ------------------------------------------------------------------------------------------- the published programs


def check_published(name, file, count):
    benchmark = load_benchmark(name, data_file(file), limit=count)
    right = [problem.program(problem.reference) for problem in benchmark.problems]
    wrong = [problem.program(problem.reference + "\nraise RuntimeError") for problem in benchmark.problems[:3]]
    done = run_all(right + wrong, Limits(wall_seconds=60, cpu_seconds=60))
    failed = [(p.name, one) for p, one in zip(benchmark.problems, done, strict=False) if not one.passed]
    assert not failed
    assert [one.outcome for one in done[len(right) :]] == ["failed"] * 3
    return len(right)


@pytest.mark.parametrize(("name", "file"), [("humaneval", "HumanEval.jsonl.gz"), ("mbpp", "mbpp.jsonl")])
def test_some_published_solutions_pass(name, file):
    assert check_published(name, file, 5) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "count"), [("humaneval", "HumanEval.jsonl.gz", 164), ("mbpp", "mbpp.jsonl", 500)]
)
def test_all_published_solutions_pass(name, file, count):
    assert check_published(name, file, None) == count


@pytest.mark.parametrize(
    ("name", "file", "count"), [("gsm8k", "gsm8k_test.jsonl", 1319), ("math500", "math500_test.jsonl", 500)]
)
def test_published_solutions_are_right(name, file, count):
    path = data_file(file)
    opened = path.read_text().splitlines()
    field = "answer" if name == "gsm8k" else "solution"
    solutions = [json.loads(line)[field] for line in opened]
    benchmark = load_benchmark(name, path)
    assert len(benchmark.problems) == count

    def answer(prompts, *, max_new_tokens, stop=()):
        return [solutions.pop(0) for _ in prompts]

    assert evaluate(benchmark, answer, Options(batch_size=500)).scores == {"exact match": 100.0}
