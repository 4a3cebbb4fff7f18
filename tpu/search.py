"""Tries meshes, batches and rematerialisation on a slice."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from iha_jax.training.config import MeshConfig, TrainConfig
from tpu import topology
from tpu.compiling import Plan, make_plan

_LEAST_WORK_FIRST = ("none", "dots", "full")
_SLOWER = 50  # The links of a chip carry 32 (v6e) to 96 (v5p) times what it may send to other slices.


@dataclasses.dataclass(frozen=True)
class Space:
    """What to try.

    Attributes:
      batch_sizes: rows of a step.
      micro_batches: parts of it.
      remats: what the backward pass recomputes.
      meshes: how many meshes are compiled, the most promising ones.
    """

    batch_sizes: tuple[int, ...]
    micro_batches: tuple[int, ...]
    remats: tuple[str, ...]
    meshes: int


def search(
    config: TrainConfig,
    name: str,
    space: Space,
    price: float | None,
    tell: Callable[[str], None],
    slices: int = 1,
) -> list[Plan]:
    """Compiles the most promising meshes.

    Of every mesh and batch the variants are tried in the order of the work they add, until one fits: those after it
    would only be slower.

    Args:
      config: of the run; mesh, batch and remat are replaced.
      name: of the slice.
      space: what to try.
      price: dollars for a chip and hour.
      tell: hears about progress.
      slices: how many; the replica axis of every mesh goes over them, and nothing else does.

    Raises:
      ValueError: if no mesh divides the model and batch.
    """
    devices = len(topology.devices_of(name, slices))
    plans = []
    for batch_size in space.batch_sizes:
        variants = [
            (remat, parts)
            for remat, parts in itertools.product(
                sorted(space.remats, key=_LEAST_WORK_FIRST.index), space.micro_batches
            )
            if batch_size % parts == 0
        ]
        ranked = rank(config, batch_size, min(space.micro_batches), devices, slices)
        if not ranked:
            tell(f"no mesh over {devices} devices divides {batch_size} rows and the model")
        for mesh in ranked[: space.meshes]:
            for remat, parts in variants:
                tried = dataclasses.replace(
                    config,
                    batch_size=batch_size,
                    micro_batches=parts,
                    mesh=mesh,
                    model=dataclasses.replace(config.model, remat=remat),
                )
                try:
                    plan = make_plan(tried, name, price, slices)
                except ValueError as reason:
                    tell(f"left out: {reason}")
                    continue
                plans.append(plan)
                said = "does not fit" if not plan.fits or plan.bounds is None else f"{plan.bounds.step * 1e3:.0f} ms"
                tell(f"{plan.mesh} rows {batch_size} micro {parts} remat {remat}: {said}")
                if plan.fits:
                    break
    if not plans:
        where = topology.describe(name, slices)
        raise ValueError(f"nothing to try on {where}: no mesh divides the model and the batches {space.batch_sizes}")
    return plans


def rank(config: TrainConfig, batch_size: int, micro_batches: int, devices: int, slices: int = 1) -> list[MeshConfig]:
    """Meshes that divide the model and the batch, those that move the fewest bytes first.

    Args:
      config: of the run.
      batch_size: rows of a step.
      micro_batches: parts of it.
      devices: to arrange, of all slices.
      slices: that the replica axis goes over.
    """
    model, tokens = config.model, config.data.sequence_length
    rows = batch_size // micro_batches
    found = []
    for data, fsdp, context, tensor in _factors(devices // slices, 4):
        divides = (
            rows % (slices * data * fsdp) == 0
            and tokens % context == 0
            and model.model_dim % fsdp == 0
            and model.num_heads % tensor == 0
            and model.hidden_dim % tensor == 0
            and model.vocab_size % tensor == 0
        )
        if divides:
            found.append(MeshConfig(replica=slices, data=data, fsdp=fsdp, context=context, tensor=tensor))
    return sorted(found, key=lambda mesh: bytes_moved(config, batch_size, micro_batches, mesh))


def bytes_moved(config: TrainConfig, batch_size: int, micro_batches: int, mesh: MeshConfig) -> float:
    """A rough count of what one device receives in a step, to decide what is worth compiling.

    Parameters are gathered in bfloat16 forward and backward and their gradients scattered, for every micro-batch;
    copies of them are summed in float32. Split heads gather base heads of the IHA layers and sum the outputs of both
    halves of every layer; split sequences gather keys and values of the global layers. Backward costs as much again.
    Gradients are summed over slices, too, where a byte takes so much longer that it counts as many.
    """
    model = config.model
    matrices = 4 * model.model_dim * model.num_heads * model.dim_per_head + 2 * model.model_dim * model.hidden_dim
    parameters = model.num_layers * matrices + model.vocab_size * model.model_dim
    rows = batch_size / (mesh.replica * mesh.data * mesh.fsdp)
    stream = 2 * rows * config.data.sequence_length / mesh.context * model.model_dim

    def missing(parts: int) -> float:
        return (parts - 1) / parts

    moved = 3 * 2 * micro_batches * parameters / mesh.tensor * missing(mesh.fsdp)
    moved += 2 * 4 * parameters / (mesh.fsdp * mesh.tensor) * missing(mesh.data)
    moved += _SLOWER * 2 * 4 * parameters / (mesh.fsdp * mesh.tensor) * missing(mesh.replica)
    iha = model.layer_kinds.count("iha")
    moved += 2 * stream * missing(mesh.tensor) * (4 * model.num_layers + 3 * iha)
    wide = sum(model.window(kind) is None for kind in model.layer_kinds)
    moved += 2 * 2 * stream * mesh.context / mesh.tensor * missing(mesh.context) * wide
    return moved


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def space_of(config: TrainConfig, batches: Sequence[int], parts: Sequence[int], remats: Sequence[str], meshes: int):
    """The space that options span; what is not given is the configuration's, of remat everything.

    Raises:
      ValueError: for numbers below 1.
    """
    space = Space(
        batch_sizes=tuple(batches) or (config.batch_size,),
        micro_batches=tuple(sorted(parts)) or (config.micro_batches,),
        remats=tuple(remats) or _LEAST_WORK_FIRST,
        meshes=meshes,
    )
    if min(*space.batch_sizes, *space.micro_batches, meshes) < 1 or math.inf in space.batch_sizes:
        raise ValueError(f"rows, micro-batches and meshes must be at least 1, got {space}")
    return space
