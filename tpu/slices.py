"""What the cloud calls a TPU slice: accelerator types, hosts, runtimes and Kubernetes labels.

A slice is written ``generation:topology`` ("v5e:4x4"), the topology counting chips.
"""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Generation:
    """A TPU generation as the cloud rents it.

    Attributes:
      accelerator: what accelerator types begin with.
      units_per_chip: by how much an accelerator type's number exceeds the chips: v5p counts TensorCores.
      runtime: image of its virtual machines (Ubuntu 22.04).
      label: value of the node label ``cloud.google.com/gke-tpu-accelerator``.
      machine: Compute Engine's machine type, up to the number of chips in it.
      largest_host: chips of the largest virtual machine; a slice of at most as many has one host.
      dimensions: of a topology.
    """

    accelerator: str
    units_per_chip: int
    runtime: str
    label: str
    machine: str
    largest_host: int
    dimensions: int


GENERATIONS = {
    "v5e": Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "ct5lp-hightpu", 8, 2),
    "v5p": Generation("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice", "ct5p-hightpu", 4, 3),
    "v6e": Generation("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice", "ct6e-standard", 8, 2),
}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
_CHIPS_PER_HOST = 4  # of a slice with several hosts, whatever the generation


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of TPU chips.

    Attributes:
      generation: "v5e", "v5p" or "v6e".
      topology: chips along every dimension, "4x4" or "2x2x4".

    Raises:
      ValueError: the cloud has no such slice.
    """

    generation: str
    topology: str

    def __post_init__(self):
        """Checks that it can be rented."""
        if self.generation not in GENERATIONS:
            raise ValueError(f"the TPU generation must be one of {', '.join(GENERATIONS)}, got {self.generation!r}")
        if self._facts.dimensions == 2:
            valid, known = self.topology in _FLAT, ", ".join(_FLAT)
        else:
            valid = self.topology in _SMALL_CUBES or self._is_of_cubes()
            known = ", ".join(_SMALL_CUBES) + ", and AxBxC in multiples of 4 with A <= B <= C"
        if not valid:
            raise ValueError(f"{self.generation} has the topologies {known}; got {self.topology!r}")

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """A slice from "v5e:4x4"."""
        generation, separator, topology = text.partition(":")
        if not separator:
            raise ValueError(f"a slice is written GENERATION:TOPOLOGY, v5e:4x4 for one; got {text!r}")
        return cls(generation, topology)

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return math.prod(int(n) for n in self.topology.split("x"))

    @property
    def accelerator_type(self) -> str:
        """The name that queued resources and ``gcluster`` use, "v5litepod-16"."""
        return f"{self._facts.accelerator}-{self.chips * self._facts.units_per_chip}"

    @property
    def runtime(self) -> str:
        """Image of the virtual machines."""
        return self._facts.runtime

    @property
    def hosts(self) -> int:
        """Virtual machines of a queued resource's slice."""
        return _hosts(self.generation, self.chips)

    @property
    def label(self) -> str:
        """Value of the node label ``cloud.google.com/gke-tpu-accelerator``."""
        return self._facts.label

    @property
    def chips_per_node(self) -> int:
        """Chips of one Kubernetes node; node pools here are of machines with 4 chips, or 1."""
        return min(self.chips, _CHIPS_PER_HOST)

    @property
    def nodes(self) -> int:
        """Kubernetes nodes of the slice: one pod on each."""
        return self.chips // self.chips_per_node

    @property
    def machine(self) -> str:
        """Machine type of a Kubernetes node."""
        return f"{self._facts.machine}-{self.chips_per_node}t"

    @property
    def _facts(self) -> Generation:
        return GENERATIONS[self.generation]

    def _is_of_cubes(self) -> bool:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", self.topology):
            return False
        sizes = [int(n) for n in self.topology.split("x")]
        return sizes == sorted(sizes) and all(n % 4 == 0 for n in sizes)


def describe_accelerator(accelerator_type: str) -> tuple[str, int]:
    """Generation and hosts of an accelerator type: ("v5e", 4) of "v5litepod-16".

    Raises:
      ValueError: for a type of another generation.
    """
    prefix, _, number = accelerator_type.rpartition("-")
    for name, facts in GENERATIONS.items():
        if prefix == facts.accelerator and number.isdigit():
            return name, _hosts(name, int(number) // facts.units_per_chip)
    known = ", ".join(f"{facts.accelerator}-N" for facts in GENERATIONS.values())
    raise ValueError(f"the accelerator type must be one of {known}, got {accelerator_type!r}")


def _hosts(generation: str, chips: int) -> int:
    return 1 if chips <= GENERATIONS[generation].largest_host else chips // _CHIPS_PER_HOST
