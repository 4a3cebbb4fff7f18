"""Which implementation None takes, seen from the traced program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies

from iha_jax import HeadMixing, InterleavedHeadAttention, interleaved_head_attention, sharding


def chosen(tokens, keys=None, dtype=jnp.bfloat16, head_dim=16, **options):
    heads = jax.ShapeDtypeStruct((1, tokens, 2, head_dim), dtype)
    source = jax.ShapeDtypeStruct((1, keys or tokens, 2, head_dim), dtype)
    mixing = HeadMixing.copy(2, 2)
    options = {"causal": "virtual" if keys is None else None, **options}
    program = jax.make_jaxpr(lambda q, k, v: interleaved_head_attention(q, k, v, mixing, **options))(
        heads, source, source
    )
    if "iha_decode" in str(program):
        return "decode"
    return "pallas" if "pallas_call" in str(program) else "blockwise"


@pytest.fixture
def tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def test_blockwise_elsewhere():
    assert chosen(128) == "blockwise"
    assert chosen(128, window=8) == "blockwise"


def test_kernels_on_a_tpu(tpu):
    assert chosen(128) == "pallas"
    assert chosen(128, window=8) == "pallas"
    assert chosen(128, dtype=jnp.float32) == "pallas"
    assert chosen(128, implementation="blockwise") == "blockwise"


def test_few_queries_on_a_tpu(tpu):
    assert chosen(1, keys=256) == "decode"
    assert chosen(63, keys=256) == "decode"
    assert chosen(64, keys=256) == "pallas"
    assert chosen(8) == "blockwise"  # self-attention of a short sequence
    assert chosen(1, keys=256, dtype=jnp.float16) == "blockwise"
    assert chosen(1, keys=256, implementation="blockwise") == "blockwise"


def test_few_queries_by_name():
    assert chosen(1, keys=256) == "blockwise"
    assert chosen(1, keys=256, implementation="pallas") == "decode"
    assert chosen(8, implementation="pallas") == "pallas"


@pytest.mark.parametrize("window", [None, 8])
def test_a_layer_decodes_through_the_kernel(tpu, window):
    layer = InterleavedHeadAttention(4, 32, num_pseudo_heads=2, num_kv_heads=2, window=window, rngs=nnx.Rngs(0))
    cache = layer.init_cache(2, 256)
    for tokens in (1, 3):
        program = str(jax.make_jaxpr(layer.decode)(jnp.zeros((2, tokens, 32)), cache))
        assert "iha_decode" in program


def test_blockwise_where_the_kernels_cannot_serve(tpu):
    assert chosen(128, dtype=jnp.float16) == "blockwise"
    assert chosen(64, keys=200_000, head_dim=128) == "blockwise"  # no head's pseudo-keys fit on chip


def test_a_mesh_overrules_the_default_backend(tpu):
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert not sharding.on_tpu()
        assert chosen(128) == "blockwise"
    assert sharding.on_tpu()


def test_a_mesh_of_tpus_that_are_not_here(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    assert not sharding.on_tpu()
    with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("data",))):
        assert sharding.on_tpu()


def test_a_layer_takes_the_kernels_too(tpu):
    layer = InterleavedHeadAttention(2, 32, num_pseudo_heads=2, rngs=nnx.Rngs(0))
    program = jax.make_jaxpr(layer)(jnp.zeros((1, 64, 32)))
    assert "pallas_call" in str(program)
