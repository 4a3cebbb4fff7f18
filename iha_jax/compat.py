"""The few differences between the oldest and newest jax and flax we support. A leaf module."""

import math
from typing import Any

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

    The default axis type changed from Auto to Explicit in jax 0.10, and the first argument was renamed in 0.12. Where
    devices are in several slices, the first axis goes over them: only it may cross the data-centre network.

    Args:
      shape: devices along every mesh axis.
      names: of the mesh axes.
      explicit: Explicit axes if true, else Auto ones.
      devices: the devices to use, default all.

    Raises:
      ValueError: the first axis is no multiple of the number of slices.
    """
    kind = AxisType.Explicit if explicit else AxisType.Auto
    found = (jax.devices() if devices is None else devices)[: math.prod(shape)]
    slices = len({getattr(device, "slice_index", 0) for device in found})
    if slices == 1:
        # Not jax.make_mesh: that splits a side of the torus over two mesh axes (256 chips as 128 x 2) on v5e only.
        arranged = mesh_utils.create_device_mesh(shape, found, allow_split_physical_axes=True)
    elif shape[0] % slices:
        raise ValueError(
            f"mesh axis {names[0]!r} goes over the {slices} slices and must be a multiple of that, got {shape[0]}"
        )
    else:
        inside = (shape[0] // slices, *shape[1:])
        across = (slices,) + (1,) * (len(shape) - 1)
        arranged = mesh_utils.create_hybrid_device_mesh(inside, across, found, allow_split_physical_axes=True)
    return jax.sharding.Mesh(arranged, names, axis_types=(kind,) * len(names))


def is_concrete(x: jax.Array) -> bool:
    """Whether an array has a value now, rather than standing for one in a trace."""
    return not isinstance(x, jax.core.Tracer)


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` connects to; JAX has no public name for it."""
    from jax._src import distributed  # private: looked up here, so that importing the layer does not depend on it

    return distributed.global_state.client


def cluster_processes() -> int | None:
    """How many processes the cluster has that JAX recognises around this one (TPU pods, Slurm, Open MPI); None, none.

    JAX itself would raise only after it was asked to connect.
    """
    from jax._src import clusters  # private, as above

    for cluster in clusters.ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return cluster.get_process_count()
    return None
