"""What all fused kernels share: the platform decides when a program is lowered, and integers have no gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def on_platform(platform: str, call: Callable[..., Any], *operands: Any) -> Any:
    """A kernel compiled where the program is lowered for its platform, interpreted where it is lowered for a CPU.

    Args:
      platform: "tpu" or "cuda"; lowering for any other than this and a CPU raises NotImplementedError.
      call: takes the operands, and ``interpret`` by name.
      *operands: pytrees of arrays.
    """
    compiled, interpreted = (functools.partial(call, interpret=interpret) for interpret in (False, True))
    return jax.lax.platform_dependent(*operands, **{platform: compiled, "cpu": interpreted})


def no_gradient(x: Array) -> Any:
    """The cotangent of an operand that nothing depends on: zeros, of integers those that JAX wants."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
