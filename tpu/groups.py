"""The devices that take part in a collective, in the notations of HLO."""

import math
import re

import numpy as np


def replica_groups(attributes: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of a collective, in any of HLO's three notations; all devices where none are given.

    Raises:
      ValueError: for a notation that is none of them.
    """
    found = re.search(r"replica_groups=(.*)", attributes)
    if found is None or found.group(1).startswith("{}"):
        return [tuple(range(devices))]
    given = found.group(1)
    if (named := re.match(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}", given)) is not None:
        return _groups_of_axes(*named.groups())
    if (compact := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", given)) is not None:
        return _rows(_arranged(compact.group(2)), _integers(compact.group(1)))
    if (listed := re.match(r"\{(?:\{[\d,]*\},?)+\}", given)) is not None:
        return [tuple(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", listed.group())]
    raise ValueError(
        f"replica_groups: expected {{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh['x'=2] {{'x'}}, got {given[:80]!r}"
    )


def _groups_of_axes(axes: str, ids: str | None, members: str) -> list[tuple[int, ...]]:
    """Groups along named axes of a mesh, or along parts of them: ``'x':(2)4`` is 4 parts, below 2 others."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    along = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", members)
    ]
    total = math.prod(sizes.values())
    positions = np.arange(total) if not ids else np.ravel(_arranged(ids) if ids[0] == "[" else _integers(ids))
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for before, part in sorted((before, part) for other, before, part in along if other == name):
            dims += [before // done, part]
            place[name, before] = len(dims) - 1
            done = before * part
        dims.append(size // done)
    inside = [place[name, before] for name, before, _ in along]
    outside = [axis for axis in range(len(dims)) if axis not in inside]
    return _rows(positions.reshape(dims).transpose(outside + inside), [-1, math.prod(dims[axis] for axis in inside)])


def _arranged(text: str) -> np.ndarray:
    """``[4,2]T(1,0)``: numbers from 0 in this shape, transposed."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text)
    assert match is not None
    shape = _integers(match.group(1))
    return np.arange(math.prod(shape)).reshape(shape).transpose(_integers(match.group(2)) if match.group(2) else None)


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(ids: np.ndarray, shape: list[int]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in ids.reshape(shape).tolist()]


def slices_of(attributes: str) -> tuple[int, ...] | None:
    """Slices, from 0, that exchange data over the data-centre network; None where the program does not say.

    It names slices from 1 and the devices in them that do this, ``"{1,2}x{0:3}"``.
    """
    found = re.search(r'_xla_megascale_target="\{([\d,:]+)\}x', attributes)
    if found is None:
        return None
    slices: list[int] = []
    for part in found.group(1).split(","):
        first, _, last = part.partition(":")
        slices += range(int(first) - 1, int(last or first))
    return tuple(slices)
