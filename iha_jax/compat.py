"""The few differences between the oldest and newest jax and flax we support. A leaf module."""

import math

import jax
import jax.core
from jax.experimental import mesh_utils
from jax.sharding import AxisType

# `jax.reshard` appeared after 0.7; the older name is still there in 0.7.2.
reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard


def make_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], *, explicit: bool = True, devices=None
) -> jax.sharding.Mesh:
    """A mesh whose axis types are always stated.

    The default axis type changed from Auto to Explicit in jax 0.10, and the first argument was renamed in 0.12.

    Args:
      shape: devices along every mesh axis.
      names: of the mesh axes.
      explicit: Explicit axes if true, else Auto ones.
      devices: the devices to use, default all.
    """
    kind = AxisType.Explicit if explicit else AxisType.Auto
    found = jax.devices() if devices is None else devices
    # Not jax.make_mesh: that splits a side of the torus over two mesh axes (256 chips as 128 x 2) on v5e only.
    arranged = mesh_utils.create_device_mesh(shape, found[: math.prod(shape)], allow_split_physical_axes=True)
    return jax.sharding.Mesh(arranged, names, axis_types=(kind,) * len(names))


def is_concrete(x: jax.Array) -> bool:
    """Whether an array has a value now, rather than standing for one in a trace."""
    return not isinstance(x, jax.core.Tracer)
