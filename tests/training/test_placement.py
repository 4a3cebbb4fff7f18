"""Runs on meshes: the same numbers as on one device, every array where it belongs, and from mesh to mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from iha_jax import compat
from iha_jax.models import Transformer
from iha_jax.training.config import EvaluationConfig, MeshConfig, OptimizerConfig
from iha_jax.training.display import Display
from iha_jax.training.loop import Trainer
from iha_jax.training.placement import Placement, mesh_shape
from iha_jax.training.signals import StopSignals
from iha_jax.training.state import ModelFunctions
from iha_jax.training.step import summed_gradient

ONE = MeshConfig(fsdp=1)


@pytest.fixture
def config(tiny):
    """Heads, features and rows that divide; two micro-batches, packing, dropout."""
    base = tiny(steps=4, batch_size=16, micro_batches=2, evaluation=EvaluationConfig(every=10, rows=12, batch_size=8))
    model = dataclasses.replace(base.model, num_heads=4, model_dim=32, vocab_size=264, dropout=0.1)
    # Adam divides a gradient by its own size: with the usual eps a gradient that is all rounding moves a parameter by
    # a whole learning rate, whichever way it was rounded.
    return dataclasses.replace(base, model=model, optimizer=dataclasses.replace(base.optimizer, eps=1e-3))


def run(config, steps=None):
    """Trains to ``steps`` (or the end); the trainer, closed, and the held-out loss."""
    with StopSignals(lambda text: None) as stop:
        trainer = Trainer(config, stop, Display(config.steps, bar=False, line_every=10**9))
        try:
            trainer.resume()
            trainer.compile()
            if steps is not None:
                trainer.config = dataclasses.replace(trainer.config, steps=steps)
            trainer.train()
            return trainer, trainer.finish()["loss"]
        finally:
            trainer.close()


def on_host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


MESHES = [
    MeshConfig(replica=2, fsdp=1, context=2, tensor=-1),
    *(
        pytest.param(mesh, marks=pytest.mark.slow)
        for mesh in (
            MeshConfig(fsdp=8),
            MeshConfig(data=2, fsdp=2, tensor=2),
            MeshConfig(fsdp=1, context=4, tensor=2),
            MeshConfig(data=2, fsdp=2, context=2),
        )
    ),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_run_on_a_mesh_equals_one_on_one_device(config, mesh):
    single, loss = run(dataclasses.replace(config, name="single", mesh=ONE))
    trainer, found = run(dataclasses.replace(config, name="mesh", mesh=mesh))
    np.testing.assert_allclose(trainer._losses, single._losses, rtol=1e-5)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    parameters = on_host(trainer.state.params)
    for path, value in on_host(single.state.params).items():
        np.testing.assert_allclose(parameters[path], value, atol=2e-5, err_msg=path)


def factorings(devices, axes):
    """Every way to write a number as a product over axes."""
    if axes == 1:
        return [(devices,)]
    sizes = [d for d in range(1, devices + 1) if devices % d == 0]
    return [(d, *rest) for d in sizes for rest in factorings(devices // d, axes - 1)]


@pytest.mark.slow
def test_every_mesh_has_one_devices_loss_and_gradient(config):
    """All 20 meshes of 8 devices over (data, fsdp, context, tensor): values to 1e-5, and where everything lies."""
    model = dataclasses.replace(config.model, num_heads=8, max_length=64)
    config = dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, sequence_length=64))
    rng = np.random.default_rng(0)
    shape = (2, 8, 64)
    cut = np.cumsum(rng.random(shape) < 0.05, axis=-1)  # documents of some twenty tokens, at other places in every row
    begin = np.maximum.accumulate(np.where(np.diff(cut, axis=-1, prepend=0) > 0, np.arange(64), 0), axis=-1)
    batch = {
        "inputs": rng.integers(0, 264, shape, np.int32),
        "targets": rng.integers(0, 264, shape, np.int32),
        "segment_ids": (cut + 1).astype(np.int32),
        "positions": (np.arange(64) - begin).astype(np.int32),
        "weights": (rng.random(shape) < 0.9).astype(np.float32),
    }

    def model_of(config):
        return Transformer(config.model, rngs=nnx.Rngs(0))

    functions = ModelFunctions(nnx.eval_shape(lambda: model_of(config)))

    def create(placement):
        return placement.create(lambda: ModelFunctions(model_of(config)).params, functions.axes)

    def step(params, batch):
        gradient, sums = summed_gradient(functions, params, batch, jax.random.key(1), 1e-3)
        weight = sums["weight"]
        return jax.tree.map(lambda g: g / weight, gradient), sums["loss"] / weight, sums["z_loss"] / weight

    params = create(Placement(ONE))
    expected = on_host(jax.jit(step)(params, batch))
    meshes = factorings(8, 4)
    assert len(meshes) == 20
    for data, fsdp, context, tensor in meshes:
        placement = Placement(MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor))
        params = create(placement)
        for path, axes in functions.axes.items():
            wanted = placement.layout(params[path].shape, axes, path)
            assert params[path].sharding.is_equivalent_to(wanted, params[path].ndim), path
        placed = placement.batch(batch)
        assert placed["inputs"].sharding.shard_shape(shape) == (2, 8 // (data * fsdp), 64 // context)
        with placement.active():
            layouts = ({path: value.sharding for path, value in params.items()}, None, None)
            gradient, loss, z_loss = jax.jit(step, out_shardings=layouts)(params, placed)
        found = on_host((gradient, loss, z_loss))
        for (path, value), right in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            scale = max(1.0, float(np.abs(right).max()))
            message = f"{placement.describe()}: {path}"
            np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-5 * scale, err_msg=message)


def test_every_array_lies_where_it_belongs(config):
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    trainer, _ = run(dataclasses.replace(config, mesh=mesh), steps=3)
    state = trainer.state
    assert state.params["layers.0.attention.query_kernel"].sharding.spec == PartitionSpec("fsdp", "tensor", None)
    assert state.params["layers.0.attention.mixing_query"].sharding.spec == PartitionSpec(None, "tensor", None)
    assert state.params["embedding.table"].sharding.spec == PartitionSpec("tensor", "fsdp")
    shardings = {path: value.sharding for path, value in state.params.items()}
    moments = 0
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer):
        path = next((k.key for k in reversed(keys) if isinstance(k, jax.tree_util.DictKey)), None)
        if path is None:
            assert leaf.sharding.is_fully_replicated
        else:
            moments += 1
            assert leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), path
    assert moments == 2 * len(shardings)


def test_a_run_moves_from_mesh_to_mesh(config):
    config = dataclasses.replace(config, steps=6)
    whole, loss = run(dataclasses.replace(config, name="whole", mesh=ONE))
    for name, meshes in {
        "out": [MeshConfig(fsdp=8), ONE],
        "in": [ONE, MeshConfig(fsdp=1, context=4, tensor=2)],
    }.items():
        first, _ = run(dataclasses.replace(config, name=name, mesh=meshes[0]), steps=3)
        assert int(first.state.step) == 3
        moved, found = run(dataclasses.replace(config, name=name, mesh=meshes[1]))
        np.testing.assert_allclose(moved._losses, whole._losses, rtol=1e-5)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        # No example lost or repeated: the checksum of all inputs seen.
        assert moved._progress["data_crc"] == whole._progress["data_crc"]


@pytest.mark.slow
def test_muon_on_a_mesh(config):
    config = dataclasses.replace(
        config, steps=2, optimizer=OptimizerConfig(name="muon", peak_lr=1e-2, final_lr=1e-3, warmup_steps=1)
    )
    single, _ = run(dataclasses.replace(config, name="single", mesh=ONE))
    trainer, _ = run(dataclasses.replace(config, name="mesh", mesh=MeshConfig(data=2, fsdp=2, tensor=2)))
    np.testing.assert_allclose(trainer._losses, single._losses, rtol=1e-4)


def test_the_mesh_takes_the_devices_at_hand():
    assert list(mesh_shape(MeshConfig(data=2), 8).values()) == [1, 2, 4, 1, 1]
    assert list(mesh_shape(MeshConfig(fsdp=1, tensor=4), 8).values()) == [1, 1, 1, 1, 4]  # the rest is left over
    assert Placement(ONE).mesh is None
    with pytest.raises(ValueError, match=r"mesh.tensor 3 needs a multiple of 3 devices, and there are 8"):
        mesh_shape(MeshConfig(tensor=3), 8)
    with pytest.raises(ValueError, match=r"mesh.data 4, mesh.tensor 4 needs 16 devices, and there are 8"):
        mesh_shape(MeshConfig(data=4, fsdp=1, tensor=4), 8)
    with pytest.raises(ValueError, match=r"mesh.fsdp and mesh.tensor"):
        MeshConfig(tensor=-1)
    with pytest.raises(ValueError, match=r"mesh.tensor must be at least 1.*got 0"):
        MeshConfig(tensor=0)


@pytest.mark.slow
def test_the_first_axis_goes_over_slices(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2).devices
    mesh = compat.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), devices=devices)
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match=r"mesh axis 'replica' goes over the 2 slices and .* got 1"):
        compat.make_mesh((1, 8), ("replica", "fsdp"), devices=devices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(fsdp=8), "batch_size": 12}, r"batch_size / micro_batches must be divisible by the 8 .* 6"),
        ({"mesh": MeshConfig(fsdp=1, context=3)}, r"data.sequence_length .* 3 devices .* got 32"),
        ({"mesh": MeshConfig(fsdp=1, tensor=8)}, r"heads axis of 4 must be divisible by the 8 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_named(config, changes, message):
    config = dataclasses.replace(config, **changes)
    with StopSignals(lambda text: None) as stop, pytest.raises(ValueError, match=message):
        Trainer(config, stop, Display(config.steps, bar=False))
