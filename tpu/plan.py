"""Plans a run on TPUs from a machine without one.

    python -m tpu.plan configs/paper_2b4.py --topology v5p:4x4x8
    python -m tpu.plan configs/paper_2b4.py --topology v6e:16x16 --mesh.fsdp 128 --mesh.context 2 --price 2.70
    python -m tpu.plan configs/paper_2b4.py --topology v5p:4x4x4 --slices 2 --mesh.replica 2
    python -m tpu.plan configs/small_124m.py --topology v5e:4x4 --search --batch 32 64 --remat dots full
    python -m tpu.plan configs/small_124m.py --topology v5e:4x4 --json > plan.json

The real train step is compiled by libtpu (`pip install libtpu`) for the slice; nothing is allocated. Values of the
configuration are overridden as for train.py (``--mesh.tensor 4``).
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from tpu.topology import check, prepare_environment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a Python file with a CONFIG, a config.json, or a run's directory")
    parser.add_argument("--topology", required=True, help='slice to compile for, "v5p:4x4x8"')
    parser.add_argument("--slices", type=int, default=1, help="slices of it; the mesh's replica goes over them (1)")
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="rows of a step; several with --search")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[], help="parts of a step; likewise")
    parser.add_argument("--remat", nargs="+", default=[], choices=["none", "dots", "full"], help="likewise")
    parser.add_argument("--price", type=float, help="dollars for a chip and hour")
    parser.add_argument("--search", action="store_true", help="try meshes, batches and remat; a table of them")
    parser.add_argument("--meshes", type=int, default=4, help="how many meshes a search compiles (4)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0 if something fits, 1 if nothing does, 2 for wrong arguments."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    for name in ("batch", "micro_batches", "remat"):
        if len(getattr(options, name)) > 1 and not options.search:
            parser.error(f"several values of --{name.replace('_', '-')} need --search, got {getattr(options, name)}")
    try:
        check(options.topology)
        prepare_environment()
        return _run(options, overrides)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    # jax reads the environment when it is imported.
    from iha_jax.training.cli import load, override
    from tpu.compiling import make_plan
    from tpu.report import compared, to_json, to_text
    from tpu.search import search, space_of

    config = override(load(options.config), overrides, options.config)
    if options.search:
        space = space_of(config, options.batch, options.micro_batches, options.remat, options.meshes)
        plans = search(
            config,
            options.topology,
            space,
            options.price,
            lambda text: print(text, file=sys.stderr),
            slices=options.slices,
        )
        print(to_json(plans) if options.json else compared(plans), end="")
        return 0 if any(plan.fits for plan in plans) else 1
    changes = {"batch_size": options.batch, "micro_batches": options.micro_batches}
    changes = {name: values[0] for name, values in changes.items() if values}
    model = dataclasses.replace(config.model, remat=options.remat[0]) if options.remat else config.model
    config = dataclasses.replace(config, model=model, **changes)
    plan = make_plan(config, options.topology, options.price, slices=options.slices)
    print(to_json([plan]) if options.json else to_text(plan), end="")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
