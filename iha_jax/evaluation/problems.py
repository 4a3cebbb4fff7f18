"""Reasoning benchmarks read from local files: problems with prompts, and how an answer to one is judged.

| name | file | judged by |
|---|---|---|
| gsm8k | JSON lines with ``question`` and ``answer``, which ends in ``#### n`` | the number |
| math500 | JSON lines with ``problem``, ``solution`` and ``answer`` | the boxed answer's meaning |
| mbpp | JSON lines with ``text``, ``code``, ``test_list``, ``task_id`` | running its tests |
| humaneval | JSON lines with ``prompt``, ``entry_point``, ``canonical_solution``, ``test`` | likewise |
"""

import ast
import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from iha_jax.evaluation.math_answers import gsm8k_answer, math_answer, same_answer
from iha_jax.evaluation.voting import Answer
from iha_jax.json_text import parse_json_object

Name = Literal["gsm8k", "math500", "mbpp", "humaneval"]
NAMES: tuple[Name, ...] = ("gsm8k", "math500", "mbpp", "humaneval")

MBPP_TEST = range(11, 511)
"""``task_id`` of MBPP's test split; those before it are for worked examples."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      name: that the file gives it, or its line.
      prompt: what a model goes on with, worked examples included.
      reference: the right answer, or a program that is one.
      program: an answer → the program that tests it; None where answers are compared.
    """

    name: str
    prompt: str
    reference: str
    program: Callable[[str], str] | None = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A file of problems.

    Attributes:
      name: which benchmark.
      problems: in the file's order.
      stop: texts that end an answer.
      max_new_tokens: room for an answer.
      extract: an answer's text → its final answer, None without one; of programs, the code.
      same: whether two final answers mean the same.
    """

    name: Name
    problems: tuple[Problem, ...]
    stop: tuple[str, ...]
    max_new_tokens: int
    extract: Callable[[str], Answer]
    same: Callable[[Any, Any], bool]

    @property
    def runs_code(self) -> bool:
        """Whether answers are programs."""
        return self.name in ("mbpp", "humaneval")


def load_benchmark(name: Name, file: str | pathlib.Path, shots: int = 0, limit: int | None = None) -> Benchmark:
    """Reads a benchmark.

    Worked examples are MBPP's own, from before its test split; of the others, the file's first problems, which then
    aren't asked. HumanEval has none.

    Args:
      name: one of `NAMES`.
      file: JSON lines, gzipped if it ends in ``.gz``.
      shots: worked examples in front of every problem.
      limit: the most problems; None for all.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: an unknown name, a line of another shape, or too few problems for the examples; what was expected.
    """
    if name not in NAMES:
        raise ValueError(f"unknown benchmark {name!r}: expected one of {', '.join(NAMES)}")
    if shots < 0 or (limit is not None and limit < 1):
        raise ValueError(f"shots must be at least 0 and limit at least 1 or None, got {shots} and {limit}")
    if name == "humaneval" and shots:
        raise ValueError(f"humaneval asks for the rest of a program and has no worked examples, got shots={shots}")
    kinds = {"test_list": list, "task_id": int if name == "mbpp" else str}
    rows = _read(pathlib.Path(file).expanduser(), {field: kinds.get(field, str) for field in _FIELDS[name]})
    benchmark = _LOADERS[name](rows, shots)
    if not benchmark.problems:
        raise ValueError(f"{str(file)!r} has no problem left beside {shots} worked examples")
    return dataclasses.replace(benchmark, problems=benchmark.problems[:limit])


def _read(path: pathlib.Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no benchmark at {str(path)!r}: expected a file of JSON lines")
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no {'gzipped ' * (path.suffix == '.gz')}UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json_object(line, where)
        for field, kind in fields.items():
            if field not in row:
                raise ValueError(f"{where}: no {field!r}; expected {', '.join(fields)}")
            _check_kind(row[field], kind, f"{where}: {field}")
        rows.append(row)
    return rows


def _check_kind(value: Any, kind: type, where: str) -> None:
    fits = isinstance(value, kind) and not (kind is list and not all(isinstance(x, str) for x in value))
    if not fits:
        expected = {str: "text", int: "a number", list: "a list of texts"}[kind]
        raise ValueError(f"{where} must be {expected}, got {value!r:.60}")


# ------------------------------------------------------------------------------------------------------ mathematics


def _mathematics(name: Name, heading: str, parts: list[tuple[str, str, str]], shots: int, **options) -> Benchmark:
    """Of (problem, worked solution, answer)."""
    examples = "".join(f"Problem: {problem}\nSolution: {worked}\n\n" for problem, worked, _ in parts[:shots])
    problems = tuple(
        Problem(f"{name}/{index}", f"{heading}\n\n{examples}Problem: {problem}\nSolution:", answer)
        for index, (problem, _, answer) in enumerate(parts[shots:], shots)
    )
    return Benchmark(name, problems, ("\nProblem:",), **options)


def _gsm8k(rows: list[dict[str, Any]], shots: int) -> Benchmark:
    parts = []
    for row in rows:
        # Calculations in double angle brackets are notes for a calculator, not part of the text.
        worked = re.sub(r"<<[^<>]*>>", "", row["answer"])
        parts.append((row["question"], worked, gsm8k_answer(row["answer"]) or ""))
    heading = "Solve each problem step by step. Write the result, a number, after #### on a line of its own at the end."
    return _mathematics(
        "gsm8k", heading, parts, shots, max_new_tokens=512, extract=gsm8k_answer, same=lambda a, b: a == b
    )


def _math500(rows: list[dict[str, Any]], shots: int) -> Benchmark:
    parts = [(row["problem"], row["solution"], row["answer"]) for row in rows]
    heading = r"Solve each problem step by step, and put the final answer in \boxed{}."
    return _mathematics("math500", heading, parts, shots, max_new_tokens=1024, extract=math_answer, same=same_answer)


# --------------------------------------------------------------------------------------------------------- programs


def code_of(answer: str) -> str:
    """The code in an answer: its first fenced block, or what stands before a fence that only ends it.

    A prompt may have opened the fence itself; a fence left open is closed by the end.
    """
    fence = re.search(r"^```[ \t]*(\w*)[ \t]*$", answer, flags=re.MULTILINE)
    if fence is None:
        return answer
    before = answer[: fence.start()]
    if not fence.group(1) and before.strip() and _is_python(before):
        return before
    return answer[fence.end() + 1 :].split("\n```")[0]


def _is_python(text: str) -> bool:
    try:
        # A function's body, too.
        ast.parse(text if text[:1] not in " \t" else f"if 1:\n{text}")
    except (SyntaxError, ValueError):
        return False
    return True


def _mbpp(rows: list[dict[str, Any]], shots: int) -> Benchmark:
    before = [row for row in rows if row["task_id"] < MBPP_TEST.start]
    if shots > len(before):
        raise ValueError(f"mbpp has {len(before)} worked examples in this file, got shots={shots}")

    def asked(row: dict[str, Any]) -> str:
        tests = "\n".join(row["test_list"])
        return f"Write a Python function.\n\nTask: {row['text']}\nIt must pass these tests:\n{tests}\n\n```python\n"

    examples = "".join(f"{asked(row)}{_unix(row['code'])}\n```\n\n" for row in before[:shots])
    problems = tuple(
        Problem(
            f"mbpp/{row['task_id']}",
            examples + asked(row),
            _unix(row["code"]),
            _program("", "\n".join([str(row.get("test_setup_code", "")), *row["test_list"]])),
        )
        for row in rows
        if row["task_id"] in MBPP_TEST
    )
    return Benchmark("mbpp", problems, ("\n```",), 512, code_of, lambda a, b: a == b)


def _humaneval(rows: list[dict[str, Any]], shots: int) -> Benchmark:
    problems = tuple(
        Problem(
            row["task_id"],
            row["prompt"],
            row["canonical_solution"],
            _completed(row["prompt"], row["entry_point"], f"{row['test']}\ncheck({row['entry_point']})\n"),
        )
        for row in rows
    )
    # What begins at the margin after a function's body is no longer it.
    stop = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\n#", "\n@", "\n```")
    return Benchmark("humaneval", problems, stop, 512, code_of, lambda a, b: a == b)


def _program(before: str, tests: str) -> Callable[[str], str]:
    return lambda code: f"{before}{code}\n{tests}\n"


def _completed(prompt: str, entry_point: str, tests: str) -> Callable[[str], str]:
    """The prompt's function with an answer as the rest of its body, or an answer that has it whole."""
    start = prompt.rfind(f"def {entry_point}(")

    def program(code: str) -> str:
        whole = re.search(rf"^def {re.escape(entry_point)}\(", code, flags=re.MULTILINE)
        return f"{prompt[:start] if whole else prompt}{code}\n{tests}"

    return program


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


_FIELDS: dict[Name, tuple[str, ...]] = {
    "gsm8k": ("question", "answer"),
    "math500": ("problem", "solution", "answer"),
    "mbpp": ("task_id", "text", "code", "test_list"),
    "humaneval": ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
}
_LOADERS: dict[Name, Callable[[list[dict[str, Any]], int], Benchmark]] = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "mbpp": _mbpp,
    "humaneval": _humaneval,
}
