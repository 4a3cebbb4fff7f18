"""Measures tile sizes on the device at hand and writes the fastest to the table that the operation reads.

    python -m iha_jax.ops.tune --batch 1 --tokens 8192 --heads 20 --pseudo 20 --head-dim 128 --window 10
    python -m iha_jax.ops.tune --batch 4 --tokens 512 --heads 8 --pseudo 4 --head-dim 64 --dry-run

Forward and backward pass of one attention, every candidate compiled first and then run in turns, so that a noisy
machine treats all alike. The default sizes are kept unless another choice is faster by a clear margin. See `tuning`
for where the table is and what it does to reproducibility.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from iha_jax import sharding
from iha_jax.ops import tuning
from iha_jax.ops.api import interleaved_head_attention
from iha_jax.ops.arguments import validate
from iha_jax.ops.block_sizes import Sizes
from iha_jax.ops.forms import Problem
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.rope import Rope

MARGIN = 0.97
"""A choice replaces the default one if it takes at most this share of its time: less is within noise."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One choice of sizes and its median seconds, None where it does not compile (on-chip memory, mostly)."""

    sizes: Sizes
    seconds: float | None


def candidates(fused: bool, window: bool) -> list[Sizes]:
    """The default sizes first, then every combination worth trying; of the kernels' sizes if ``fused``."""
    grid: dict[str, Iterable[int]]
    if not fused:
        grid = {"global_score_bytes": [2**20 * n for n in (1, 4, 16)]}
        if window:
            grid["local_score_bytes"] = [2**20 * n for n in (1, 2, 4, 16)]
        else:
            grid["stripes"] = (4, 8, 16)
    elif window:
        grid = {"local_rows": (160, 256, 320, 512), "global_rows": (128, 256, 512), "global_chunk": (256, 512, 1024)}
    else:
        grid = {"global_rows": (128, 256, 512), "global_chunk": (256, 512, 1024)}
    found = [Sizes(**dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    return [Sizes(), *(sizes for sizes in found if sizes != Sizes())]


def measure(
    attend: Callable[..., jax.Array], operands: tuple[Any, ...], choices: list[Sizes], repeats: int
) -> list[Measurement]:
    """Times forward and backward pass of ``attend(*operands)``; a program that several choices share runs once a turn.

    Raises:
      RuntimeError: if not even the default sizes (the first choice) compile.
    """
    programs: dict[str | None, Callable] = {}
    names: list[str | None] = []
    for sizes in choices:
        # A function of its own for each choice: jit would take the first one's program for all.
        def step(*operands):
            out, vjp = jax.vjp(attend, *operands)
            return out, vjp(jnp.ones_like(out))

        name = None
        try:
            with tuning.force(sizes):
                lowered = jax.jit(step).lower(*operands)
            name = lowered.as_text()
            if name not in programs:
                programs[name] = lowered.compile()
                jax.block_until_ready(programs[name](*operands))
        except jax.errors.JaxRuntimeError as error:
            if not names:
                raise RuntimeError(f"the default sizes do not run here: {error}") from error
            programs.pop(name, None)
            name = None
        names.append(name)

    times: dict[str | None, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            times[name].append(time.perf_counter() - start)
    return [
        Measurement(sizes, None if name is None else statistics.median(times[name]))
        for sizes, name in zip(choices, names, strict=True)
    ]


def problem_of(query: jax.Array, key: jax.Array, value: jax.Array, mixing: HeadMixing, **options: Any) -> Problem:
    """The problem that these arguments of `interleaved_head_attention` pose.

    Raises:
      ValueError: as the operation does.
    """
    left_out = ("rope", "window", "scale", "logits_soft_cap", "precision")
    left_out += ("query_positions", "key_positions", "query_segment_ids", "key_segment_ids")
    defaults = {**dict.fromkeys(left_out), "causal": "virtual"}
    return Problem.of(validate(query, key, value, mixing, **{**defaults, **options}))


def best_of(measurements: list[Measurement]) -> Measurement:
    """The fastest, or the first (the default sizes) where none is clearly faster."""
    default = measurements[0]
    assert default.seconds is not None
    ran = [m for m in measurements if m.seconds is not None]
    fastest = min(ran, key=lambda m: (m.seconds, m is not default))
    assert fastest.seconds is not None
    return fastest if fastest.seconds <= MARGIN * default.seconds else default


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    args = _parser().parse_args(argv)
    positions = args.rope if args.rope in ("virtual", "token") else None
    rope = None if positions is None else Rope(positions=positions)
    options = {"causal": None if args.causal == "none" else args.causal, "window": args.window, "rope": rope}
    kv_heads = args.kv_heads or args.heads
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (args.batch, args.tokens)
    query = jax.random.normal(keys[0], (*shape, args.heads, args.head_dim), args.dtype)
    key, value = (jax.random.normal(k, (*shape, kv_heads, args.head_dim), args.dtype) for k in keys[1:])
    try:
        mixing = HeadMixing.copy(args.heads, args.pseudo, kv_heads, collapse=args.collapse)
        problem = problem_of(query, key, value, mixing, **options)
        out = args.out or tuning.table_path()
        if not args.dry_run:
            tuning.read(out)  # a table that is none is better found before the measurement

        def attend(query, key, value, mixing):
            return interleaved_head_attention(query, key, value, mixing, **options)

        operands = (query, key, value, mixing)
        with tuning.force(Sizes()):
            fused = "pallas_call" in str(jax.make_jaxpr(attend)(*operands))
        choices = candidates(fused, args.window is not None)
        print(f"{sharding.device_kind()}: {'fused kernels' if fused else 'blockwise'}, {len(choices)} choices")
        measurements = measure(attend, operands, choices, args.repeats)
        best = best_of(measurements)
        default = measurements[0].seconds
        assert default is not None
        for m in measurements:
            changed = {k: v for k, v in dataclasses.asdict(m.sizes).items() if v != getattr(Sizes(), k)}
            label = " ".join(f"{k}={v}" for k, v in changed.items()) or "default"
            result = "does not fit" if m.seconds is None else f"{m.seconds * 1e3:9.2f} ms  {default / m.seconds:5.2f}x"
            print(f"  {result}  {label}{'  <- best' if m is best else ''}")
        if not args.dry_run:
            tuning.add(out, sharding.device_kind(), problem, best.sizes)
            print(f"written to {out}")
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")


def positive(text: str) -> int:
    """A size or count from the command line.

    Raises:
      argparse.ArgumentTypeError: if it is no positive whole number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iha_jax.ops.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in {
        "batch": "B",
        "tokens": "T, queries and keys",
        "heads": "N",
        "pseudo": "P, pseudo-heads",
        "head-dim": "H",
    }.items():
        parser.add_argument(f"--{name}", type=positive, required=True, help=text)
    parser.add_argument("--kv-heads", type=positive, help="K, by default N")
    parser.add_argument("--window", type=positive, help="W in tokens, by default none")
    parser.add_argument("--causal", choices=["virtual", "token", "none"], default="virtual")
    parser.add_argument("--rope", choices=["virtual", "token", "none"], default="virtual")
    parser.add_argument("--collapse", choices=["per_head", "across_heads"], default="per_head")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=10, help="turns, of which the median counts")
    parser.add_argument("--out", type=Path, help="the table, by default the one that is read")
    parser.add_argument("--dry-run", action="store_true", help="measure and print only")
    return parser


if __name__ == "__main__":
    main()
