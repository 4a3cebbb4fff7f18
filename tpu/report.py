"""Plans as text and as JSON."""

import dataclasses
import json
from collections.abc import Sequence

from tpu.compiling import Plan
from tpu.topology import describe

_NAMES = {"compute": "matrix units", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"}


def describe_mesh(plan: Plan) -> str:
    """The mesh in words: "fsdp=32 tensor=4"."""
    return " ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"


def to_text(plan: Plan) -> str:
    """The whole report."""
    lines = [
        f"{plan.name} on {describe(plan.topology, plan.slices)}: {plan.chips} chips, mesh {describe_mesh(plan)}",
        f"{plan.parameters:,} parameters; a step is {plan.batch_size} rows of {plan.sequence_length} = {plan.tokens:,} "
        f"tokens in {plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}; remat {plan.remat}",
        f"compiled in {plan.compile_seconds:.0f} s",
        "",
    ]
    if plan.error is not None or plan.hbm is None or plan.flops is None or plan.bounds is None:
        needed = "" if plan.needed is None else f" (needs {plan.needed / 2**30:.2f} GiB of HBM)"
        return "\n".join([*lines, f"does not fit{needed}: {plan.error}"]) + "\n"
    hbm, flops, limits = plan.hbm, plan.flops, plan.bounds
    lines += _table(
        ["HBM of a device", "GiB"],
        [
            *[
                [name, f"{getattr(hbm, name) / 2**30:.2f}"]
                for name in ("arguments", "outputs", "temporaries", "program")
            ],
            [f"in all: {'fits' if plan.fits else 'does not fit'}", f"{hbm.total / 2**30:.2f}"],
            ["capacity", f"{hbm.capacity / 2**30:.2f}"],
        ],
    )
    program = f"{_ratio(flops.executed, flops.model)} of model"
    lines.append("")
    lines += _table(
        ["FLOPs of a step, all devices", "PFLOP", ""],
        [
            ["model (visible pairs, mixing, collapse)", _peta(flops.model), ""],
            ["executed, counted in the compiled program", _peta(flops.executed), program],
            ["  of which Pallas kernels", _peta(flops.executed_kernels), ""],
            [
                "executed, by iha_jax.training.flops",
                _peta(flops.accounted),
                f"{_ratio(flops.accounted, flops.executed)} of counted",
            ],
            ["all-global MHA twin, model", _peta(flops.twin_model), ""],
            ["all-global MHA twin, executed", _peta(flops.twin_accounted), ""],
        ],
    )
    lines += [
        f"model FLOPs are {flops.model / flops.twin_model:.3f} of the twin's by visible pairs, {flops.square:.3f} with "
        f"all T² pairs of global layers; executed {flops.executed / flops.twin_accounted:.3f}",
        "",
    ]
    rows = [
        [
            t.kind,
            " ".join(t.axes) or "none",
            *([_NAMES[t.network]] if plan.slices > 1 else []),
            f"{t.count:,}",
            f"{t.bytes / 1e9:.3f}",
            f"{t.seconds * 1e3:.2f}",
        ]
        for t in plan.collectives
    ]
    if rows:
        head = ["collectives of a step", "mesh axes", "over", "count", "GB/device", "ms at least"]
        lines += [*_table(head if plan.slices > 1 else [*head[:2], *head[3:]], rows), ""]
    moved = {name: sum(t.bytes for t in plan.collectives if t.network == name) for name in ("ici", "dcn")}
    lines += _table(
        ["bounds on a step", "ms", "from, on a device"],
        [
            ["matrix units", _milliseconds(limits.compute), f"{flops.executed / plan.devices / 1e12:.1f} TFLOP"],
            ["HBM", _milliseconds(limits.hbm), f"{(plan.hbm_traffic or 0) / 1e9:.1f} GB"],
            ["ICI", _milliseconds(limits.ici), f"{moved['ici'] / 1e9:.2f} GB of results"],
            *([["DCN", _milliseconds(limits.dcn), f"{moved['dcn'] / 1e9:.2f} GB of results"]] * (plan.slices > 1)),
        ],
    )
    lines.append(
        f"{_NAMES[limits.binds]} bind{'' if limits.binds == 'compute' else 's'}: at least {limits.step * 1e3:.1f} ms a "
        f"step, at most {plan.tokens_per_second:,.0f} tokens/s and {limits.mfu:.1%} MFU"
    )
    if plan.dollars_per_step is not None:
        lines.append(
            f"at least ${plan.dollars_per_step:.4f} a step, ${plan.dollars_per_step * 1e9 / plan.tokens:,.2f} a "
            f"billion tokens, ${plan.dollars_per_step * plan.steps:,.0f} for {plan.steps:,} steps"
        )
    return "\n".join(lines) + "\n"


def to_json(plans: Sequence[Plan]) -> str:
    """One object, or a list of them where several were tried."""
    found = [
        {
            **dataclasses.asdict(plan),
            "fits": plan.fits,
            "binds": plan.bounds and plan.bounds.binds,
            "step_seconds": plan.bounds and plan.bounds.step,
            "mfu": plan.bounds and plan.bounds.mfu,
        }
        for plan in plans
    ]
    return json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False) + "\n"


def compared(plans: Sequence[Plan]) -> str:
    """A table of plans, the best first: those that fit by their bound on tokens a second, then the others."""
    rows = []
    bounds = ["compute", "hbm", "ici", *(["dcn"] if any(plan.slices > 1 for plan in plans) else [])]
    for plan in sorted(plans, key=lambda p: (not p.fits, -(p.tokens_per_second or 0))):
        needed = plan.needed if plan.hbm is None else plan.hbm.total
        row = [
            describe_mesh(plan),
            f"{plan.batch_size}",
            f"{plan.micro_batches}",
            plan.remat,
            "?" if needed is None else f"{needed / 2**30:.1f}",
            "yes" if plan.fits else "no",
        ]
        if plan.bounds is not None:
            limits = plan.bounds
            row += [f"{1e3 * getattr(limits, name):.0f}" for name in bounds]
            row += [_NAMES[limits.binds], f"{limits.mfu:.1%}", f"{plan.tokens_per_second:,.0f}"]
        else:
            row += [""] * (len(bounds) + 3)
        row.append("" if plan.dollars_per_step is None else f"{plan.dollars_per_step * 1e9 / plan.tokens:,.2f}")
        rows.append(row)
    columns = {"compute": "MXU ms", "hbm": "HBM ms", "ici": "ICI ms", "dcn": "DCN ms"}
    head = ["mesh", "rows", "micro", "remat", "GiB", "fits", *(columns[name] for name in bounds)]
    head += ["binds", "MFU", "tokens/s", "$/Gtoken"]
    if all(not row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return "\n".join(_table(head, rows)) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    numbers = [all(row[i][:1].isdigit() or not row[i] for row in rows) for i in range(len(head))]

    def line(row: list[str]) -> str:
        cells = [x.rjust(w) if n else x.ljust(w) for x, w, n in zip(row, widths, numbers, strict=True)]
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * w for w in widths), *map(line, rows)]


def _peta(flops: float) -> str:
    return f"{flops / 1e15:.3f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.3f}"
