"""What the TPU compiler makes of attention, without a TPU: temporaries, and machine instructions times their trips.

    pip install "jax[tpu]"
    python benchmarks/tpu_static.py                                   # the standard shapes on v5e
    python benchmarks/tpu_static.py --topology v6e:2x2 --shape 20 20 128 8192 10
    python benchmarks/tpu_static.py --regions                         # where a kernel's instructions are

Programs are compiled ahead of time for the topology named. The compiler's own listing of a kernel holds its bundles (a
bundle issues in one cycle); loops are counted with their trips, from the bounds of their exit tests, and what does no
arithmetic only as often as it runs. An estimate from below: it knows the latencies inside a kernel, but no waiting
for memory. "MXU ms" is the time the matrix products take at peak with all padding, "ideal ms" what Algorithm 1 with
the exact window, none of its rearrangements and no padding takes at peak.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import tempfile
import time

DUMP = tempfile.mkdtemp(prefix="tpu_static_")
# Read when libtpu is loaded; without the first it asks a metadata server for the machine's topology.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from iha_jax import HeadMixing, Rope, interleaved_head_attention  # noqa: E402
from iha_jax.ops import pallas_tpu_cost  # noqa: E402
from iha_jax.ops.pallas_tpu_plan import DoesNotFit, plan  # noqa: E402
from iha_jax.ops.pallas_tpu_spec import Spec  # noqa: E402

SHAPES = [
    # N, P, H, T, W (0: global)
    (20, 20, 128, 8192, 10),
    (16, 8, 128, 8192, 64),
    (8, 4, 64, 8192, 256),
    (8, 4, 128, 8192, 0),
]

# Clock in GHz and dense bfloat16 peak in TFLOP/s of a chip (a core of v5p's two is half of it).
CHIPS = {"v5e": (1.5, 197.0), "v5p": (1.75, 459.0), "v6e": (1.75, 918.0)}


def algorithm_flops(heads: int, pseudo: int, dim: int, tokens: int, window: int) -> float:
    """Algorithm 1, forward: three mixings, scores and values of visible pairs, collapse."""
    mixing = 3 * 2 * tokens * heads * pseudo * heads * dim
    pairs = tokens * pseudo * (window * pseudo if window else tokens * pseudo / 2)
    return mixing + 2 * 2 * heads * pairs * dim + 2 * tokens * heads * pseudo * dim


class Region:
    """A stretch of a kernel's bundles at one depth of loops."""

    def __init__(self, depth: int):
        self.depth, self.bundles = depth, 0
        self.trips: int | None = None
        self.operations: list[str] = []


def regions_of(listing: str) -> list[Region]:
    """Splits the compiler's listing at loop bodies and predicated regions."""
    found: list[Region] = []
    for line in listing.splitlines():
        match = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{", line)
        if match is None:
            continue
        depth = len(match.group(2)) or (found[-1].depth if found else 0)  # empty bundles show no depth
        # Inside a loop only another loop starts a new region.
        starts = match.group(1) == "LB" or (depth == 1 and match.group(1) in ("PF", "PB"))
        if found and depth > found[-1].depth and match.group(1) != "LB":
            # A loop starts at its label: before it stood a bundle of the loop that the compiler took in from outside.
            region = next(region for region in reversed(found) if region.depth == depth)
            found.remove(region)
            found.append(region)
        elif not found or depth != found[-1].depth or starts:
            found.append(Region(depth))
        region = found[-1]
        region.bundles += 1
        exit_test = re.search(r"scmp\.ge\.s32\.totalorder %s\w+, (\d+) /\* loop exit test", line)
        if exit_test is not None and depth > 1:
            region.trips = int(exit_test.group(1))
        region.operations += re.findall(r"(?:=|\{|;;)\s+(?:%\w+ = )?(v[a-z]+)", line)
    return found


def bundles_per_step(regions: list[Region], spec: Spec | None, steps: int, is_backward: bool) -> float:
    """Bundles of a grid step, on average over the grid."""
    total, sweeps = 0.0, 0
    share = 1.0
    drain = None
    if spec is not None:
        # Keys arrive (and depart) in some steps, queries take their turns in others.
        share = spec.query_tiles / max(steps // max(spec.batch, 1), spec.query_tiles)
        if is_backward and spec.in_step:
            # What departs in the last steps, when nothing else happens, has a region of its own.
            drain = [region for region in regions if region.depth == 1 and "vmatmul" in region.operations][-1]
    for region in regions:
        if region.depth == 0:
            continue
        arithmetic = sum(op in ("vmul", "vadd", "vsub", "vmax", "vmatmul", "vsel") for op in region.operations)
        loads = region.operations.count("vld")
        times = share if arithmetic or region.depth > 1 else 1.0
        if region is drain:
            assert spec is not None
            times = spec.lag * spec.batch / steps
        elif region.depth == 1 and "vcmp" in region.operations and "vmatmul" not in region.operations:
            if spec is not None and spec.own_masks is not None:
                # Masks are kept from tile to tile but for the first and last ones.
                first, last = spec.own_masks
                times = (first + 1 + max(spec.query_tiles - last, 0)) * spec.batch / steps
        elif region.depth >= 2:
            times = float(region.trips or 1) * share
            if not arithmetic:
                # Clearing at the start of a sequence, or moving the kept tiles once in so many steps.
                times = 0.0 if not loads else times / (spec.slots if spec is not None else 1)
            elif region.trips is None and spec is not None and spec.kind == "global":
                # Loops over chunks, in pairs where some chunks need no mask.
                visits = pallas_tpu_cost.chunk_visits(spec) / spec.query_tiles
                free = 0.0
                if spec.free == "past":
                    free = sum(i * spec.rows // spec.chunk for i in range(spec.query_tiles)) / spec.query_tiles
                elif spec.free:
                    free = spec.free // spec.chunk
                times *= visits if not free else (visits - free if sweeps % 2 else free)
                sweeps += region.bundles > 60  # shorter stretches belong to the loop before
        total += region.bundles * times
    return total


def grid_steps(listing: str) -> int:
    """Trips of the outermost loop, the grid's."""
    bounds = re.findall(r": >\s+\{.*scmp\.ge\.s32\.totalorder %s\w+, (\d+) /\* loop exit test", listing)
    return int(bounds[-1]) if bounds else 1


def new_listings(known: set) -> dict[str, str]:
    """Listings of kernels compiled since, by kernel."""
    found = {}
    for path in sorted(pathlib.Path(DUMP).glob("*-final_bundles.txt")):
        if path in known or "schedule-analysis" in path.name:
            continue
        known.add(path)
        name = re.sub(r"^\d+-|(\.\d+)?-\d+-final_bundles\.txt$", "", path.name)
        text = path.read_text()
        if "tpu_custom_call" in text or name.startswith("iha_") or "flash" in name:
            found[name] = text
    return found


def spec_of(heads, pseudo, dim, tokens, window) -> Spec | None:
    with contextlib.suppress(DoesNotFit):
        return plan(
            batch=1, query_len=tokens, key_len=tokens, sources=heads, key_sources=heads, heads=heads, kv_heads=heads,
            head_dim=dim, value_dim=dim, pseudo=pseudo, causal="virtual", window=window or None, aligned=True,
            plain=True, across_heads=False, scale=dim**-0.5, logits_soft_cap=None, precision=None, dtype="bfloat16",
        )  # fmt: skip
    return None


def programs(heads: int, dim: int, tokens: int, window: int) -> dict:
    """What is compared, as functions of heads side by side."""

    def split(x):
        return x.reshape(*x.shape[:2], heads, dim)

    def iha(implementation):
        def attend(query, key, value, mixing):
            out = interleaved_head_attention(
                split(query),
                split(key),
                split(value),
                mixing,
                window=window or None,
                rope=Rope(),
                implementation=implementation,
            )
            return out.reshape(query.shape)

        return attend

    def flash(query, key, value, mixing):
        del mixing
        sizes = {field.name: min(512, tokens) for field in dataclasses.fields(BlockSizes)}
        heads_first = (jnp.swapaxes(split(x), 1, 2) for x in (query, key, value))
        blocks = BlockSizes(**{**sizes, "block_b": 1})
        out = flash_attention(*heads_first, causal=True, sm_scale=dim**-0.5, block_sizes=blocks)
        return jnp.swapaxes(out, 1, 2).reshape(query.shape)

    return {"pallas": iha("pallas"), "blockwise": iha("blockwise"), "flash": flash}


def compile_step(attend, arrays, mixing):
    """Forward and backward with respect to everything; heads side by side, as projections leave them."""

    def step(query, key, value, mixing, cotangent):
        out, vjp = jax.vjp(attend, query, key, value, mixing)
        return out, vjp(cotangent)

    start = time.perf_counter()
    compiled = jax.jit(step).lower(*arrays, mixing, arrays[0]).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--shape", type=int, nargs=5, action="append", metavar=("N", "P", "H", "T", "W"))
    parser.add_argument("--regions", action="store_true", help="list each kernel's regions")
    parser.add_argument("--skip", nargs="*", default=[], choices=["pallas", "blockwise", "flash"])
    options = parser.parse_args()
    chip = options.topology.split(":")[0]
    clock, peak = CHIPS[chip]
    device = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices[0]
    sharding = SingleDeviceSharding(device)
    known: set = set()
    print(f"{options.topology}, jax {jax.__version__}, forward + backward, B 1, bfloat16, {clock} GHz, {peak} TFLOP/s")
    for heads, pseudo, dim, tokens, window in options.shape or SHAPES:
        print(f"\nN {heads} P {pseudo} H {dim} T {tokens} W {window or 'global'}")
        flat = jax.ShapeDtypeStruct((1, tokens, heads * dim), jnp.bfloat16, sharding=sharding)
        mixing = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda n=heads, p=pseudo: HeadMixing.copy(n, p)),
        )
        spec = spec_of(heads, pseudo, dim, tokens, window)

        for name, attend in programs(heads, dim, tokens, window).items():
            if name in options.skip:
                continue
            try:
                memory, seconds = compile_step(attend, [flat] * 3, mixing)
            except NotImplementedError as reason:
                print(f"  {name:10s} {reason}")
                continue
            label = "flash (plain MHA)" if name == "flash" else name
            print(f"  {label:18s} temporaries {memory / 1e6:7.1f} MB, compiled in {seconds:.0f} s")
            for kernel, listing in new_listings(known).items():
                regions = regions_of(listing)
                steps = grid_steps(listing)
                is_backward = "backward" in kernel
                bundles = bundles_per_step(regions, spec if name == "pallas" else None, steps, is_backward)
                groups = spec.groups if spec is not None and name == "pallas" else 1
                estimate = bundles * steps * groups / (clock * 1e6)
                line = f"    {kernel:26s} {bundles:8.0f} bundles x {steps * groups} steps = {estimate:7.2f} ms"
                if name == "pallas" and spec is not None:
                    padded = pallas_tpu_cost.flops(spec, is_backward) * groups / peak / 1e9
                    ideal = algorithm_flops(heads, pseudo, dim, tokens, window) * (2 if is_backward else 1) / peak / 1e9
                    line += f"; MXU {padded:.2f} ms, ideal {ideal:.2f} ms, ratio {estimate / ideal:.1f}"
                print(line)
                if options.regions:
                    for region in regions:
                        if region.bundles > 20:
                            print(f"      depth {region.depth} trips {region.trips} bundles {region.bundles}")


if __name__ == "__main__":
    main()
