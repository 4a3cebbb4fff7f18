"""The configuration of a training run: frozen dataclasses, checked together, derived in properties."""

import dataclasses
import math
import pathlib
from typing import Literal

from iha_jax.data.config import DataConfig
from iha_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters chosen by path, with a learning rate and decay of their own.

    Attributes:
      pattern: regular expression, searched in the parameter's path ("layers.3.attention.mixing_query").
      lr_multiplier: factor of the learning rate (and, with it, of the decay).
      weight_decay: whether they are decayed.
    """

    pattern: str
    lr_multiplier: float = 1.0
    weight_decay: bool = True


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for the matrices and AdamW for the rest; warm-up, then cosine to a floor.

    Norms, biases, mixing and collapse tensors are never decayed, embeddings and matrices are. The schedule
    counts optimizer steps, whatever the number of micro-batches.

    Attributes:
      name: "adamw", or "muon" (matrices by Muon; embeddings, norms, biases and mixing stay with AdamW).
      peak_lr: learning rate after the warm-up.
      final_lr: learning rate at the end of the cosine.
      warmup_steps: optimizer steps of linear warm-up from 0.
      decay_steps: optimizer step at which the cosine reaches final_lr; None, the run's last.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      eps: added to Adam's denominator.
      weight_decay: decoupled, multiplied by the learning rate.
      clip_norm: largest global norm of the gradient; None, no clipping.
      mixing_lr_multiplier: factor of the learning rate of the mixing and collapse tensors.
      muon_beta: momentum of Muon.
      groups: exceptions by path, the first that matches wins; before the rules above.
    """

    name: Literal["adamw", "muon"] = "adamw"
    peak_lr: float = 8e-4
    final_lr: float = 8e-6
    warmup_steps: int = 1000
    decay_steps: int | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    mixing_lr_multiplier: float = 1.0
    muon_beta: float = 0.95
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self):
        """Checks ranges."""
        if not 0 <= self.final_lr <= self.peak_lr:
            raise ValueError(
                f"optimizer.final_lr must be in [0, peak_lr], got {self.final_lr} with peak_lr {self.peak_lr}"
            )
        for name in ("b1", "b2", "muon_beta"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm must be positive or None, got {self.clip_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps must be at least 0, got {self.warmup_steps}")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Attributes:
      every: optimizer steps between checkpoints; the last step is always saved.
      keep: how many of the newest stay.
      keep_best: how many of those with the lowest held-out loss stay besides.
      asynchronous: write in the background while training goes on.
    """

    every: int = 1000
    keep: int = 3
    keep_best: int = 1
    asynchronous: bool = True

    def __post_init__(self):
        """Checks ranges."""
        if self.every < 1 or self.keep < 1 or self.keep_best < 0:
            raise ValueError(
                "checkpoint.every and keep must be at least 1 and keep_best at least 0, "
                f"got {self.every}, {self.keep}, {self.keep_best}"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The held-out loss.

    Attributes:
      every: optimizer steps between evaluations; there is always one at the end.
      rows: rows of the held-out split in each; None, all.
      final_rows: the same for the one at the end.
      batch_size: rows at a time; None, those of a training micro-batch. The loss doesn't depend on it.
    """

    every: int = 1000
    rows: int | None = 256
    final_rows: int | None = None
    batch_size: int | None = None

    def __post_init__(self):
        """Checks ranges."""
        if self.every < 1:
            raise ValueError(f"evaluation.every must be at least 1, got {self.every}")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is reported, and where.

    Attributes:
      every: optimizer steps between lines of ``metrics.jsonl``.
      progress: a progress bar where the output is a terminal.
      tensorboard: also write TensorBoard events (needs tensorboardX).
      profile_start: first optimizer step of an XProf trace; None, no trace.
      profile_steps: optimizer steps traced.
    """

    every: int = 10
    progress: bool = True
    tensorboard: bool = False
    profile_start: int | None = None
    profile_steps: int = 3

    def __post_init__(self):
        """Checks ranges."""
        if self.every < 1 or self.profile_steps < 1:
            raise ValueError(
                f"log.every and profile_steps must be at least 1, got {self.every} and {self.profile_steps}"
            )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The completion printed at the end.

    Attributes:
      prompt: text to continue; empty, none is sampled.
      tokens: tokens to add.
      temperature: 0 takes the likeliest token every time.
    """

    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.7

    def __post_init__(self):
        """Checks ranges."""
        if self.tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"sample.tokens must be at least 1 and temperature at least 0, got {self.tokens}, {self.temperature}"
            )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along every axis of the mesh; one of them may be -1 and takes all that the others leave.

    Attributes:
      replica: slices: rows are split over them, parameters are not.
      data: rows.
      fsdp: rows, and parameters and optimizer state along the model dimension.
      context: tokens: window layers exchange their edges, global ones gather keys and values.
      tensor: heads and the feed-forward network.
    """

    replica: int = 1
    data: int = 1
    fsdp: int = -1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        """Checks ranges."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"mesh.{name} must be at least 1, or -1 for what the others leave, got {size}")
        free = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"only one axis of the mesh may be -1, got {' and '.join(free)}")


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run. On TPU pods, GKE, Slurm and Open MPI all of it is found out; elsewhere it is given.

    It belongs to a start, not to the run: it isn't kept in the run's ``config.json``.

    Attributes:
      mode: "auto" runs as many processes as are given below, in the environment, or by the cluster; "never" runs alone.
      coordinator: host and port at which process 0 can be reached, "10.0.0.2:8476"; None, JAX_COORDINATOR_ADDRESS.
      processes: how many there are; None, JAX_NUM_PROCESSES.
      process: number of this one, from 0; None, JAX_PROCESS_ID.
      start_timeout: seconds to wait for all of them to start.
      heartbeat_timeout: seconds of silence after which a process counts as dead and the others stop.
    """

    mode: Literal["auto", "never"] = "auto"
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    start_timeout: int = 300
    heartbeat_timeout: int = 100

    def __post_init__(self):
        """Checks ranges."""
        for name, least in (("processes", 1), ("process", 0), ("start_timeout", 1), ("heartbeat_timeout", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"distributed.{name} must be at least {least}, got {value}")
        if self.processes is not None and self.process is not None and self.process >= self.processes:
            raise ValueError(
                f"distributed.process must be below distributed.processes, got {self.process} and {self.processes}"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
      name: of the run.
      directory: where runs live; this one's files are in directory/name.
      resume: "auto" continues a run found there, "must" demands one, "never" refuses one.
      start_from: a run's directory, or one of its ``checkpoints/STEP``, whose parameters this run starts with, its
        optimizer and data anew: for fine-tuning, or after ``python -m iha_jax.convert``. None starts at random.
      seed: of initialisation and dropout (the data has its own).
      steps: optimizer steps.
      batch_size: rows of an optimizer step, over all micro-batches and processes.
      micro_batches: parts a batch is cut into, one after the other; gradients are summed exactly.
      z_loss: weight of the squared log of the softmax's denominator; 0, none.
      max_nonfinite: steps with a non-finite loss or gradient in a row (each leaves the state as it was)
        before the run aborts.
      model: the model.
      mesh: how the devices at hand are arranged.
      distributed: the processes.
      data: the data.
      optimizer: the optimizer.
      checkpoint: checkpoints.
      evaluation: the held-out loss.
      log: metrics.
      sample: the completion printed at the end.
    """

    name: str
    model: ModelConfig
    directory: str = "runs"
    resume: Literal["auto", "must", "never"] = "auto"
    start_from: str | None = None
    seed: int = 0
    steps: int = 1000
    batch_size: int = 16
    micro_batches: int = 1
    z_loss: float = 0.0
    max_nonfinite: int = 5
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    data: DataConfig = DataConfig()  # noqa: RUF009 (frozen)
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    log: LogConfig = LogConfig()
    sample: SampleConfig = SampleConfig()

    def __post_init__(self):
        """Checks the sizes that must agree between the parts."""
        if "://" in self.directory:
            raise ValueError(
                f"directory must be a path in the file system, got the address {self.directory!r}: mount the bucket "
                "(tpu/mount.sh) and give the path of the mount"
            )
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.micro_batches < 1 or self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches must divide batch_size, got micro_batches {self.micro_batches} and "
                f"batch_size {self.batch_size}"
            )
        if self.data.sequence_length > self.model.max_length:
            raise ValueError(
                f"data.sequence_length must be at most model.max_length, got {self.data.sequence_length} and "
                f"{self.model.max_length}"
            )
        if self.optimizer.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"optimizer.warmup_steps must be below the {self.decay_steps} steps of the schedule, got "
                f"{self.optimizer.warmup_steps}"
            )
        if self.log.profile_start is not None and not 0 <= self.log.profile_start < self.steps:
            raise ValueError(
                f"log.profile_start must be a step of the run, 0 … {self.steps - 1}, got {self.log.profile_start} "
                f"with steps {self.steps}"
            )
        if self.z_loss < 0 or not math.isfinite(self.z_loss):
            raise ValueError(f"z_loss must be at least 0 and finite, got {self.z_loss}")
        if self.max_nonfinite < 1:
            raise ValueError(f"max_nonfinite must be at least 1, got {self.max_nonfinite}")
        if not self.name or "/" in self.name:
            raise ValueError(f"name must be a single folder name, got {self.name!r}")

    @property
    def run_directory(self) -> pathlib.Path:
        """Where this run's files are."""
        return pathlib.Path(self.directory).expanduser() / self.name

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size // self.micro_batches

    @property
    def decay_steps(self) -> int:
        """Optimizer step at which the learning rate reaches its floor."""
        return self.optimizer.decay_steps or self.steps

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step, padding included."""
        return self.batch_size * self.data.sequence_length
