"""Where a run's arrays live: the mesh, the layout of the state and the batches, and creating the state in place."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from iha_jax import compat, sharding
from iha_jax.sharding import MESH_AXES, LogicalAxes, Rules, use_rules
from iha_jax.training.config import MeshConfig, TrainConfig

_ROWS: LogicalAxes = ("batch", "sequence")


class Placement:
    """The devices of a run. With one device there is no mesh, and everything is as without this class.

    Attributes:
      mesh: None with one device.
      rules: from logical axes to the mesh's.
    """

    def __init__(self, config: MeshConfig, rules: Rules = Rules(), devices: Sequence[jax.Device] | None = None):
        """Arranges the devices.

        Args:
          config: sizes of the mesh.
          rules: from logical axes to the mesh's.
          devices: default all there are. If given there is a mesh even of one: it says what to compile for.
        """
        self.rules = rules
        found = jax.devices() if devices is None else devices
        sizes = mesh_shape(config, len(found))
        if devices is None and jax.process_count() > 1 and math.prod(sizes.values()) != len(found):
            raise ValueError(
                f"the mesh takes {math.prod(sizes.values())} of the {len(found)} devices of "
                f"{jax.process_count()} processes: with several processes it must take all; one of the axes may be -1"
            )
        self.mesh: Mesh | None = None
        if (count := math.prod(sizes.values())) > 1 or devices is not None:
            # Auto axes: the optimizers are optax's and know of no layouts; the layers say theirs where it matters.
            self.mesh = compat.make_mesh(tuple(sizes.values()), MESH_AXES, explicit=False, devices=found[:count])

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along every mesh axis; empty without a mesh."""
        return {} if self.mesh is None else dict(self.mesh.shape)

    @property
    def whole(self) -> NamedSharding | None:
        """Of an array that every device has whole; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @contextlib.contextmanager
    def active(self, **changes: sharding.MeshAxes) -> Iterator[None]:
        """Within it programs are traced for the mesh.

        Args:
          **changes: of the rules.
        """
        if self.mesh is None:
            yield
            return
        with jax.set_mesh(self.mesh), use_rules(self.rules.replace(**changes)):
            yield

    def check(self, config: TrainConfig) -> None:
        """Checks that batches divide; parameters are checked as they are laid out.

        Raises:
          ValueError: if one does not; both sizes are named.
        """
        rows, tokens = self._parts("batch"), self._parts("sequence")
        evaluated = config.evaluation.batch_size or config.micro_batch_size
        for name, size, parts, axis in (
            ("batch_size / micro_batches", config.micro_batch_size, rows, "batch"),
            ("evaluation.batch_size", evaluated, rows, "batch"),
            ("data.sequence_length", config.data.sequence_length, tokens, "sequence"),
        ):
            if size % parts:
                raise ValueError(
                    f"{name} must be divisible by the {parts} devices along mesh axes "
                    f"{self._axes(axis)}, got {size}: change it, or the mesh ({self.describe()})"
                )

    def describe(self) -> str:
        """The mesh in words: "data=2 tensor=4"."""
        found = [f"{name}={size}" for name, size in self.sizes.items() if size > 1]
        return " ".join(found) or "one device"

    def layout(self, shape: tuple[int, ...], axes: LogicalAxes, what: str) -> NamedSharding:
        """The sharding of an array.

        Args:
          shape: of the array.
          axes: its logical axes.
          what: names it in errors.

        Raises:
          ValueError: if a size does not divide.
        """
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.rules.lay_out(shape, axes, self.sizes, what))

    def create(self, make: Callable[[], Any], axes: Mapping[str, LogicalAxes]) -> Any:
        """The result of ``make``, every array created where it lives; arguments as for `shapes`."""
        if self.mesh is None:
            return make()
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes(make, axes))
        with self.active():
            return jax.jit(make, out_shardings=shardings)()

    def shapes(self, make: Callable[[], Any], axes: Mapping[str, LogicalAxes]) -> Any:
        """Shapes, dtypes and, on a mesh, shardings of what ``make`` returns; nothing is allocated.

        Args:
          make: a traceable function that makes a state. Arrays below a dictionary key in ``axes``, of the shape of
            that parameter, lie as it does: optimizers keep their moments so. All others are whole everywhere.
          axes: path of a parameter → its logical axes.
        """
        shapes = jax.eval_shape(make)
        if self.mesh is None:
            return shapes
        rest = NamedSharding(self.mesh, PartitionSpec())

        def lay_out(keys: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            path = next((str(k.key) for k in reversed(keys) if isinstance(k, jax.tree_util.DictKey)), "")
            known = path in axes and len(leaf.shape) == len(axes[path])
            where = self.layout(leaf.shape, axes[path], path) if known else rest
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(lay_out, shapes)

    def rows_here(self, count: int) -> tuple[int, ...]:
        """Of ``count`` rows of a batch, those that this process's devices hold (tokens may be elsewhere)."""
        if self.mesh is None:
            return tuple(range(count))
        shape = (count, self._parts("sequence"))
        index: Any = self._rows(shape, "a batch").addressable_devices_indices_map(shape)
        return tuple(sorted({row for rows, _ in index.values() for row in range(count)[rows]}))

    def batch(self, rows: Mapping[str, np.ndarray], count: int | None = None) -> dict[str, Any]:
        """A batch on its devices: arrays ``[…, B, T]`` whose last two axes are rows and tokens.

        Args:
          rows: name → array, the same whole batch in every process, or this one's `rows_here` of it.
          count: B over all processes; None, the arrays hold the whole batch.
        """
        if self.mesh is None:
            return dict(rows)
        return {
            name: self._put(name, array, array.shape[-2] if count is None else count) for name, array in rows.items()
        }

    def batch_shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What `batch` makes of an array, for compiling ahead of time."""
        where = None if self.mesh is None else self._rows(shape, "a batch")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def _put(self, name: str, array: np.ndarray, count: int) -> Array:
        shape = (*array.shape[:-2], count, array.shape[-1])
        here = range(count) if array.shape[-2] == count else self.rows_here(count)
        places = {row: place for place, row in enumerate(here)}

        def piece(index: Any) -> np.ndarray:
            wanted = range(count)[index[-2]]  # one device's rows lie side by side, here too
            first = places[wanted[0]]
            return array[..., first : first + len(wanted), index[-1]]

        return jax.make_array_from_callback(shape, self._rows(shape, name), piece)

    def _rows(self, shape: tuple[int, ...], what: str) -> NamedSharding:
        return self.layout(shape, (None,) * (len(shape) - 2) + _ROWS, what)

    def _axes(self, name: str) -> sharding.MeshAxes:
        return tuple(axis for axis in getattr(self.rules, name) if axis in self.sizes)

    def _parts(self, name: str) -> int:
        return math.prod(self.sizes[axis] for axis in self._axes(name))


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along every mesh axis, the axis of -1 filled in. Without one, devices may be left over.

    Raises:
      ValueError: if there are too few devices, or -1 does not come out even.
    """
    sizes = {name: getattr(config, name) for name in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if fixed > devices or (free and devices % fixed):
        given = ", ".join(f"mesh.{name} {size}" for name, size in sizes.items() if size not in (1, -1))
        raise ValueError(
            f"{given} needs {'a multiple of ' if free else ''}{fixed} devices, and there are {devices}: change the "
            "sizes; one of them may be -1 and takes what the others leave"
        )
    return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
