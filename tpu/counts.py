"""What a compiled program does on one device in a step: matrix FLOPs, bytes to and from HBM, collectives.

XLA's own ``cost_analysis`` counts a loop's body once, whatever its trips; here every computation counts as often as
it runs.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from tpu.groups import replica_groups, slices_of
from tpu.hlo import Computation, Instruction, Module, Shape

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# What moves nothing by itself: names, views, control flow, and the second halves of asynchronous pairs.
_FREE = frozenset((
    *("parameter", "constant", "iota", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id"),
    *("while", "conditional", "call", "after-all", "opt-barrier", "add-dependency", "domain", "async-update"),
))  # fmt: skip
# Between slices the compiler leaves pairs of a `send` to the host and a `recv` from it; the runtime does the rest. By
# what it calls them:
_BETWEEN_SLICES = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_SLICING = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective as it stands in the program.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
      axes: mesh axes along which its devices differ.
      group: the mesh positions (see `numpy.ravel_multi_index`) of one of its groups; of a permutation, one pair.
      bytes: of its result on one device.
      count: how often it runs in a step.
      name: of the operation in the model that it comes from.
      between_slices: whether it goes over the data-centre network; else over the links of a slice.
    """

    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    bytes: int
    count: int
    name: str
    between_slices: bool = False

    @property
    def total_bytes(self) -> int:
        """Result bytes of a step."""
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class Counts:
    """One device's step.

    Attributes:
      matrix_flops: multiplications and additions of XLA's matrix products.
      kernel_flops: of Pallas kernels, as their cost estimates say (padding included).
      hbm_bytes: read and written. Operands in vector memory, views and in-place updates are free.
      collectives: all of them.
    """

    matrix_flops: int
    kernel_flops: int
    hbm_bytes: int
    collectives: tuple[Collective, ...]

    @property
    def flops(self) -> int:
        """Executed FLOPs."""
        return self.matrix_flops + self.kernel_flops


def count(module: Module, mesh: Mapping[str, int], slices: int = 1) -> Counts:
    """Counts a program.

    Args:
      module: compiled for one device of the mesh.
      mesh: name and size of its axes, in the order of its devices.
      slices: that the mesh's first axis goes over. A program numbers the devices of its own slice only.

    Raises:
      ValueError: for groups of devices, a loop or a transfer between slices in a notation not known here.
    """
    matrix_flops = kernel_flops = hbm_bytes = 0
    collectives: list[Collective] = []
    for computation, times in module.executed():
        chains: set[str] = set()
        for instruction in computation.instructions.values():
            flops, kernel = instruction_flops(module, computation, instruction)
            matrix_flops += times * flops
            kernel_flops += times * kernel
            hbm_bytes += times * instruction_bytes(module, computation, instruction)
            for where, found in _with_inner(module, computation, instruction):
                kind = found.opcode.removesuffix("-start")
                if kind == "recv" and (transfer := _transfer(found)) is not None:
                    collectives.append(_between_slices(found, transfer, mesh, slices, times))
                if kind not in _COLLECTIVES:
                    continue
                # An asynchronous collective may be spread over fusions; its pieces share a chain. (Not the channel:
                # collectives within shard_map all have the same.)
                chain = re.search(r'chain_id="(\d+)"', found.attributes)
                if chain is not None:
                    if chain.group(1) in chains:
                        continue
                    chains.add(chain.group(1))
                one = _collective(where, found, kind, mesh, slices, times)
                collectives.append(one)
                hbm_bytes += times * one.bytes * (where is not computation)
    return Counts(matrix_flops, kernel_flops, hbm_bytes, tuple(collectives))


def _with_inner(module: Module, computation: Computation, instruction: Instruction):
    yield computation, instruction
    for inner in module.inside(instruction):
        for found in inner.instructions.values():
            yield inner, found


def instruction_flops(module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
    """FLOPs of its matrix products, those fused into it included, and of the Pallas kernel that it is."""
    matrix = kernel = 0
    for where, found in _with_inner(module, computation, instruction):
        if found.opcode == "convolution":
            matrix += _convolution_flops(where, found)
        elif found.opcode == "dot":
            left = where.shapes(found.operands[0])[0]
            terms = math.prod(left.dims[axis] for axis in found.integers("lhs_contracting_dims"))
            matrix += 2 * terms * found.shapes[0].elements
        elif found.opcode == "custom-call":
            kernel += max(0, _estimate(found, "flops") or 0)
    return matrix, kernel


def _estimate(call: Instruction, name: str) -> int | None:
    match = re.search(rf'"cost_estimate":\{{[^}}]*"{name}":"?(-?\d+)', call.attributes)
    return None if match is None else int(match.group(1))


def _convolution_flops(computation: Computation, convolution: Instruction) -> int:
    """Products of the TPU backend are convolutions whose batch and contracted axes may be spatial ones."""
    left, right = (computation.shapes(name)[0].dims for name in convolution.operands[:2])
    out = convolution.shapes[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels is not None
    window = dict(
        re.findall(r"(\w+)=([\d_x\-]+)", (re.search(r"window=\{([^}]*)\}", convolution.attributes) or [""])[0])
    )
    spatial = [c for c in labels.group(3) if c.isdigit()]

    def option(name: str, axis: int, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    pairs = 1
    for axis, label in enumerate(sorted(spatial, key=int)):
        pad = int(option("pad", axis, "0_0").split("_")[0])
        outs = np.arange(out[labels.group(3).index(label)])[:, None]
        taps = np.arange(right[labels.group(2).index(label)])[None]
        dilate = int(option("lhs_dilate", axis, "1"))
        at = outs * int(option("stride", axis, "1")) + taps * int(option("rhs_dilate", axis, "1")) - pad
        inputs = left[labels.group(1).index(label)]
        pairs *= int(((at % dilate == 0) & (at >= 0) & (at < inputs * dilate)).sum())
    features = right[labels.group(2).index("i")]
    rows, columns = out[labels.group(3).index("b")], out[labels.group(3).index("f")]
    return 2 * features * rows * columns * pairs


def instruction_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that it reads from and writes to HBM."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    operands = [shape for name in instruction.operands for shape in computation.shapes(name)]
    results = instruction.shapes
    if opcode == "copy-start":  # (destination, source, context), one of them usually on chip
        return _in_hbm(results[:2])
    if opcode == "slice-start":  # ((sources), destination, context)
        source, moved = results[0], results[1]
        return moved.bytes * ((not source.on_chip) + (not moved.on_chip))
    if opcode.removesuffix("-start") in _COLLECTIVES:
        return _in_hbm(operands) + _in_hbm(_result(instruction))
    if opcode == "send":
        return _in_hbm(operands)
    if opcode == "recv":
        return _in_hbm(results[:1])
    if opcode == "fusion":
        return _fusion_bytes(computation, instruction, module)
    if opcode == "custom-call":
        estimate = _estimate(instruction, "bytes_accessed")
        return _in_hbm([*operands, *results]) if estimate is None else max(0, estimate)
    if opcode in _SLICING:
        return 2 * _in_hbm(results)
    if opcode == "dynamic-update-slice":
        return 2 * _in_hbm(operands[1:2])
    return _in_hbm([*operands, *results])


def _in_hbm(shapes) -> int:
    return sum(shape.bytes for shape in shapes if not shape.on_chip)


def _fusion_bytes(computation: Computation, fusion: Instruction, module: Module) -> int:
    fused = module.computations[fusion.called["calls"][0]]
    total = 0
    for parameter, name in zip(fused.parameters, fusion.operands, strict=True):
        outer = computation.shapes(name)
        if not all(shape.on_chip for shape in outer):
            total += min(_read(fused, parameter.name, module), _in_hbm(outer))
    roots = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    shapes = iter(fusion.shapes)
    for name in roots:
        mine = [next(shapes) for _ in fused.shapes(name)]
        written = _written(fused, name, module)
        total += min(_in_hbm(mine), written)
    return total


def _read(fused: Computation, name: str, module: Module) -> int:
    """Bytes of a parameter that the fusion reads: slices of it where only slices are used."""
    whole, total = sum(shape.bytes for shape in fused.shapes(name)), 0
    for user in fused.users(name):
        kind = user.opcode.removesuffix("-start")
        if kind in _COLLECTIVES or user.opcode in ("tuple", "custom-call"):
            continue  # passed on; a collective counts for itself
        if user.opcode in _SLICING and user.operands[0] == name:
            total += user.shapes[0].bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        elif user.opcode in ("bitcast", "get-tuple-element", "reshape"):
            total += _read(fused, user.name, module)
        elif user.opcode == "fusion":
            inner = module.computations[user.called["calls"][0]]
            for parameter, operand in zip(inner.parameters, user.operands, strict=True):
                total += _read(inner, parameter.name, module) if operand == name else 0
        else:
            return whole
    return min(whole, total)


def _written(fused: Computation, name: str, module: Module) -> int:
    """Bytes of a result that the fusion writes: the update where it is an update in place."""
    made = fused.instructions[name]
    whole = sum(shape.bytes for shape in made.shapes)
    if made.opcode == "parameter" or made.opcode.removesuffix("-start") in _COLLECTIVES:
        return 0
    if made.opcode == "dynamic-update-slice":
        return fused.shapes(made.operands[1])[0].bytes
    if made.opcode in ("bitcast", "get-tuple-element", "reshape"):
        return min(whole, _written(fused, made.operands[0], module))
    if made.opcode == "fusion":
        inner = module.computations[made.called["calls"][0]]
        if inner.root.opcode != "tuple":
            return _written(inner, inner.root.name, module)
    return whole


def _result(instruction: Instruction) -> tuple[Shape, ...]:
    """Of a collective: without the operand and the flags that asynchronous starts also return."""
    if not instruction.opcode.endswith("-start") or len(instruction.shapes) == 1:
        return instruction.shapes
    if instruction.opcode.startswith("all-reduce"):
        return instruction.shapes
    arrays = [shape for shape in instruction.shapes if shape.dims or not shape.on_chip]
    half = len(instruction.operands)
    return tuple(arrays[half : 2 * half])


def _collective(
    computation: Computation,
    instruction: Instruction,
    kind: str,
    mesh: Mapping[str, int],
    slices: int,
    times: int,
) -> Collective:
    result = sum(shape.bytes for shape in _result(instruction))
    group, axes = _group(instruction, mesh, slices)
    if kind == "all-reduce" and _scattered(computation, instruction):
        kind, result = "reduce-scatter", computation.root.shapes[0].bytes
    return Collective(kind, axes, group, result, times, _model_name(instruction))


def _transfer(instruction: Instruction) -> str | None:
    """What the runtime does between slices with what a host sends and receives; None if it is no such thing."""
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if match is None:
        return None
    if match.group(1) not in _BETWEEN_SLICES:
        raise ValueError(f"transfer between slices: expected one of {sorted(_BETWEEN_SLICES)}, got {match.group(1)!r}")
    return _BETWEEN_SLICES[match.group(1)]


def _between_slices(
    instruction: Instruction, kind: str, mesh: Mapping[str, int], slices: int, times: int
) -> Collective:
    """The collective whose result a ``recv`` takes. Where its slices are not said there are two, the fewest."""
    size = math.prod(mesh.values()) // slices
    group = tuple(number * size for number in slices_of(instruction.attributes) or (0, 1))
    name = _model_name(instruction)
    return Collective(kind, (next(iter(mesh)),), group, instruction.shapes[0].bytes, times, name, between_slices=True)


def _model_name(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return "" if match is None else match.group(1)


def _scattered(computation: Computation, instruction: Instruction) -> bool:
    """Whether a fusion keeps only this device's slice of the sum."""
    root = computation.root
    while root.opcode in ("bitcast", "reshape", "copy"):
        root = computation.instructions[root.operands[0]]
    return root.opcode == "dynamic-slice" and root.operands[0] == instruction.name


def _group(instruction: Instruction, mesh: Mapping[str, int], slices: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """One group of devices, and the axes along which they differ."""
    sizes = tuple(mesh.values())
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
    groups = replica_groups(instruction.attributes, math.prod(sizes) // slices)
    if pairs is not None:
        found = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))]
        groups = [pair for pair in found if pair[0] != pair[1]] or [(0,)]
    differing = set()
    for group in groups:
        positions = np.stack(np.unravel_index(np.asarray(group), sizes))
        differing |= {axis for axis, row in zip(mesh, positions, strict=True) if len(set(row.tolist())) > 1}
    return groups[0], tuple(axis for axis in mesh if axis in differing)
