"""The command line of comparisons: ``python -m iha_jax.experiments.compare configs/relations.py --seeds 3``."""

import argparse
import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

import jax

from iha_jax.experiments.comparison import Comparison
from iha_jax.experiments.report import write_report
from iha_jax.experiments.runner import run_grid
from iha_jax.training.cli import config_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a comparison and writes its page.

    Args:
      arguments: of the command line, default the process's.

    Returns:
      0 when every run of the grid has its result; 1 when other processes still work on some.
    """
    options = _parser().parse_args(arguments)
    command = "python -m iha_jax.experiments.compare " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    try:
        comparison = _choose(options)
        output = options.output or pathlib.Path("runs") / comparison.name
        complete = True
        if not options.report_only:
            complete = run_grid(comparison, options.seeds, output, command, lambda line: print(line, flush=True))
        page = write_report(comparison, options.seeds, output, command)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"results in {output / 'results.jsonl'}, report in {page}")
    return 0 if complete else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iha_jax.experiments.compare",
        description="Run a grid of experiments, as far as it isn't done, and write a report. Stopped at any point, "
        "the same command goes on and ends with the same numbers.",
    )
    parser.add_argument("config", type=pathlib.Path, help="a Python file whose CONFIG is a Comparison")
    parser.add_argument("--seeds", type=_positive, default=3, metavar="N", help="seeds 0 … N-1 (default 3)")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", help="default runs/<name of the comparison>")
    parser.add_argument(
        "--scale",
        choices=("auto", "full", "reduced"),
        default="auto",
        help="the whole comparison, or its reduced form for CPUs (default: by the machine)",
    )
    parser.add_argument("--only", metavar="REGEX", help="only entries whose 'setting · variant' has this")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what there is")
    return parser


def _choose(options: argparse.Namespace) -> Comparison:
    if not options.config.is_file():
        raise ValueError(f"no config at {str(options.config)!r}: expected a Python file with a CONFIG")
    comparison = config_in(options.config, Comparison)
    if options.scale == "reduced" and comparison.reduced is None:
        raise ValueError(f"comparison {comparison.name!r} has no reduced form: use --scale full")
    small = options.scale == "reduced" or (options.scale == "auto" and jax.default_backend() == "cpu")
    if small and comparison.reduced is not None:
        comparison = comparison.reduced
    if options.only is None:
        return comparison
    kept = tuple(e for e in comparison.entries if re.search(options.only, f"{e.setting} · {e.variant}"))
    if not kept:
        names = ", ".join(repr(f"{e.setting} · {e.variant}") for e in comparison.entries)
        raise ValueError(f"--only {options.only!r} leaves nothing of {names}")
    variants = [entry.variant for entry in kept]
    baseline = comparison.baseline if comparison.baseline in variants else variants[0]
    return dataclasses.replace(comparison, entries=kept, baseline=baseline)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
