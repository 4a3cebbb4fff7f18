"""Compiles a run's real train step for a TPU slice and takes the figures from the program."""

import dataclasses
import math
import pathlib
import tempfile
import time

import jax

from iha_jax.models import MHAConfig
from iha_jax.training.config import TrainConfig
from iha_jax.training.flops import Account, Split, account
from iha_jax.training.hardware import memory_of, peak_flops
from iha_jax.training.memory import needed_bytes
from iha_jax.training.placement import Placement, mesh_shape
from iha_jax.training.program import StepProgram
from tpu import topology
from tpu.bounds import Bounds, Network, Traffic, bounds, traffic
from tpu.counts import count
from tpu.hlo import Module


@dataclasses.dataclass(frozen=True)
class HbmUse:
    """Bytes of one device's HBM.

    Attributes:
      arguments: parameters, optimizer state and the batch.
      outputs: results that do not take an argument's place.
      temporaries: the most that is alive at once between them.
      program: the machine code.
      capacity: what the device has.
    """

    arguments: int
    outputs: int
    temporaries: int
    program: int
    capacity: float

    @property
    def total(self) -> int:
        """What is needed."""
        return self.arguments + self.outputs + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a step, all devices together.

    Attributes:
      model: what the mathematics asks for (visible pairs, mixing and collapse).
      executed: counted from the compiled program: matrix products of XLA and of the kernels.
      executed_kernels: those of the kernels among them.
      accounted: what `iha_jax.training.flops` says is executed.
      twin_model: model FLOPs of the twin whose layers are all global MHA.
      twin_accounted: what is executed for the twin, by the same account.
      square: model FLOPs with all T² pairs of global layers counted, as the paper does, over the twin's.
    """

    model: float
    executed: float
    executed_kernels: float
    accounted: float
    twin_model: float
    twin_accounted: float
    square: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a step before a chip is rented.

    Attributes:
      name: of the configuration.
      topology: of a slice.
      slices: how many.
      chips: of all of them.
      devices: JAX devices of the mesh.
      mesh: axis → devices, those of 1 left out.
      batch_size: rows of a step.
      micro_batches: parts they are taken in.
      sequence_length: T.
      remat: what the backward pass recomputes.
      parameters: of the model.
      compile_seconds: spent compiling.
      error: why the compiler gave up (the program does not fit), or None; then what follows is None or empty.
      needed: bytes of HBM that the compiler says it would have needed, if it gave up and said so.
      hbm: memory of one device.
      flops: of a step.
      hbm_traffic: bytes to and from one device's HBM in a step.
      collectives: by kind, axes and network.
      bounds: on the step's time.
      steps: of the run.
      dollars_per_step: at the bound; None without a price.
    """

    name: str
    topology: str
    slices: int
    chips: int
    devices: int
    mesh: dict[str, int]
    batch_size: int
    micro_batches: int
    sequence_length: int
    remat: str
    parameters: int
    steps: int
    compile_seconds: float
    error: str | None = None
    needed: int | None = None
    hbm: HbmUse | None = None
    flops: Flops | None = None
    hbm_traffic: int | None = None
    collectives: tuple[Traffic, ...] = ()
    bounds: Bounds | None = None
    dollars_per_step: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the compiler placed everything, and it is no more than the device has."""
        return self.error is None and self.hbm is not None and self.hbm.total <= self.hbm.capacity

    @property
    def tokens(self) -> int:
        """Positions of a step."""
        return self.batch_size * self.sequence_length

    @property
    def tokens_per_second(self) -> float | None:
        """At the bound."""
        return None if self.bounds is None else self.tokens / self.bounds.step


def make_plan(config: TrainConfig, name: str, price: float | None = None, slices: int = 1) -> Plan:
    """Compiles the step for a slice, or several.

    Args:
      config: of the run; its mesh is over the devices of all slices.
      name: of the slice, "v5p:4x4x8".
      price: dollars for a chip and hour.
      slices: how many, joined by the data-centre network; the mesh's replica axis goes over them.

    Raises:
      ValueError: if there is no such slice, something does not divide on the mesh, or its replica axis is no multiple
        of the slices.
      RuntimeError: if this machine cannot compile for it.
    """
    config = dataclasses.replace(config, model=config.model.resolve())
    devices = topology.devices_of(name, slices)
    replicas = mesh_shape(config.mesh, len(devices))["replica"]
    if replicas % slices:
        raise ValueError(
            f"mesh.replica {replicas} cannot go over {slices} slices: it must be a multiple of --slices, since nothing "
            f"but sums of gradients is to cross the network between them; give --mesh.replica {slices}"
        )
    placement = Placement(config.mesh, devices=devices)
    placement.check(config)
    program = StepProgram(config, placement)
    mesh = placement.mesh
    assert mesh is not None
    sizes, joined = topology.torus(name)
    if mesh.devices.size != len(devices):
        raise ValueError(
            f"the mesh ({placement.describe()}) takes {mesh.devices.size} of the {len(devices)} devices of "
            f"{topology.describe(name, slices)}: it "
            "must take all, let one of its axes be -1"
        )
    begun = time.perf_counter()
    error, compiled, text = None, None, ""
    lowered = program.lower(program.state_shapes())
    try:
        compiled, text = compile_with_text(lowered)
    except jax.errors.JaxRuntimeError as raised:
        if "RESOURCE_EXHAUSTED" not in str(raised):
            raise
        error = str(raised)
    plan = Plan(
        name=config.name,
        topology=name,
        slices=slices,
        chips=math.prod(sizes) * slices,
        devices=mesh.devices.size,
        mesh={axis: size for axis, size in placement.sizes.items() if size > 1},
        batch_size=config.batch_size,
        micro_batches=config.micro_batches,
        sequence_length=config.data.sequence_length,
        remat=config.model.remat,
        parameters=program.num_parameters,
        steps=config.steps,
        compile_seconds=time.perf_counter() - begun,
    )
    if compiled is None:
        assert error is not None
        return dataclasses.replace(plan, error=error.splitlines()[0][:500], needed=needed_bytes(error))
    device = mesh.devices.flat[0]
    memory, peak = memory_of(device.device_kind), peak_flops(device)
    assert peak is not None
    counts = count(Module(text), placement.sizes, slices)
    flops = _flops(config, placement, counts.flops * plan.devices, counts.kernel_flops * plan.devices)
    network = Network(sizes, joined, memory.ici_bandwidth, memory.dcn_bandwidth)
    places = [device.coords for device in mesh.devices.flat]
    limits = bounds(
        counts, flops.model / plan.devices, peak, memory.hbm_bandwidth, network, lambda position: places[position]
    )
    used = compiled.memory_analysis()
    assert used is not None
    return dataclasses.replace(
        plan,
        hbm=HbmUse(
            arguments=used.argument_size_in_bytes,
            outputs=used.output_size_in_bytes - used.alias_size_in_bytes,
            temporaries=used.temp_size_in_bytes,
            program=used.generated_code_size_in_bytes,
            capacity=memory.hbm_bytes,
        ),
        flops=flops,
        hbm_traffic=counts.hbm_bytes,
        collectives=tuple(traffic(counts, network, lambda position: places[position])),
        bounds=limits,
        dollars_per_step=None if price is None else limits.step / 3600 * price * plan.chips,
    )


def compile_with_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program and its HLO, as the compiler itself writes it.

    `jax.stages.Compiled.as_text` goes through jaxlib's reader, and that of jax 0.10 refuses some of what newer TPU
    compilers make of large programs.

    Raises:
      RuntimeError: if the compiler wrote nothing.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_plan_") as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        written = sorted(pathlib.Path(folder).glob("*.after_optimizations.txt"), key=lambda path: path.stat().st_size)
        if not written:
            raise RuntimeError(f"the TPU compiler left no HLO in {folder}: is libtpu of the same age as jax?")
        return compiled, written[-1].read_text()


def _flops(config: TrainConfig, placement: Placement, executed: float, kernels: float) -> Flops:
    sizes, tokens = placement.sizes, config.data.sequence_length
    split = Split(sizes["replica"] * sizes["data"] * sizes["fsdp"], sizes["context"], sizes["tensor"])

    def accounted(model) -> Account:
        with placement.active():
            return account(model, config.micro_batch_size, tokens, fused=True, split=split)

    mine = accounted(config.model)
    twin = accounted(dataclasses.replace(config.model, pattern=("mha",), mha=MHAConfig(window=None)))
    step = config.tokens_per_step
    return Flops(
        model=mine.model_training_per_token * step,
        executed=executed,
        executed_kernels=kernels,
        accounted=mine.executed_training_per_token * step,
        twin_model=twin.model_training_per_token * step,
        twin_accounted=twin.executed_training_per_token * step,
        square=_with_squares(mine, config) / _with_squares(twin, config),
    )


def _with_squares(found: Account, config: TrainConfig) -> float:
    """Forward model FLOPs of a sequence, global plain layers charged all T² pairs."""
    total = float(found.logits)
    for entry in found.layers:
        total += entry.layers * entry.model.total
        if entry.kind != "iha" and config.model.window(entry.kind) is None:
            pairs = 2 * found.tokens**2 * config.model.num_heads * config.model.dim_per_head
            total += entry.layers * (2 * pairs - entry.model.scores - entry.model.values)
    return total
