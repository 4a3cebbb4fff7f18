"""Checkpoints: the one file that knows Orbax.

A checkpoint is a directory ``checkpoints/<step>`` with the items ``params``, ``optimizer``, ``counters``
(step, updates, non-finite counts), ``rng``, ``data`` (the position in the data, one file a process) and
``progress`` (JSON). It appears under its name only once complete. All processes save and restore together; how many
they are, and on what mesh, may change in between.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from iha_jax.data.iterator import BatchIterator
from iha_jax.extras import needed
from iha_jax.training.config import CheckpointConfig
from iha_jax.training.processes import Processes
from iha_jax.training.state import Params, TrainState

with needed("orbax.checkpoint", "saving and reading checkpoints"), warnings.catch_warnings():
    # Orbax warns about its own deprecations on import.
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp

_LOG = logging.getLogger(__name__)
_START = "params"
_COUNTERS = ("step", "updates", "nonfinite", "nonfinite_total")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back.

    Attributes:
      state: the training state, placed as the target was.
      progress: what was given to ``save``.
    """

    state: TrainState
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run: the newest ``keep``, and the ``keep_best`` with the lowest held-out loss."""

    def __init__(self, directory: str | os.PathLike[str], config: CheckpointConfig, processes: Processes | None = None):
        self._processes = processes or Processes()
        self._directory = pathlib.Path(directory).absolute()
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(config.keep)]
        if config.keep_best:
            kept.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics["held_out_loss"],
                    reverse=True,  # the best are the last in this order: the lowest losses
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        # Named here, an item's description can be read before anything is restored.
        handlers: dict[str, Any] = {
            "data": _PositionHandler(),
            "progress": ocp.JsonCheckpointHandler(),
        }
        handlers |= {name: ocp.StandardCheckpointHandler() for name in ("params", "optimizer", "counters", "rng")}
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(kept),
                enable_async_checkpointing=config.asynchronous,
                cleanup_tmp_directories=True,
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        # What the first process sees: a directory on a network may look older elsewhere.
        return self._processes.share("steps", sorted(self._manager.all_steps()))[0]

    def save(self, state: TrainState, iterator: BatchIterator, progress: dict[str, Any], loss: float | None) -> None:
        """Saves; asynchronously, the arrays are copied before this returns and written afterwards.

        Args:
          state: the training state; its step names the checkpoint.
          iterator: of the training data, just after the step's batch.
          progress: anything JSON, given back by ``restore``.
          loss: held-out loss at this step where there is one: what ``keep_best`` ranks.

        Raises:
          OSError: this checkpoint, or the one before in the background, could not be written.
        """
        with self._reported():
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(state.optimizer),
                    counters=ocp.args.StandardSave({name: getattr(state, name) for name in _COUNTERS}),
                    rng=ocp.args.StandardSave({"key": jax.random.key_data(state.key)}),
                    data=_PositionSave(iterator.get_state()),
                    progress=ocp.args.JsonSave(progress),
                ),
                metrics=None if loss is None or not np.isfinite(loss) else {"held_out_loss": float(loss)},
                force=True,
            )

    def wait(self) -> None:
        """Returns when a save in flight is on disk.

        Raises:
          OSError: it could not be written.
        """
        with self._reported():
            self._manager.wait_until_finished()

    def restore(self, target: TrainState, iterator: BatchIterator | None) -> Restored | None:
        """The newest checkpoint that can be read, or None where there is none.

        One that can't be read (cut off, damaged) is set aside under ``damaged-<step>`` with a warning.

        Args:
          target: a state of the same structure; its shapes, dtypes and shardings are what is restored.
          iterator: set to where the checkpoint's was; None leaves the data alone.

        Raises:
          RuntimeError: there are checkpoints, but none can be read.
          ValueError: the newest is of another model, optimizer or division of the data.
        """
        steps = self.steps()
        for step in reversed(steps):
            self._check_structure(step, target)
            restored, positions, trouble = None, [], None
            try:
                restored, positions = self._restore_step(step, target, iterator is not None)
            except Exception as error:
                trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            troubles = [found for found in self._processes.share("restore", trouble) if found is not None]
            if restored is not None and not troubles:
                if iterator is not None:
                    iterator.set_state(*positions)
                return restored
            if self._processes.first:
                _LOG.warning("checkpoint %d can't be read (%s): skipped, trying the one before", step, troubles[0])
            self._set_aside(step)
        if steps:
            raise RuntimeError(
                f"none of the checkpoints {steps} in {self._directory} can be read; they are kept as damaged-<step>. "
                "Start anew under another --name, or with this directory removed"
            )
        return None

    def close(self) -> None:
        """Waits for a save in flight and ends Orbax's threads.

        Raises:
          OSError: it could not be written.
        """
        with self._reported():
            self._manager.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Gives one error for whatever the layers below say of a failed write."""
        try:
            yield
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise OSError(
                f"a checkpoint in {self._directory} could not be written; is the disk full? The ones before are as "
                f"they were ({type(error).__name__}: {reason})"
            ) from error

    def _restore_step(self, step: int, target: TrainState, positions: bool) -> tuple[Restored, list[bytes]]:
        def abstract(tree: Any) -> Any:
            return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)

        items = {
            "params": ocp.args.StandardRestore(abstract(target.params)),
            "optimizer": ocp.args.StandardRestore(abstract(target.optimizer)),
            "counters": ocp.args.StandardRestore(abstract({name: getattr(target, name) for name in _COUNTERS})),
            "rng": ocp.args.StandardRestore(abstract({"key": jax.random.key_data(target.key)})),
            "progress": ocp.args.JsonRestore(),
        }
        if positions:
            items["data"] = _PositionRestore()
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        state = dataclasses.replace(
            target,
            params=found["params"],
            optimizer=found["optimizer"],
            key=jax.random.wrap_key_data(found["rng"]["key"]),
            **found["counters"],
        )
        return Restored(state, found["progress"]), found["data"] if positions else []

    def _check_structure(self, step: int, target: TrainState) -> None:
        """Refuses another model's checkpoint; says nothing about one whose description can't be read."""
        try:
            metadata = self._manager.item_metadata(step)
            saved = {path: tuple(leaf.shape) for path, leaf in metadata["params"].tree.items()}
            saved_optimizer = _shapes(metadata["optimizer"].tree)
        except Exception:
            return
        wanted = {path: tuple(leaf.shape) for path, leaf in target.params.items()}
        if saved != wanted:
            path = next(p for p in sorted({*saved, *wanted}) if saved.get(p) != wanted.get(p))
            raise ValueError(
                f"checkpoint {step} in {self._directory} is of another model: {path} has shape {saved.get(path)} "
                f"there and {wanted.get(path)} in this configuration"
            )
        if saved_optimizer != _shapes(target.optimizer):
            raise ValueError(
                f"checkpoint {step} in {self._directory} is of another optimizer: its state has {len(saved_optimizer)} "
                f"arrays there and {len(_shapes(target.optimizer))} in this configuration, of other shapes"
            )

    def _set_aside(self, step: int) -> None:
        source = self._directory / str(step)
        if self._processes.first and source.is_dir():
            target = self._directory.parent / f"damaged-{step}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(source, target)
        self._processes.share("set aside", step)  # before the others look again
        self._manager.reload()


class _PositionHandler(ocp.CheckpointHandler):
    """Positions in the data: each process writes a file of its own, and each reads all there are."""

    def save(self, directory: Any, *_: Any, args: "_PositionSave") -> None:
        """Writes this process's."""
        (directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json").write_bytes(args.state)

    def restore(self, directory: Any, *_: Any, args: Any = None) -> list[bytes]:
        """Reads those of all processes there were; a missing one is an error."""
        files = {path.name: path for path in directory.glob("process_*.json")}
        count = len(files)
        states = [files[f"process_{i}-of-{count}.json"].read_bytes() for i in range(count)]
        for state in states:
            json.loads(state)
        return states

    def metadata(self, directory: Any) -> None:
        """There is none."""


@ocp.args.register_with_handler(_PositionHandler, for_save=True)
@dataclasses.dataclass
class _PositionSave(ocp.args.CheckpointArgs):
    state: bytes


@ocp.args.register_with_handler(_PositionHandler, for_restore=True)
@dataclasses.dataclass
class _PositionRestore(ocp.args.CheckpointArgs):
    """Nothing need be said."""


def load_params(run: str | os.PathLike[str], target: Params, step: int | None = None) -> tuple[int, Params]:
    """The parameters of a run, without optimizer and data: of a checkpoint, or those that `save_params` put there.

    Args:
      run: a run's directory; it is left as it is.
      target: path → parameter or its shape, of the same model; an array's sharding is that of the result.
      step: of the checkpoint; None, the newest, or if there is none the run's start.

    Returns:
      The checkpoint's step (0 for a start), and path → parameter.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is of another model.
    """
    run = pathlib.Path(run).absolute()
    path = run / "checkpoints"
    steps = sorted(int(p.name) for p in path.glob("*") if p.name.isdecimal() and (p / "params").is_dir())
    start = run / _START
    if not steps and step in (None, 0) and start.is_dir():
        return 0, _read_params(start, target)
    if not steps or step not in (None, *steps):
        wanted_step = "any" if step is None else str(step)
        raise FileNotFoundError(f"no checkpoint in {path}: wanted {wanted_step}, there are {steps or 'none'}")
    step = steps[-1] if step is None else step
    return step, _read_params(path / str(step) / "params", target)


def save_params(run: str | os.PathLike[str], params: Params) -> None:
    """Puts parameters into a run's directory as its start, all or nothing.

    Raises:
      FileExistsError: it has one; it is left as it is.
    """
    path = pathlib.Path(run).absolute() / _START
    if path.exists():
        raise FileExistsError(f"{path} is there already: give another directory")
    with contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        checkpointer.save(path, params)
        checkpointer.wait_until_finished()


def _read_params(path: pathlib.Path, target: Params) -> Params:
    # The handler itself: a checkpointer would look for a description of its own beside the arrays and warn.
    # Any: it takes every kind of path, and newer versions declare Orbax's own only.
    handler: Any = ocp.StandardCheckpointHandler()
    with contextlib.closing(handler):
        # A path that the description lacks, or that has another shape: say so before arrays are read.
        described = handler.metadata(path)
        tree = getattr(described, "item_metadata", described)
        tree = getattr(tree, "tree", tree)
        saved = {name: tuple(leaf.shape) for name, leaf in tree.items()}
        wanted = {name: tuple(leaf.shape) for name, leaf in target.items()}
        if saved != wanted:
            name = next(n for n in sorted({*saved, *wanted}) if saved.get(n) != wanted.get(n))
            raise ValueError(
                f"{path} has the parameters of another model: {name} has shape {saved.get(name)} there and "
                f"{wanted.get(name)} in this configuration"
            )
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or device)
            for name, leaf in target.items()
        }
        return handler.restore(path, args=ocp.args.StandardRestore(shapes))


def one_error_per_failed_save() -> None:
    """For programs: keeps hundreds of lines of tracebacks off the screen when a disk is full; the error is raised.

    Orbax logs a traceback in every layer that a failed write passes (through ``absl``), and the writes that TensorStore
    still has in flight report to an event loop that is gone.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of a tree's arrays, sorted: what survives of a structure in Orbax's description of it."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return sorted(tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))
