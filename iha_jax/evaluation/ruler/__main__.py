"""The command line: ``python -m iha_jax.evaluation.ruler runs/tiny --tasks niah_multikey_1 --lengths 4096 8192``."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from iha_jax.evaluation.answering import ModelAnswerer, model_answerer
from iha_jax.evaluation.ruler.report import json_lines, page, table
from iha_jax.evaluation.ruler.runner import Plan, evaluate
from iha_jax.extras import needed


def main(
    arguments: Sequence[str] | None = None,
    open_model: Callable[[str], ModelAnswerer] = model_answerer,
) -> int:
    """Measures a checkpoint; prints the table, writes ``samples.jsonl`` and ``report.html``.

    Args:
      arguments: of the command line, default the process's.
      open_model: makes an answerer of a checkpoint's path.
    """
    with needed("tyro", "the command line"):
        import tyro

    @dataclasses.dataclass(frozen=True)
    class Command:
        """Measure a trained model on RULER: tables by task, length and depth, and a map of length and depth."""

        # A run's directory (its newest checkpoint), or one of its checkpoints/STEP.
        checkpoint: tyro.conf.Positional[str]
        plan: Annotated[Plan, tyro.conf.arg(name="")] = Plan()  # noqa: RUF009 (frozen)
        # Where results go.
        out: pathlib.Path = pathlib.Path("ruler")

    command = tyro.cli(Command, args=arguments, prog="python -m iha_jax.evaluation.ruler")
    try:
        model = open_model(command.checkpoint)
        records = evaluate(model, model.tokenizer, command.plan, lambda line: print(line, file=sys.stderr, flush=True))
        command.out.mkdir(parents=True, exist_ok=True)
        (command.out / "samples.jsonl").write_text(json_lines(records), encoding="utf-8")
        report = command.out / "report.html"
        notes = [f"{command.plan.samples} questions of each task and length, seed {command.plan.seed}."]
        report.write_text(page(records, f"RULER, {model.name}", notes), encoding="utf-8")
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(table(records))
    print(f"answers in {command.out / 'samples.jsonl'}, report in {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
