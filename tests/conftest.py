"""Settings every test runs under."""

import os

# Eight CPU devices, before jax starts: meshes are simulated, one process is enough.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# NumPy's threads spin for the cores XLA works on: the oracle's small products took 20 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tile sizes measured on this machine, if any, are not what is tested.
os.environ["IHA_JAX_TUNING"] = os.path.join(os.path.dirname(__file__), "no-such-table.json")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """float64 for one test."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield
