"""The position-wise feed-forward network, ungated or gated."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from iha_jax import sharding
from iha_jax.nn.parameters import (
    Initializer,
    compute_dtype,
    default_bias_init,
    default_kernel_init,
    kernel,
    parameter,
    require_positive,
    split_keys,
)

MLPKind = Literal["gelu", "relu", "relu2", "silu", "geglu", "swiglu", "reglu"]

_ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "swiglu": jax.nn.silu,
    "reglu": jax.nn.relu,
}
GATED = ("geglu", "swiglu", "reglu")


class MLP(nnx.Module):
    """``down(act(up x))``, or ``down(act(gate x) * up x)`` for the gated kinds (arXiv 2002.05202).

    The paper's 2.4B model is ungated: two matrices of ``D x 4D`` (section 3 of its retelling).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        kind: MLPKind = "gelu",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs | Array,
    ):
        """Makes ``up_kernel`` [D, F], ``gate_kernel`` [D, F] where gated, ``down_kernel`` [F, D] and biases.

        Args:
          in_features: D.
          hidden_features: F.
          kind: activation; ``"geglu"``, ``"swiglu"`` and ``"reglu"`` are gated.
          use_bias: whether every projection has a bias.
          dtype: of the computation, default what input and parameters promote to.
          param_dtype: of the parameters.
          precision: of every contraction.
          kernel_init: of up and gate.
          out_kernel_init: of down, default `kernel_init`.
          bias_init: of the biases.
          rngs: a ``params`` stream.

        Raises:
          ValueError: for an unknown kind or sizes below 1.
        """
        if kind not in _ACTIVATIONS:
            raise ValueError(f"MLP kind must be one of {get_args(MLPKind)}, got {kind!r}.")
        require_positive("MLP", in_features=in_features, hidden_features=hidden_features)
        self.kind, self.dtype, self.precision = kind, dtype, precision
        keys = split_keys(rngs, "up", "gate", "down", "up_bias", "gate_bias", "down_bias")
        d, f = in_features, hidden_features

        def up(name: str) -> nnx.Param:
            return kernel(keys[name], kernel_init, (d,), (f,), ("embed", "mlp"), param_dtype)

        self.up_kernel = up("up")
        self.gate_kernel = up("gate") if kind in GATED else None
        out_init = kernel_init if out_kernel_init is None else out_kernel_init
        self.down_kernel = kernel(keys["down"], out_init, (f,), (d,), ("mlp", "embed"), param_dtype)

        def bias(name: str, size: int, axis: str) -> nnx.Param | None:
            return parameter(bias_init(keys[name], (size,), param_dtype), (axis,)) if use_bias else None

        self.up_bias = bias("up_bias", f, "mlp")
        self.gate_bias = bias("gate_bias", f, "mlp") if kind in GATED else None
        self.down_bias = bias("down_bias", d, "norm")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Maps every token."""
        dtype = compute_dtype(self.dtype, x, self.up_kernel[...])
        x = x.astype(dtype)

        def project(x: Array, weight: nnx.Param, bias: nnx.Param | None, equation: str, axis: str | None) -> Array:
            axes = ("batch", "sequence", axis)
            y = sharding.einsum(equation, x, weight[...].astype(dtype), axes=axes, precision=self.precision)
            return y if bias is None else y + bias[...].astype(dtype)[None, None]

        hidden = project(x, self.up_kernel, self.up_bias, "btd,df->btf", "mlp")
        activation = _ACTIVATIONS[self.kind]
        if self.gate_kernel is None:
            hidden = activation(hidden)
        else:
            hidden = activation(project(x, self.gate_kernel, self.gate_bias, "btd,df->btf", "mlp")) * hidden
        return project(hidden, self.down_kernel, self.down_bias, "btf,fd->btd", None)
