"""What a step must take at least: matrix units, HBM and the networks between chips, each at its published peak.

Bounds, not predictions: everything is taken to overlap, kernels to run at the matrix units' peak, and collectives over
different mesh axes not to meet on a link.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from tpu.counts import Collective, Counts

Coordinates = Callable[[int], Sequence[int]]
"""From a device's position in the mesh to its chip's place in the torus."""


@dataclasses.dataclass(frozen=True)
class Network:
    """What collectives run on: the torus of a slice, and the data-centre network between slices.

    Attributes:
      sizes: chips of a slice along every dimension.
      joined: whether the ends of a dimension are joined.
      bandwidth: bytes per second of a link in one direction.
      dcn_bandwidth: bytes per second of a device to other slices in one direction.
    """

    sizes: tuple[int, ...]
    joined: tuple[bool, ...]
    bandwidth: float
    dcn_bandwidth: float


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds of a step, at least.

    Attributes:
      compute: executed FLOPs at the matrix peak.
      hbm: bytes to and from HBM.
      ici: collectives within a slice, one after the other.
      dcn: those between slices, likewise.
      model: model FLOPs at the matrix peak.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    model: float

    @property
    def step(self) -> float:
        """The largest of the four."""
        return max(self.compute, self.hbm, self.ici, self.dcn)

    @property
    def binds(self) -> str:
        """Which one that is."""
        return max(("compute", "hbm", "ici", "dcn"), key=lambda name: getattr(self, name))

    @property
    def mfu(self) -> float:
        """Share of the peak that model FLOPs reach at the bound."""
        return self.model / self.step


def bounds(
    counts: Counts,
    model_flops: float,
    peak: float,
    hbm_bandwidth: float,
    network: Network,
    coordinates: Coordinates,
) -> Bounds:
    """Bounds on a step.

    Args:
      counts: of one device's program.
      model_flops: of a step, one device's share.
      peak: dense bfloat16 FLOP/s of a device.
      hbm_bandwidth: bytes per second.
      network: between the chips.
      coordinates: of the mesh's devices.
    """
    ici, dcn = (
        sum(c.count * seconds(c, network, coordinates) for c in counts.collectives if c.between_slices == between)
        for between in (False, True)
    )
    return Bounds(
        compute=counts.flops / peak,
        hbm=counts.hbm_bytes / hbm_bandwidth,
        ici=ici,
        dcn=dcn,
        model=model_flops / peak,
    )


def seconds(collective: Collective, network: Network, coordinates: Coordinates) -> float:
    """One run of a collective, if its group has its links to itself.

    Every device must receive what it has not (twice, where sums are formed everywhere) through the links that lead into
    the group: two for every dimension it spans as a ring, one where it is an open line. The halves of an all-to-all
    cross the group's narrowest cut. Between slices a device has one link, its share of its host's network cards.
    """
    if collective.between_slices:
        return _missing(collective) / network.dcn_bandwidth
    size = len(collective.group)
    places = [tuple(coordinates(position)) for position in collective.group]
    spans = [sorted({place[axis] for place in places}) for axis in range(len(network.sizes))]
    links = 0
    for axis, span in enumerate(spans):
        if len(span) > 1:
            whole = len(span) == network.sizes[axis]
            links += 2 if whole and network.joined[axis] and len(span) > 2 else 1
    if size == 1 or links == 0:  # one chip's two cores
        return 0.0
    if collective.kind == "collective-permute":
        return collective.bytes / network.bandwidth
    if collective.kind == "all-to-all":
        longest = max(map(len, spans))
        return max(_missing(collective) / links, collective.bytes * longest / 8) / network.bandwidth
    return _missing(collective) / (links * network.bandwidth)


def _missing(collective: Collective) -> float:
    """Bytes that every device of the group must receive."""
    size = len(collective.group)
    share = (size - 1) / size
    return {
        "all-gather": collective.bytes * share,
        "reduce-scatter": collective.bytes * (size - 1),
        "all-reduce": 2 * collective.bytes * share,
        "all-to-all": collective.bytes * share,
        "collective-permute": float(collective.bytes),
    }[collective.kind]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind along the same mesh axes.

    Attributes:
      kind: of them.
      axes: of the mesh.
      count: how many run in a step.
      bytes: of their results on one device in a step.
      seconds: at least.
      network: "ici", the links of a slice, or "dcn", the data-centre network between slices.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    network: str


def traffic(counts: Counts, network: Network, coordinates: Coordinates) -> list[Traffic]:
    """Collectives by kind, axes and network, the slowest first."""
    grouped: dict[tuple[str, tuple[str, ...], str], list[Collective]] = collections.defaultdict(list)
    for found in counts.collectives:
        grouped[found.kind, found.axes, "dcn" if found.between_slices else "ici"].append(found)
    rows = [
        Traffic(
            kind,
            axes,
            sum(c.count for c in group),
            sum(c.total_bytes for c in group),
            math.fsum(c.count * seconds(c, network, coordinates) for c in group),
            over,
        )
        for (kind, axes, over), group in grouped.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)
