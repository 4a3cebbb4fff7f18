"""TPU slices by name, as devices to compile for on a machine that has none."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

# Shapes that can be rented, cloud.google.com/tpu/docs. Of the three-dimensional ones, larger slices are made of
# cubes of 4x4x4; the sizes named are the usual ones, and any multiples of 4 are accepted.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
_SLICES = {"v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT, "v7x": _CUBIC}
_LIBTPU_NAMES = {"v7x": "tpu7x"}


def prepare_environment() -> None:
    """Says that there is no TPU here; before jax is imported.

    Without the first variable libtpu asks a metadata server; without the last only one process could compile.
    """
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def check(name: str) -> tuple[str, tuple[int, ...]]:
    """Generation and shape of a slice called "v5p:4x4x8".

    Raises:
      ValueError: for anything else; all valid names are listed.
    """
    generation, _, shape = name.partition(":")
    sizes = tuple(int(n) for n in shape.split("x")) if shape.replace("x", "").isdigit() and "xx" not in shape else ()
    known = _SLICES.get(generation, ())
    pod = known is _CUBIC and len(sizes) == 3 and all(4 <= n <= 16 and n % 4 == 0 for n in sizes)
    if shape not in known and not pod:
        listed = "\n".join(f"  {name}: {' '.join(f'{name}:{s}' for s in shapes)}" for name, shapes in _SLICES.items())
        raise ValueError(
            f"unknown topology {name!r}; valid are\n{listed}\nand of v5p and v7x any AxBxC of multiples of 4 up to 16"
        )
    return generation, sizes


def devices_of(name: str, slices: int = 1) -> "Sequence[jax.Device]":
    """The devices of one or more equal slices, to compile for.

    Args:
      name: of a slice, "v5p:4x4x8".
      slices: how many, joined by the data-centre network.

    Raises:
      ValueError: if there is no such slice, or there are fewer than one.
      RuntimeError: if this machine's jax or libtpu cannot compile for it.
    """
    generation, sizes = check(name)
    if slices < 1:
        raise ValueError(f"slices must be at least 1, got {slices}")
    import jax
    from jax.experimental import topologies

    if jax.__version_info__ < (0, 8):
        raise RuntimeError(
            f"planning needs jax 0.8 or newer, got {jax.__version__}: the libtpu that belongs to it crashes when it "
            "compiles without a TPU"
        )
    label = f"{_LIBTPU_NAMES.get(generation, generation)}:{'x'.join(map(str, sizes))}"
    options: dict[str, Any] = {} if slices == 1 else {"num_slices": slices}
    if math.prod(sizes) < 4:  # a single chip is a host of its own
        options["chips_per_host_bounds"] = [*sizes, *[1] * (3 - len(sizes))]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=label, **options).devices
    except Exception as error:
        raise RuntimeError(
            f"libtpu has no topology {label} ({error}); is it installed (pip install libtpu), and new enough?"
        ) from error


def describe(name: str, slices: int) -> str:
    """In words: "v5p:4x4x8", or "2 slices of v5p:4x4x8"."""
    return name if slices == 1 else f"{slices} slices of {name}"


def torus(name: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Chips along every dimension of a slice, and whether its ends are joined.

    Three-dimensional slices are joined where they are made of whole cubes of 4x4x4; two-dimensional ones along a
    dimension of all 16 chips of a pod's side.
    """
    _, sizes = check(name)
    if len(sizes) == 3:
        return sizes, (all(n % 4 == 0 for n in sizes),) * 3
    return sizes, tuple(n == 16 for n in sizes)
