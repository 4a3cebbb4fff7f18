"""Reads compiled HLO text: computations, instructions, shapes, and how often each runs.

The text is what `jax.stages.Compiled.as_text` prints: one device's program, scheduled. Nothing here needs jax.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "f4e2m1fn": 4}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = ("calls", "body", "condition", "to_apply", "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array.

    Attributes:
      dtype: as HLO writes it, "bf16" for one.
      dims: sizes.
      on_chip: whether it lives in another memory than HBM (vector or scalar memory).
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def elements(self) -> int:
        """Their number."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without the padding of tiled layouts."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            if digits is None:
                raise ValueError(
                    f"unknown HLO type {self.dtype!r}: expected one of {sorted(_BITS)}, or f32, s8 and so on"
                )
            bits = int(digits.group(1))
        return -(-self.elements * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: without the percent sign.
      shapes: of its results, a tuple's one after the other.
      sizes: how many of these each element of the tuple has.
      opcode: "fusion" for one.
      operands: names.
      literal: what stands between the parentheses.
      attributes: the rest of the line.
      root: whether it is its computation's result.
    """

    name: str
    shapes: tuple[Shape, ...]
    sizes: tuple[int, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """Names of the computations it calls, by attribute."""
        found = {}
        for name in _CALLED:
            match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
            if match is not None:
                found[name] = [match.group(1)]
        match = re.search(r"\bbranch_computations=\{([^}]*)\}", self.attributes)
        if match is not None:
            found["branch_computations"] = re.findall(r"[\w.\-]+", match.group(1))
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute ``name={1,2}`` or ``name=1``; empty if absent."""
        match = re.search(rf"\b{name}=(?:\{{([\d,]*)\}}|(\d+))", self.attributes)
        if match is None:
            return ()
        return tuple(int(n) for n in (match.group(1) or match.group(2) or "").split(",") if n)


class Computation:
    """A computation's instructions, in order.

    Attributes:
      name: of it.
      instructions: name → instruction.
      root: the result.
    """

    def __init__(self, name: str, instructions: dict[str, Instruction]):
        self.name = name
        self.instructions = instructions
        self.root = next((i for i in instructions.values() if i.root), list(instructions.values())[-1])

    def users(self, name: str) -> list[Instruction]:
        """Instructions that read another one's result."""
        return self._users.get(name, [])

    def shapes(self, name: str) -> tuple[Shape, ...]:
        """Of an instruction's results."""
        return self.instructions[name].shapes

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """In the order of the call's operands."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users


class Module:
    """A compiled program.

    Attributes:
      computations: name → computation.
      entry: the one that runs.
    """

    def __init__(self, text: str):
        """Parses it.

        Raises:
          ValueError: if there is no entry computation: this is no HLO text.
        """
        self.computations: dict[str, Computation] = {}
        entry = None
        name, instructions = "", {}
        for line in text.splitlines():
            if line.startswith("}"):
                if instructions:
                    self.computations[name] = Computation(name, instructions)
                instructions = {}
            elif line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
                match = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
                assert match is not None
                name = match.group(2)
                entry = name if match.group(1) else entry
            elif line.startswith(" ") and " = " in line:
                instruction = _instruction(line)
                for element in (*_elements_read(instruction, instructions), instruction):
                    instructions[element.name] = element
        if entry is None:
            raise ValueError(f"expected the text of a compiled HLO module, with an ENTRY, got {text[:80]!r}")
        self.entry = self.computations[entry]

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """Every computation that runs as a whole (not inside a fusion) and how many times, loops multiplied out.

        Of a conditional's branches only one is taken: that with the most products, and of equals the longest.
        """
        yield from self._walk(self.entry, 1)

    def _walk(self, computation: Computation, times: int) -> Iterator[tuple[Computation, int]]:
        yield computation, times
        for instruction in computation.instructions.values():
            called = instruction.called
            if instruction.opcode == "while":
                yield from self._walk(
                    self.computations[called["body"][0]], times * self.trips(computation, instruction)
                )
            elif instruction.opcode == "conditional":
                branches = [self.computations[n] for names in called.values() for n in names]
                yield from self._walk(max(branches, key=self._size), times)
            elif instruction.opcode == "call":
                yield from self._walk(self.computations[called["to_apply"][0]], times)

    def _size(self, computation: Computation) -> tuple[int, int]:
        """Matrix products and kernels in it, and instructions; what it calls included."""
        found = list(computation.instructions.values())
        inner = [self._size(self.computations[n]) for i in found for names in i.called.values() for n in names]
        products = sum(i.opcode in ("dot", "convolution", "custom-call") for i in found)
        return products + sum(p for p, _ in inner), len(found) + sum(n for _, n in inner)

    def inside(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations fused into an instruction, one after the other."""
        if instruction.opcode not in ("fusion", "async-start"):
            return
        for name in instruction.called.get("calls", []):
            computation = self.computations[name]
            yield computation
            for inner in computation.instructions.values():
                yield from self.inside(inner)

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """How often a ``while`` runs.

        Args:
          computation: that the loop is in.
          loop: the instruction.

        Raises:
          ValueError: if its condition is no comparison of a counter with a constant.
        """
        match = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if match is not None:
            return int(match.group(1))
        condition = self.computations[loop.called["condition"][0]]
        root = self._through_fusion(condition, condition.root)
        if root is not None:
            compare, constants, index = root
            limits = [value for value in constants if value is not None]
            if index is not None and len(limits) == 1 and (d := re.search(r"direction=(\w\w)", compare.attributes)):
                start = self._initial(computation, loop, index)
                step = self._step(loop, index)
                extra = {"LT": 0, "GT": 0, "NE": 0, "LE": 1, "GE": 1}.get(d.group(1))
                if extra is not None and start is not None and step:
                    return max(0, -(-(abs(limits[0] - start) + extra) // step))
        raise ValueError(f"loop {loop.name}: cannot tell its trips from {condition.root.name}, {condition.root.opcode}")

    def _through_fusion(self, outer: Computation, root: Instruction):
        """The comparison, its constant operands, and which element of the loop's tuple the counter is."""
        values: dict[str, tuple[int | None, int | None]] = {}

        def resolve(c: Computation, name: str) -> tuple[int | None, int | None]:
            i = c.instructions[name]
            if i.opcode == "constant":
                return (int(i.literal), None) if re.fullmatch(r"-?\d+", i.literal) else (None, None)
            if i.opcode == "get-tuple-element":
                return None, i.integers("index")[0]
            if i.opcode in ("copy", "bitcast", "convert"):
                return resolve(c, i.operands[0])
            return values.get(name, (None, None))

        computation = outer
        if root.opcode == "fusion":
            computation = self.computations[root.called["calls"][0]]
            for parameter, name in zip(computation.parameters, root.operands, strict=True):
                values[parameter.name] = resolve(outer, name)
            root = computation.root
        if root.opcode != "compare":
            return None
        found = [resolve(computation, name) for name in root.operands]
        return root, [value for value, _ in found], next((i for _, i in found if i is not None), None)

    def _initial(self, computation: Computation, loop: Instruction, index: int) -> int | None:
        start = computation.instructions[loop.operands[0]]
        if start.opcode == "tuple":
            start = computation.instructions[start.operands[index]]
            while start.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
                start = computation.instructions[start.operands[0]]
            if start.opcode == "constant":
                return int(start.literal)
            if start.opcode == "broadcast":
                inner = computation.instructions[start.operands[0]]
                return int(inner.literal) if inner.opcode == "constant" else None
        return None

    def _step(self, loop: Instruction, index: int) -> int | None:
        body = self.computations[loop.called["body"][0]]
        if body.root.opcode != "tuple":
            return None
        name = body.root.operands[index]
        while body.instructions[name].opcode in ("copy", "bitcast"):
            name = body.instructions[name].operands[0]
        added, computation, outer = body.instructions[name], body, None
        if added.opcode == "fusion":
            outer, computation = added, self.computations[added.called["calls"][0]]
            added = computation.root
        if added.opcode not in ("add", "subtract"):
            return None
        for operand in added.operands:
            i = computation.instructions[operand]
            if i.opcode == "parameter" and outer is not None:
                i = body.instructions[outer.operands[int(i.literal)]]
            if i.opcode == "constant":
                return abs(int(i.literal))
        return None


def _instruction(line: str) -> Instruction:
    head, rest = line.strip().split(" = ", 1)
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    literal = rest[opening + 1 : closing - 1]
    return Instruction(
        name=head.removeprefix("ROOT ").lstrip("%"),
        shapes=tuple(
            Shape(dtype, tuple(int(n) for n in dims.split(",") if n), bool(re.search(r"S\([1-9]", layout or "")))
            for dtype, dims, layout in _ARRAY.findall(kind)
        ),
        sizes=tuple(len(_ARRAY.findall(element)) for element in _elements(kind)),
        opcode=rest[:opening],
        operands=tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", literal)),
        literal=literal,
        attributes=rest[closing:],
        root=head.startswith("ROOT "),
    )


def _elements_read(instruction: Instruction, before: dict[str, Instruction]) -> list[Instruction]:
    """The elements of tuples that it names as ``%tuple#1``, as instructions of their own.

    jaxlib 0.12 prints programs so; before it each element had a get-tuple-element.
    """
    found = []
    for name in dict.fromkeys(instruction.operands):
        producer, _, index = name.partition("#")
        if index and name not in before:
            made = before[producer]
            start = sum(made.sizes[: int(index)])
            shapes = made.shapes[start : start + made.sizes[int(index)]]
            found.append(
                Instruction(
                    name=name,
                    shapes=shapes,
                    sizes=(len(shapes),),
                    opcode="get-tuple-element",
                    operands=(producer,),
                    literal=f"%{producer}",
                    attributes=f", index={index}",
                    root=False,
                )
            )
    return found


def _elements(kind: str) -> list[str]:
    """The types in a tuple's type; a type that is no tuple's is its own only element."""
    if not kind.startswith("("):
        return [kind]
    elements, depth = [""], 0
    for character in kind[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _closing(text: str, start: int) -> int:
    """Just behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.end()
    raise ValueError(f"unbalanced parentheses in HLO: {text[start : start + 80]!r}")
