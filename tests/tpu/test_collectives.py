"""What crosses the mesh, read from the compiled programs of layers and of a whole step."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, compat
from iha_jax.data import DataConfig
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.sharding import Rules
from iha_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
from iha_jax.training.placement import Placement
from iha_jax.training.program import StepProgram
from iha_jax.training.state import ModelFunctions
from tests.ops.cases import QUICK
from tpu import topology
from tpu.compiling import compile_with_text
from tpu.counts import count
from tpu.hlo import Module

B, T, D, N, P, W = 2, 1024, 1024, 8, 4, 8


def collectives_of_layer(make, mesh, devices):
    """The collectives of a layer's forward pass, everything laid out by the rules.

    Programs are for whole slices: an axis without rules has each of its four groups of chips do the same.
    """
    mesh = compat.make_mesh(tuple(mesh.values()), tuple(mesh), explicit=False, devices=devices)

    def place(shape, dtype, axes):
        spec = Rules().resolve(axes, mesh.axis_names)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    layer = ModelFunctions(nnx.eval_shape(make))
    params = {path: place(p.shape, p.dtype, layer.axes[path]) for path, p in layer.params.items()}
    x = place((B, T, D), jnp.bfloat16, ("batch", "sequence", None))

    def forward(params, x):
        return layer.merge(params)(x)

    with jax.set_mesh(mesh):
        lowered = jax.jit(forward, out_shardings=x.sharding).lower(params, x)
        _, text = compile_with_text(lowered)
    return count(Module(text), dict(mesh.shape)).collectives


def iha():
    return InterleavedHeadAttention(N, D, num_pseudo_heads=P, window=W, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def mha():
    return MultiHeadAttention(N, D, window=W, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@pytest.fixture
def devices():
    """A v5e:4x4, to compile for."""
    pytest.importorskip("libtpu")
    if jax.__version_info__ < (0, 8):
        pytest.skip("jax 0.7's libtpu dies when it compiles without a TPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield topology.devices_of("v5e:4x4")


@pytest.mark.slow
def test_split_heads_gather_three_base_heads_and_nothing_more(devices):
    plain, interleaved = (
        sum(c.total_bytes for c in collectives_of_layer(make, {"copies": 4, "tensor": 4}, devices))
        for make in (mha, iha)
    )
    itemsize = 2
    assert plain >= B * T * D * itemsize / 4  # the output's sum, whole or each device its part
    assert plain < interleaved <= plain + 3 * B * T * D * itemsize


@pytest.mark.slow
def test_split_sequences_exchange_a_halo_and_nothing_more(devices):
    found = collectives_of_layer(iha, {"copies": 4, "context": 4}, devices)
    assert {(c.kind, c.axes) for c in found} == {("collective-permute", ("context",))}
    # W tokens of base keys and values, and their positions and ids.
    assert 2 * B * W * D * 2 <= sum(c.total_bytes for c in found) <= B * W * (2 * D * 2 + 2 * 4)


def step_program(mesh, tokens, devices=None):
    config = TrainConfig(
        name="step",
        batch_size=16,
        steps=10,
        optimizer=OptimizerConfig(warmup_steps=1),
        mesh=mesh,
        model=ModelConfig(
            vocab_size=264,
            max_length=tokens,
            num_layers=6,
            model_dim=64,
            num_heads=2,
            mlp_dim=352,
            pattern=("iha", "mha"),
            iha=IHAConfig(num_pseudo_heads=2, window=4),
            scan_layers=True,
            remat="full",
        ),
        data=DataConfig(sequence_length=tokens),
    )
    placement = Placement(config.mesh, devices=devices)
    program = StepProgram(config, placement)
    lowered = program.lower(program.state_shapes())
    text = lowered.compile(QUICK).as_text() if devices is None else compile_with_text(lowered)[1]
    return program, Module(text), placement.sizes


def check_gathers(program, module, sizes):
    """No array crosses the mesh that is as large as the parameters of all scanned layers of a kind."""
    largest_layer = max(math.prod(p.shape[1:]) for path, p in program.functions.params.items() if "cycle" in path)
    found = [c for c in count(module, sizes).collectives if c.axes and c.kind in ("all-gather", "collective-permute")]
    inside = [c for c in found if c.count >= 3]
    assert inside, "nothing is gathered in the loop over layers"
    table = program.functions.params["embedding.table"].size
    for c in found:
        # A layer's matrices one by one, or the embedding: never a stack of three layers.
        assert c.bytes <= 4 * max(largest_layer, table), c
    # All three repeats of the largest matrix would be above that.
    assert 3 * largest_layer > max(largest_layer, table)


def test_parameters_are_gathered_layer_by_layer():
    check_gathers(*step_program(MeshConfig(fsdp=8), 64))


@pytest.mark.slow
def test_parameters_are_gathered_layer_by_layer_on_tpus(devices):
    check_gathers(*step_program(MeshConfig(data=2, fsdp=8), 1024, devices))
