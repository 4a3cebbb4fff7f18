"""Race detection of the kernels' interpreter: that it finds a race, and none in the decoding kernel.

Those of the forward and backward kernels are with their other tests.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from iha_jax.ops import pallas_tpu_decode
from iha_jax.ops.pallas_tpu_decode_kernel import decode_kernel
from iha_jax.ops.pallas_tpu_decode_plan import decode_plan
from tests.ops.test_decode import small_tiles, variant  # noqa: F401
from tests.ops.test_pallas_tpu import _race_detector, arguments


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_planted_race_is_found(waits_first):
    """A transfer that is read before it is waited for."""

    def kernel(x_ref, out_ref, held, done):
        copy = pltpu.make_async_copy(x_ref, held, done)
        copy.start()
        if waits_first:
            copy.wait()
        out_ref[...] = held[...]
        if not waits_first:
            copy.wait()

    x = jnp.asarray(np.arange(8 * 128, dtype=np.float32).reshape(8, 128))
    run = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    races = _race_detector()
    out, raised = None, ""
    try:
        out = jax.block_until_ready(run(x))
    except jax.errors.JaxRuntimeError as error:  # the newest jax raises, older ones take note
        raised = str(error)
    found = races() or "RACE DETECTED" in raised
    assert found is not waits_first
    if waits_first:
        chex.assert_trees_all_equal(out, x)


@pytest.mark.slow
def test_none_while_decoding(small_tiles):  # noqa: F811
    args = arguments(variant(B=1, S=40, H=128, Hv=128))
    spec = decode_plan(args)
    assert spec.tiles > 1
    operands = pallas_tpu_decode.decode_inputs(args, spec)
    run = functools.partial(decode_kernel, spec, *operands)
    races = _race_detector()
    out = jax.block_until_ready(run(interpret=pltpu.InterpretParams(detect_races=True)))
    assert races() is False
    chex.assert_trees_all_close(out, run(interpret=True), atol=1e-6)
