"""The fused GPU kernels against blockwise and against materialised pseudo-heads through cuDNN, as a markdown table.

    python benchmarks/gpu.py                                  # T 2k, 8k, 32k; P 2, 4, 8; window auto and global
    python benchmarks/gpu.py --tokens 8192 --pseudo 4         # one length
    python benchmarks/gpu.py --tokens 8192 --pseudo 4 --tune  # the fused kernels' tiles, one kernel after the other
    python benchmarks/gpu.py --smoke                          # tiny sizes, on a CPU: whether it runs; no times

Values and all gradients are checked first, on this device, against the reference in float32, and their error printed
over that of pseudo-heads materialised in the same dtype (about 2 is expected; above 4 nothing is measured). Then every
variant's forward pass, and forward and backward pass, is timed in turn. TFLOP/s count Algorithm 1's work on visible
pairs (mixing included, backward twice forward), the same for all variants. Memory is what the compiler reports as
temporaries of forward and backward pass, beside the bytes of q, k, v and output. What would take longer than
``--limit`` seconds a pass, extrapolated from a shorter length, is left out.
"""

import argparse
import dataclasses
import functools
import shlex
import statistics
import sys
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from iha_jax.ops import pallas_gpu
from iha_jax.ops.arguments import validate
from iha_jax.ops.pallas_gpu_plan import Tile, Tiles, default_tiles
from iha_jax.ops.rope import apply_rope, rope_tables

ROPE = Rope()
ALLOWED = 4.0
"""Error of the fused kernels over that of materialised pseudo-heads in the same dtype. Rounding gives up to 2 in small
problems, a mistake a hundred."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One line's problem; window None is global."""

    batch: int
    tokens: int
    heads: int
    pseudo: int
    dim: int
    window: int | None

    @property
    def pairs(self) -> int:
        """Visible pairs of one head of one row."""
        keys = min(self.window or self.tokens, self.tokens) * self.pseudo
        return self.tokens * self.pseudo * keys - keys * (keys - 1) // 2

    @property
    def flops(self) -> int:
        """Of Algorithm 1's forward pass."""
        mixing = 3 * 2 * self.tokens * self.heads**2 * self.pseudo * self.dim
        return self.batch * (mixing + 4 * self.pairs * self.heads * self.dim)


def fused(shape: Shape):
    """The GPU kernels, whatever the device."""

    def attend(query, key, value, mixing):
        unset = ("query_positions", "key_positions", "query_segment_ids", "key_segment_ids")
        options: dict[str, Any] = dict.fromkeys((*unset, "scale", "logits_soft_cap", "precision"))
        args = validate(query, key, value, mixing, causal="virtual", window=shape.window, rope=ROPE, **options)
        reason = pallas_gpu.why_not(args)
        if reason is not None:
            raise NotImplementedError(reason)
        return pallas_gpu.pallas_gpu(args)

    return attend


def named(implementation, precision=None):
    def of(shape: Shape):
        def attend(query, key, value, mixing):
            return interleaved_head_attention(
                query,
                key,
                value,
                mixing,
                window=shape.window,
                rope=ROPE,
                precision=precision,
                implementation=implementation,
            )

        return attend

    return of


def materialised(shape: Shape, implementation: Literal["cudnn", "xla"] | None = None):
    """Pseudo-heads in memory, then the fastest attention there is: what one would write without this library."""
    if implementation is None:
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def attend(query, key, value, mixing):
        def pseudo_heads(x, weights):
            mixed = jnp.einsum(
                "btmh,mnp->btpnh", x, weights.astype(x.dtype), preferred_element_type=jnp.float32
            ).astype(x.dtype)
            return mixed.reshape(x.shape[0], -1, *mixed.shape[3:])

        virtual = jnp.arange(shape.tokens * shape.pseudo, dtype=jnp.int32)
        tables = [table[None, :, None] for table in rope_tables(virtual, ROPE, shape.dim, shape.pseudo)]
        query, key = (apply_rope(pseudo_heads(x, w), *tables) for x, w in ((query, mixing.query), (key, mixing.key)))
        window = None if shape.window is None else (shape.window * shape.pseudo - 1, 0)
        out = jax.nn.dot_product_attention(
            query,
            key,
            pseudo_heads(value, mixing.value),
            is_causal=True,
            local_window_size=window,
            implementation=implementation,
        )
        out = out.reshape(out.shape[0], shape.tokens, shape.pseudo, *out.shape[2:])
        collapsed = jnp.einsum("btpnh,np->btnh", out, mixing.collapse, preferred_element_type=jnp.float32)
        return collapsed.astype(query.dtype)

    return attend


VARIANTS = {"fused": fused, "blockwise": named("blockwise"), "materialised + cuDNN": materialised}


def inputs(shape: Shape, dtype):
    """Random q, k, v, cotangent and mixing tensors."""
    keys = jax.random.split(jax.random.key(0), 8)
    dims = (shape.batch, shape.tokens, shape.heads, shape.dim)
    query, key, value, cotangent = (jax.random.normal(k, dims, dtype) for k in keys[:4])
    mix = [jax.random.normal(k, (shape.heads, shape.heads, shape.pseudo)) * shape.heads**-0.5 for k in keys[4:7]]
    collapse = jax.random.normal(keys[7], (shape.heads, shape.pseudo)) / shape.pseudo
    return query, key, value, HeadMixing(*mix, collapse=collapse), cotangent


def step(attend):
    """Forward and backward pass."""

    def run(query, key, value, mixing, cotangent):
        out, vjp = jax.vjp(attend, query, key, value, mixing)
        return out, vjp(cotangent)

    return run


def check(shape: Shape, dtype) -> float:
    """The fused kernels' largest error, of output and gradients, over that of materialised pseudo-heads.

    Raises:
      SystemExit: if it is above `ALLOWED`.
    """
    operands = inputs(shape, dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    expected = jax.jit(step(named("reference", "highest")(shape)))(*exact)
    worst = 0.0
    runs = [
        jax.jit(step(of(shape)))(*operands) for of in (fused, functools.partial(materialised, implementation="xla"))
    ]
    names = ("output", "query", "key", "value", "mixing.query", "mixing.key", "mixing.value", "collapse")
    for name, right, mine, theirs in zip(names, *map(jax.tree.leaves, (expected, *runs)), strict=True):
        size = jnp.sqrt(jnp.mean(right**2))
        errors = [float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - right) ** 2)) / size) for x in (mine, theirs)]
        ratio = errors[0] / max(errors[1], 1e-5)  # float32's own rounding
        worst = max(worst, ratio)
        if not ratio <= ALLOWED:
            sys.exit(
                f"error: {name} of the fused kernels is off by {errors[0]:.2e} of its size at {shape}, materialised "
                f"ones in {jnp.dtype(dtype).name} by {errors[1]:.2e}: they compute something else on this device."
            )
    return worst


def timed_in_turn(runs: dict[str, Any], turns: int, at_least: float) -> dict[str, float]:
    """Median seconds of each, the runs interleaved; a turn repeats a short run until it takes ``at_least`` seconds."""
    repeats, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        repeats[name] = max(1, round(at_least / (time.perf_counter() - start)))
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(repeats[name] - 1):
                run()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def measure(attend, operands):
    """Both passes compiled: ``(forward, forward and backward, temporaries of the latter in bytes)``."""
    forward = jax.jit(attend).lower(*operands[:4]).compile()
    both = jax.jit(step(attend)).lower(*operands).compile()
    memory = both.memory_analysis()
    assert memory is not None
    return (lambda: forward(*operands[:4])), (lambda: both(*operands)), memory.temp_size_in_bytes


def lines(shape: Shape, dtype, options, before: dict) -> None:
    """Prints a shape's rows; ``before`` has seconds and FLOPs of every variant at shorter lengths."""
    operands = inputs(shape, dtype)
    base = sum(x.nbytes for x in (*operands[:3], operands[4]))
    forward, both, memory, notes = {}, {}, {}, {}
    for name, of in VARIANTS.items():
        key = name, shape.pseudo, shape.window is None
        if key in before:
            seconds, flops = before[key]
            guess = seconds * shape.flops / flops
            if guess > options.limit:
                notes[name] = f"left out: about {guess:.0f} s"
                continue
        try:
            forward[name], both[name], memory[name] = measure(of(shape), operands)
            jax.block_until_ready(both[name]())
        except (NotImplementedError, ValueError, RuntimeError) as error:
            for found in (forward, both, memory):
                found.pop(name, None)
            notes[name] = str(error).strip().splitlines()[0][:80].replace("|", "/")
    seconds = [timed_in_turn(runs, options.turns, options.at_least) for runs in (forward, both)]
    place = f"{shape.tokens} | {shape.pseudo} | {shape.window or 'global'}"
    for name in VARIANTS:
        if name in notes:
            print(f"| {place} | {name} | {notes[name]} | | | | | |", flush=True)
            continue
        ms = [1e3 * times[name] for times in seconds]
        rates = [shape.flops * factor / (time * 1e9) for factor, time in zip((1, 3), ms, strict=True)]
        before[name, shape.pseudo, shape.window is None] = seconds[1][name], shape.flops
        print(
            f"| {place} | {name} | {ms[0]:.2f} | {rates[0]:.0f} | {ms[1]:.2f} | {rates[1]:.0f} "
            f"| {memory[name] / 1e6:.0f} | {memory[name] / base:.1f} |",
            flush=True,
        )


def tune(shape: Shape, dtype, options) -> None:
    """Times tiles of each of the three kernels, the others at their default sizes."""
    operands = inputs(shape, dtype)
    default = default_tiles(shape.dim, jnp.dtype(dtype).name)
    sizes = [(64, 16, 4), (64, 32, 4), (64, 32, 8), (64, 64, 8), (128, 16, 8), (128, 32, 8), (128, 64, 8)]
    if options.smoke:
        sizes = sizes[:2]
    for kernel in ("forward", "query", "key"):
        mine = getattr(default, kernel)
        found = {}
        for tile in {mine, *(Tile(*size, stages=stages) for size in sizes for stages in (1, 2))}:
            tiles: Tiles = dataclasses.replace(default, **{kernel: tile})
            try:
                with pallas_gpu.force(tiles):
                    runs = measure(fused(shape), operands)
                (seconds,) = timed_in_turn({"": runs[kernel != "forward"]}, options.turns, options.at_least).values()
                found[tile] = seconds
            except (ValueError, RuntimeError) as error:
                print(f"{kernel}: {tile} {str(error).splitlines()[0][:100]}", flush=True)
        for tile, seconds in sorted(found.items(), key=lambda item: item[1]):
            print(f"{kernel}: {1e3 * seconds:9.3f} ms {tile}{'  <- default' if tile == mine else ''}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--pseudo", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--windows", nargs="+", default=["auto", "global"], choices=["auto", "global"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--turns", type=int, default=5, help="of which the median counts")
    parser.add_argument("--limit", type=float, default=4.0, help="seconds of a pass")
    parser.add_argument("--tune", action="store_true", help="time tiles instead")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once")
    options = parser.parse_args(argv)
    options.at_least, check_tokens = 0.05, 512
    if options.smoke:
        options.tokens, options.pseudo, options.heads, options.dim = [32], [2], 2, 32
        options.turns, options.at_least, check_tokens = 1, 0.0, 24
    dtype = jnp.dtype(options.dtype)

    def shape(tokens: int, pseudo: int, window: str) -> Shape:
        reach = max(1, tokens // (2 * pseudo**2)) if window == "auto" else None
        return Shape(options.batch, tokens, options.heads, pseudo, options.dim, reach)

    command = shlex.join(["python", "benchmarks/gpu.py", *(sys.argv[1:] if argv is None else argv)])
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.dtype}: `{command}`")
    print(f"B {options.batch}, N {options.heads}, H {options.dim}, virtual causality and RoPE, per-head collapse\n")
    for pseudo in options.pseudo:
        for window in options.windows:
            worst = check(shape(check_tokens, pseudo, window), dtype)
            print(f"P {pseudo}, {window}: error at most {worst:.2f} of materialised {options.dtype}'s", flush=True)
    if options.tune:
        tune(shape(options.tokens[0], options.pseudo[0], options.windows[0]), dtype, options)
        return
    print("\n| T | P | W | variant | fwd ms | TFLOP/s | fwd + bwd ms | TFLOP/s | temporaries MB | / qkvo |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    before: dict = {}
    for tokens in sorted(options.tokens):
        for pseudo in options.pseudo:
            for window in options.windows:
                lines(shape(tokens, pseudo, window), dtype, options, before)


if __name__ == "__main__":
    main()
