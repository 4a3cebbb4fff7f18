"""Where a run's memory goes, and the answer when a device has too little of it."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from iha_jax.training.config import TrainConfig
from iha_jax.training.placement import Placement
from iha_jax.training.program import StepProgram


class OutOfMemoryError(RuntimeError):
    """A device has too little memory for the run; the message has the account and what to try."""


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Bytes of the device that holds most.

    Attributes:
      params: parameters.
      optimizer: the optimizer's state.
      gradients: as large as the parameters; while micro-batches are summed there are two of them.
      residuals: blocks' inputs, kept for the backward pass: of the activations what no choice of remat saves.
      logits: float32, of a micro-batch; there are several such arrays at once around the loss.
      batch: what a step is given.
    """

    params: int
    optimizer: int
    gradients: int
    residuals: int
    logits: int
    batch: int

    @property
    def total(self) -> int:
        """Their sum: what is needed at the least."""
        return sum(dataclasses.astuple(self))


def memory_account(config: TrainConfig, placement: Placement, program: StepProgram) -> MemoryAccount:
    """What a step needs at the least, from shapes and layouts alone.

    Args:
      config: of the run.
      placement: its devices.
      program: its step.
    """
    state, sizes, model = program.state_shapes(), placement.sizes, config.model
    rows = config.micro_batch_size // math.prod(sizes.get(axis, 1) for axis in ("replica", "data", "fsdp"))
    positions = rows * (config.data.sequence_length // sizes.get("context", 1))
    params = _bytes(state.params)
    return MemoryAccount(
        params=params,
        optimizer=_bytes(state.optimizer),
        gradients=params * (1 if config.micro_batches == 1 else 2),
        residuals=positions * model.model_dim * model.num_layers * jnp.dtype(model.compute_dtype).itemsize,
        logits=positions * model.vocab_size * 4 // sizes.get("tensor", 1),
        batch=_bytes(program.batch_shapes()),
    )


class OutOfMemory:
    """Answers a device's lack of memory with the account of a run.

    Attributes:
      compiled: the step's program, once there is one: XLA's own figures are better than an estimate.
    """

    def __init__(self, config: TrainConfig, placement: Placement, program: StepProgram):
        self._config, self._placement, self._program = config, placement, program
        self.compiled: Any = None

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Within it, a lack of memory is raised with the account and with what to try.

        Args:
          doing: what the memory was for, "compiling the step" for one.

        Raises:
          OutOfMemoryError: in place of JAX's error.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(self._message(doing, error)) from error

    def _message(self, doing: str, error: Exception) -> str:
        config, sizes = self._config, self._placement.sizes
        found = memory_account(config, self._placement, self._program)
        lines = [
            f"out of memory while {doing}, on {self._placement.describe()}: {config.micro_batch_size} rows of "
            f"{config.data.sequence_length} tokens at a time ({config.batch_size} in {config.micro_batches} "
            f"micro-batches), remat {config.model.remat!r}",
            f"  {_first_line(error)}",
            "By shapes and layouts a device needs at least",
            *_table(
                {
                    "parameters": found.params,
                    "optimizer": found.optimizer,
                    "gradients": found.gradients,
                    "blocks' inputs": found.residuals,
                    "logits, each copy": found.logits,
                    "batch": found.batch,
                    "together": found.total,
                }
            ),
        ]
        if (used := _of_program(self.compiled)) is not None:
            lines += ["By XLA the compiled step takes", *_table(used)]
        if (limit := _limit()) is not None:
            lines.append(f"and the device has {_size(limit)}.")
        state = found.params + found.optimizer + found.gradients
        lines.append("Try" + (", the state being most of it, the third first:" if 2 * state > found.total else ":"))
        smaller = f"--micro-batches {_next_divisor(config.batch_size, config.micro_batches)} takes a step in more parts"
        if config.micro_batches == config.batch_size:
            smaller = "--data.sequence-length below " + str(config.data.sequence_length)
        lines.append(f"  1. fewer rows at a time: {smaller}; or a smaller --batch-size")
        if config.model.remat == "full":
            lines.append("  2. --model.remat is 'full' already: all but the blocks' inputs is recomputed")
        else:
            wanted = "dots or full" if config.model.remat == "none" else "full"
            lines.append(f"  2. --model.remat {wanted}: the backward pass recomputes what it would have kept")
        fsdp = sizes.get("fsdp", 1)
        lines.append(
            f"  3. more devices: --mesh.fsdp above {fsdp} divides parameters, optimizer and gradients; for TPUs "
            "python -m tpu.plan CONFIG --topology v5e:4x4 --search finds what fits before a chip is rented"
        )
        return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a device's, or this machine's, lack of memory; by any name JAX has had for it."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OutOfMemoryError):
        return False
    # JaxRuntimeError, once XlaRuntimeError, is a RuntimeError; some transfers raise a ValueError with the same text.
    said = re.search("RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY", str(error))
    return isinstance(error, (RuntimeError, ValueError)) and said is not None


def needed_bytes(error: str) -> int | None:
    """What the compiler says it would have used: "Used 40.23G of 15.75G hbm"."""
    match = re.search(r"[Uu]sed ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", error)
    return None if match is None else round(float(match[1]) * 1024 ** ["", "K", "M", "G", "T"].index(match[2]))


def _bytes(tree: Any) -> int:
    """Of the part that one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        where = getattr(leaf, "sharding", None)
        shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _of_program(compiled: Any) -> dict[str, int] | None:
    used = None if compiled is None else compiled.memory_analysis()
    if used is None:
        return None
    return {
        "state and batch": used.argument_size_in_bytes,
        "temporaries": used.temp_size_in_bytes,
        "other results": used.output_size_in_bytes - used.alias_size_in_bytes,
    }


def _limit() -> int | None:
    statistics = jax.local_devices()[0].memory_stats()
    return None if statistics is None else statistics.get("bytes_limit")


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0][:300]
    needed = needed_bytes(str(error))
    named = f"{type(error).__name__}: {text}"
    return named if needed is None else f"{named} (the compiler would have used {_size(needed)})"


def _next_divisor(batch: int, parts: int) -> int:
    return next(n for n in range(parts + 1, batch + 1) if batch % n == 0) if parts < batch else parts


def _table(entries: dict[str, int]) -> list[str]:
    return [f"  {_size(size):>12}  {name}" for name, size in entries.items()]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
