"""Logical axis names and the rules that lay them on a mesh. A leaf module: no-op wherever there is no mesh.

Every parameter carries a neutral metadata key ``axes``: one logical name per array axis. `Rules` says which mesh
axes each name is split over; nothing else in the package mentions mesh axes. With no mesh set, `constrain`,
`einsum` and `take` are plain operations.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from iha_jax import compat

MESH_AXES = ("replica", "data", "fsdp", "context", "tensor")
"""Names of the mesh axes: slices (over the data-centre network), rows, rows and parameters, tokens, heads."""

MeshAxes = tuple[str, ...]
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axes every logical axis is split over; mesh axes that the mesh at hand lacks are skipped.

    Attributes:
      batch: of activations.
      sequence: tokens of activations.
      embed: model dimension of parameters (fully sharded data parallelism splits it).
      heads: query heads, of parameters and activations.
      kv_heads: key/value heads.
      source_heads: the heads that mixing and collapse read from; whole on every device.
      source_kv_heads: likewise for keys and values.
      head_dim: within a head.
      pseudo: pseudo-heads.
      mlp: hidden dimension of the feed-forward network.
      vocab: rows of the embedding, columns of the logits.
      layers: the stacked axis of scanned layers.
      norm: scales and biases over the model dimension.

    Raises:
      ValueError: something else than a tuple of names.
    """

    batch: MeshAxes = ("replica", "data", "fsdp")
    sequence: MeshAxes = ("context",)
    embed: MeshAxes = ("fsdp",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    source_heads: MeshAxes = ()
    source_kv_heads: MeshAxes = ()
    head_dim: MeshAxes = ()
    pseudo: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    vocab: MeshAxes = ("tensor",)
    layers: MeshAxes = ()
    norm: MeshAxes = ()

    def __post_init__(self):
        """A name alone would be read letter by letter, and split nothing."""
        for field in dataclasses.fields(self):
            axes = getattr(self, field.name)
            if isinstance(axes, str) or not all(isinstance(axis, str) for axis in axes):
                raise ValueError(f'Rules: {field.name} must be a tuple of mesh axes such as ("tensor",), got {axes!r}.')

    def replace(self, **changes: MeshAxes) -> "Rules":
        """These rules with other mesh axes for the logical axes named."""
        return dataclasses.replace(self, **changes)

    def resolve(self, axes: LogicalAxes, mesh_axes: MeshAxes) -> PartitionSpec:
        """The partition of an array with these logical axes on a mesh with these axes.

        Args:
          axes: one logical name, or None for a whole axis, per array axis.
          mesh_axes: names of the mesh's axes.

        Raises:
          ValueError: for an unknown logical name, or two array axes that would be split over one mesh axis.
        """
        known = {field.name for field in dataclasses.fields(self)}
        owner: dict[str, str] = {}
        entries = []
        for axis in axes:
            if axis is None:
                entries.append(None)
                continue
            if axis not in known:
                raise ValueError(f"unknown logical axis {axis!r} in {axes}; known are {sorted(known)}.")
            names = tuple(name for name in getattr(self, axis) if name in mesh_axes)
            for name in names:
                if name in owner:
                    raise ValueError(
                        f"logical axes {owner[name]!r} and {axis!r} of {axes} would both be split over mesh axis "
                        f"{name!r}: change one of them in Rules."
                    )
                owner[name] = axis
            entries.append(names[0] if len(names) == 1 else (names or None))
        return PartitionSpec(*entries)

    def lay_out(self, shape: tuple[int, ...], axes: LogicalAxes, mesh: Mapping[str, int], what: str) -> PartitionSpec:
        """The partition of an array of this shape, every size of which divides.

        Args:
          shape: of the array.
          axes: its logical axes.
          mesh: name → size of the mesh's axes.
          what: names the array in errors.

        Raises:
          ValueError: as for `resolve`; or if a size does not divide.
        """
        spec = self.resolve(axes, tuple(mesh))
        for size, axis, names in zip(shape, axes, spec, strict=True):
            names = () if names is None else (names,) if isinstance(names, str) else names
            parts = math.prod(mesh[name] for name in names)
            if size % parts:
                given = " ".join(f"{name}={count}" for name, count in mesh.items() if count > 1)
                raise ValueError(
                    f"{what}: its {axis} axis of {size} must be divisible by the {parts} devices along mesh axes "
                    f"{names}: change the size, the mesh ({given}), or Rules.{axis}"
                )
        return spec


_active: contextvars.ContextVar[Rules] = contextvars.ContextVar("iha_jax_rules", default=Rules())  # noqa: B039


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[Rules]:
    """Within this context layers resolve their logical axes by these rules."""
    token = _active.set(rules)
    try:
        yield rules
    finally:
        _active.reset(token)


def current_spec(axes: LogicalAxes, shape: tuple[int, ...]) -> tuple[PartitionSpec | None, bool]:
    """The partition under the mesh and rules in force, and whether the mesh is explicit; None without a mesh.

    Raises:
      ValueError: if a size does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None, False
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None, False  # Inside shard_map arrays are already the local pieces.
    explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return _active.get().lay_out(shape, axes, sizes, f"an activation of shape {list(shape)}"), explicit


def mesh_sizes() -> dict[str, int]:
    """Name and size of every axis of the mesh in force; empty without one, and within `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return {}
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


@contextlib.contextmanager
def tokens_whole_if_uneven(*counts: int) -> Iterator[None]:
    """Within this context tokens are split over no mesh axis, unless all these numbers of them can be split evenly.

    For decoding, whose chunks are as long as they come, often a single token; in training an odd length is an error.

    Args:
      *counts: tokens of a chunk; slots of a cache.
    """
    sizes = mesh_sizes()
    parts = math.prod(sizes[axis] for axis in mesh_axes("sequence"))
    if all(count % parts == 0 for count in counts):
        yield
    else:
        with use_rules(_active.get().replace(sequence=())):
            yield


def on_tpu() -> bool:
    """Whether what is traced here is for TPUs: those of the mesh in force, or without one the default backend's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend() == "tpu"
    return device.device_kind.startswith("TPU")


def on_gpu() -> bool:
    """Likewise for NVIDIA GPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend() in ("gpu", "cuda")
    return device.device_kind.startswith("NVIDIA")


def device_kind() -> str:
    """What JAX calls the devices that are traced for here, "TPU v5 lite" for one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def mesh_axes(name: str) -> MeshAxes:
    """The axes of the mesh in force that the rules in force split a logical axis over."""
    return tuple(axis for axis in getattr(_active.get(), name) if axis in mesh_sizes())


def lay_out(x: Array, spec: PartitionSpec) -> Array:
    """Puts x in this layout where the mesh is explicit and wants it said."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return compat.reshard(x, spec) if explicit else x


def constrain(x: Array, axes: LogicalAxes) -> Array:
    """Lays x out by its logical axes; x itself without a mesh."""
    spec, explicit = current_spec(axes, x.shape)
    if spec is None:
        return x
    return compat.reshard(x, spec) if explicit else jax.lax.with_sharding_constraint(x, spec)


def einsum(equation: str, *operands: Array, axes: LogicalAxes, precision=None, preferred_element_type=None) -> Array:
    """`jnp.einsum` whose result is laid out by logical axes (an explicit mesh needs that said at the contraction)."""
    inputs, result = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), itertools.chain(*(x.shape for x in operands)), strict=True))
    spec, explicit = current_spec(axes, tuple(sizes[axis] for axis in result))

    def contract(*operands: Array) -> Array:
        options: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
        if spec is None and len(operands) == 2:
            return _matrix_product(equation, *operands, **options)
        return jnp.einsum(equation, *operands, **options, out_sharding=spec if explicit else None)

    if preferred_element_type is None or all(x.dtype == preferred_element_type for x in operands):
        out = contract(*operands)
    else:
        # CPUs have no product of bfloat16 that accumulates in float32 (jax 0.7 refuses some): there, widen first.
        out = jax.lax.platform_dependent(
            *operands,
            cpu=lambda *operands: contract(*(x.astype(preferred_element_type) for x in operands)),
            default=contract,
        )
    return out if spec is None or explicit else jax.lax.with_sharding_constraint(out, spec)


def _matrix_product(equation: str, x: Array, weight: Array, **options: Any) -> Array:
    """`jnp.einsum` of two operands, as a product of two matrices where it is one with axes grouped.

    On CPUs the gradient of "btd,df->btf" by the weight is a contraction over two axes and a transposition, which
    takes twice the time of the same product of matrices.
    """
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    rows = "".join(axis for axis in left if axis in out)
    inner = "".join(axis for axis in left if axis not in out)
    columns = "".join(axis for axis in out if axis not in left)
    if left != rows + inner or out != rows + columns or right not in (inner + columns, columns + inner):
        return jnp.einsum(equation, x, weight, **options)
    shape = x.shape[: len(rows)]
    x = x.reshape(math.prod(shape), math.prod(x.shape[len(rows) :]))
    if right == inner + columns:
        shape += weight.shape[len(inner) :]
        y = jnp.einsum("rk,kc->rc", x, weight.reshape(x.shape[1], -1), **options)
    else:
        shape += weight.shape[: len(columns)]
        y = jnp.einsum("rk,ck->rc", x, weight.reshape(-1, x.shape[1]), **options)
    return y.reshape(shape)


def take(table: Array, index: Array, axes: LogicalAxes) -> Array:
    """``table[index]`` laid out by logical axes; an index out of range gives NaN, so that it can't pass unseen."""
    spec, explicit = current_spec(axes, (*index.shape, *table.shape[1:]))
    out = table.at[index].get(mode="fill", fill_value=jnp.nan, out_sharding=spec if explicit else None)
    return out if spec is None or explicit else jax.lax.with_sharding_constraint(out, spec)
