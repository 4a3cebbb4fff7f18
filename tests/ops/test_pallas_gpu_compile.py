"""The fused GPU kernels compiled ahead of time for an H100. Needs the CUDA plugin, no GPU.

    pip install --no-deps jax-cuda13-plugin==$JAX jax-cuda13-pjrt==$JAX nvidia-cuda-nvcc nvidia-nvvm

with ``$JAX`` the version of jax that is installed.
"""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from iha_jax import HeadMixing, Rope, interleaved_head_attention, sharding

pytestmark = pytest.mark.slow
if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("needs jax-cuda13-plugin and jax-cuda13-pjrt", allow_module_level=True)

# What XLA has to know of the device, from NVIDIA's data sheet of the H100 SXM.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module")
def h100():
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1")
    return jax.sharding.Mesh(np.array(topology.devices), ("data",))


def compile_for(mesh, *, N, P, H, T, K=None, Hv=None, B=1, dtype="bfloat16", segments=False, **options):
    """Forward and backward with respect to everything."""
    K, Hv = K or N, Hv or H
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def struct(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    mixing = jax.eval_shape(lambda: HeadMixing.copy(N, P, K))
    mixing = jax.tree.map(lambda x: struct(x.shape, x.dtype), mixing)
    ids = struct((B, T), jnp.int32) if segments else None
    options = {"rope": Rope(), **options}

    def step(query, key, value, mixing, ids, cotangent):
        def attend(*operands):
            return interleaved_head_attention(*operands, query_segment_ids=ids, implementation="pallas", **options)

        out, vjp = jax.vjp(attend, query, key, value, mixing)
        return out, vjp(cotangent)

    operands = struct((B, T, N, H)), struct((B, T, K, H)), struct((B, T, K, Hv)), mixing, ids, struct((B, T, N, Hv))
    with jax.set_mesh(mesh), warnings.catch_warnings():
        assert sharding.on_gpu()
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return jax.jit(step).lower(*operands).compile()


@pytest.mark.parametrize(
    "case",
    [
        {"N": 8, "P": 4, "H": 128, "T": 8192, "window": 256},
        {"N": 8, "P": 2, "H": 64, "T": 2048},
        {"N": 20, "P": 8, "H": 64, "T": 1000, "K": 4, "window": 8, "segments": True},
        {"N": 16, "P": 4, "H": 128, "T": 2048, "causal": "token", "rope": Rope(positions="token")},
        {"N": 6, "P": 16, "H": 32, "Hv": 64, "T": 512, "causal": None, "logits_soft_cap": 20.0, "B": 2},
        {"N": 8, "P": 4, "H": 128, "T": 512, "dtype": "float32", "precision": "highest"},
        {"N": 5, "P": 1, "H": 64, "T": 512, "dtype": "float32", "window": 7},
    ],
    ids=lambda case: "-".join(f"{name}{value}" for name, value in case.items()),
)
def test_compiles(h100, case):
    """Shared memory and registers suffice; nothing as large as pseudo-heads is kept or made."""
    compiled = compile_for(h100, **case)
    text = compiled.as_text()
    for kernel in ("iha_gpu_forward", "iha_gpu_query_gradients", "iha_gpu_key_gradients"):
        assert kernel in text
    if case["T"] >= 8192:
        # Base heads rotated (2 of bfloat16), their gradients (3 of float32) and two numbers a pseudo-query.
        base = case["T"] * case["N"] * case["H"] * 2
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 9 * base
