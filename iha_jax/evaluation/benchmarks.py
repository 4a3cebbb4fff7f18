"""Measures a model on reasoning benchmarks from local files.

python -m iha_jax.evaluation.benchmarks runs/tiny --task gsm8k --file gsm8k_test.jsonl --shots 4 --samples 8
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from iha_jax.evaluation.answering import Answerer, ModelAnswerer, Sampler, model_answerer
from iha_jax.evaluation.code_execution import Limits, containment, run_all
from iha_jax.evaluation.math_answers import equivalence
from iha_jax.evaluation.problems import Benchmark, Name, Problem, load_benchmark
from iha_jax.evaluation.voting import grouped, majority_at, mean_at, pass_at
from iha_jax.extras import needed


@dataclasses.dataclass(frozen=True)
class Options:
    """How answers are asked for.

    Attributes:
      samples: of each problem; 1 takes the likeliest answer, more are drawn.
      temperature: of drawn samples.
      seed: of drawn samples.
      max_new_tokens: room for an answer; None for the benchmark's own.
      batch_size: problems given to the model at once.
      workers: programs run at once.
      limits: of each program.
    """

    samples: int = 1
    temperature: float = 0.8
    seed: int = 0
    max_new_tokens: int | None = None
    batch_size: int = 8
    workers: int = 2
    limits: Limits = Limits()  # noqa: RUF009 (frozen)

    def __post_init__(self):
        """Checks.

        Raises:
          ValueError: sizes below 1, or a temperature below 0.
        """
        for name in ("samples", "batch_size", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1 or None, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers k that scores are reported at: powers of two, and all samples."""
        powers = [1 << i for i in range(self.samples.bit_length()) if 1 << i < self.samples]
        return (*powers, self.samples)


@dataclasses.dataclass(frozen=True)
class Judged:
    """The answers to one problem.

    Attributes:
      problem: its name.
      reference: the right answer.
      texts: as the model wrote them.
      answers: final answers, those that mean the same spelt alike; None for none. Of programs, how they ended.
      right: whether each is.
    """

    problem: str
    reference: str
    texts: tuple[str, ...]
    answers: tuple[str | None, ...]
    right: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """A benchmark's outcome.

    Attributes:
      benchmark: its name.
      judged: by what.
      problems: with their answers.
      scores: name, as ``"pass@4"``, → mean over the problems, 0 … 100.
    """

    benchmark: str
    judged: str
    problems: tuple[Judged, ...]
    scores: dict[str, float]

    def table(self) -> str:
        """The scores, a line each, and how they came about."""
        width = max(map(len, self.scores))
        lines = [f"{self.benchmark}, {len(self.problems)} problems, judged by {self.judged}"]
        return "\n".join(lines + [f"  {name.ljust(width)}  {score:6.2f}" for name, score in self.scores.items()])

    def json_lines(self) -> str:
        """A problem a line."""
        return "".join(json.dumps(dataclasses.asdict(problem)) + "\n" for problem in self.problems)


def evaluate(
    benchmark: Benchmark,
    model: Answerer | Sampler,
    options: Options = Options(),
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Asks a model a benchmark's problems and scores its answers.

    One sample gives the "exact match" of mathematics or the "pass@1" of programs. Several give, for k = 1, 2, 4, … and
    all: mean@k, the unbiased pass@k over all samples, and, of mathematics, Maj@k, in which no answer has no vote.

    Args:
      benchmark: the problems.
      model: is called for one sample, and its ``sample`` for several.
      options: how it is asked.
      progress: takes a line for every batch.
    """
    judged: list[Judged] = []
    for start in range(0, len(benchmark.problems), options.batch_size):
        batch = benchmark.problems[start : start + options.batch_size]
        judged += _judge(benchmark, batch, _ask(benchmark, batch, model, options), options)
        right = sum(sum(one.right) for one in judged) / (len(judged) * options.samples)
        progress(f"{benchmark.name}: {len(judged)} of {len(benchmark.problems)} problems, {100 * right:.1f}% right")
    scores: dict[str, float] = {}
    if options.samples == 1:
        scores["pass@1" if benchmark.runs_code else "exact match"] = _mean(judged, lambda one: float(one.right[0]))
    else:
        for k in options.counts:
            scores[f"mean@{k}"] = _mean(judged, lambda one, k=k: mean_at(one.right, k))
        for k in options.counts:
            scores[f"pass@{k}"] = _mean(judged, lambda one, k=k: pass_at(len(one.right), sum(one.right), k))
        for k in options.counts if not benchmark.runs_code else ():
            scores[f"Maj@{k}"] = _mean(judged, lambda one, k=k: majority_at(one.answers, one.right, k))
    how = "running its tests" if benchmark.runs_code else "the number" if benchmark.name == "gsm8k" else equivalence()
    return Result(benchmark.name, how, tuple(judged), scores)


def _ask(
    benchmark: Benchmark, batch: Sequence[Problem], model: Answerer | Sampler, options: Options
) -> list[list[str]]:
    prompts = [problem.prompt for problem in batch]
    room = options.max_new_tokens or benchmark.max_new_tokens
    if options.samples == 1:
        assert callable(model), "one sample is asked for by a call"
        return [[text] for text in model(prompts, max_new_tokens=room, stop=benchmark.stop)]
    sample = getattr(model, "sample", None)
    assert sample is not None, "several samples are asked for by the method sample"
    return sample(
        prompts,
        num_samples=options.samples,
        max_new_tokens=room,
        stop=benchmark.stop,
        seed=options.seed,
        temperature=options.temperature,
    )


def _judge(benchmark: Benchmark, batch: Sequence[Problem], texts: list[list[str]], options: Options) -> list[Judged]:
    found = [[benchmark.extract(text) for text in samples] for samples in texts]
    if not benchmark.runs_code:
        judged = []
        for problem, samples, extracted in zip(batch, texts, found, strict=True):
            answers = grouped(extracted, benchmark.same)
            # An answer is judged once, however often it was given.
            verdicts = {a: benchmark.same(problem.reference, a) for a in dict.fromkeys(answers) if a is not None}
            right = tuple(a is not None and verdicts[a] for a in answers)
            given = tuple(None if a is None else str(a) for a in answers)
            judged.append(Judged(problem.name, problem.reference, tuple(samples), given, right))
        return judged
    programs = [
        problem.program(str(code))
        for problem, codes in zip(batch, found, strict=True)
        for code in codes
        if problem.program
    ]
    ended = iter(run_all(programs, options.limits, options.workers))
    judged = []
    for problem, samples in zip(batch, texts, strict=True):
        runs = [next(ended) for _ in samples]
        outcomes = tuple(f"{run.outcome}: {run.detail}" if run.detail else run.outcome for run in runs)
        right = tuple(run.passed for run in runs)
        judged.append(Judged(problem.name, problem.reference, tuple(samples), outcomes, right))
    return judged


def _mean(judged: Sequence[Judged], score: Callable[[Judged], float]) -> float:
    return 100 * sum(map(score, judged)) / len(judged)


def main(
    arguments: Sequence[str] | None = None,
    open_model: Callable[[str], ModelAnswerer] = model_answerer,
) -> int:
    """Measures a checkpoint; prints the scores, writes the answers to ``<out>/<task>.jsonl``.

    Args:
      arguments: of the command line, default the process's.
      open_model: makes an answerer of a checkpoint's path.
    """
    with needed("tyro", "the command line"):
        import tyro

    @dataclasses.dataclass(frozen=True)
    class Command:
        """Measure a trained model on GSM8K, MATH-500, MBPP or HumanEval from a local file."""

        # A run's directory (its newest checkpoint), or one of its checkpoints/STEP.
        checkpoint: tyro.conf.Positional[str]
        # Which benchmark the file is of.
        task: Name
        # JSON lines; docs/evaluation.md has the formats.
        file: pathlib.Path
        # Worked examples in front of every problem.
        shots: int = 0
        # The most problems; default all.
        limit: int | None = None
        # Where answers go.
        out: pathlib.Path = pathlib.Path("benchmarks")
        options: Annotated[Options, tyro.conf.arg(name="")] = Options()

    command = tyro.cli(Command, args=arguments, prog="python -m iha_jax.evaluation.benchmarks")
    try:
        benchmark = load_benchmark(command.task, command.file, command.shots, command.limit)
        if benchmark.runs_code:
            in_force = ", ".join(containment()) or "limits alone"
            print(f"programs are run with {in_force}; docs/evaluation.md says what that is worth", file=sys.stderr)
        model = open_model(command.checkpoint)
        result = evaluate(benchmark, model, command.options, lambda line: print(line, file=sys.stderr, flush=True))
        command.out.mkdir(parents=True, exist_ok=True)
        answers = command.out / f"{command.task}.jsonl"
        answers.write_text(result.json_lines(), encoding="utf-8")
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(result.table())
    print(f"answers in {answers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
