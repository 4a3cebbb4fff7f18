"""An independent witness for FLOP counts: walks the traced program and adds up its matrix products."""

import math

import jax


def matmul_flops(function, *args) -> int:
    """Multiplications and additions of every `dot_general` in the traced function; loops times their length.

    Bodies under `jax.shard_map` count for every device, Pallas kernels what their cost estimates say, and of branches
    the costliest.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr, False)


def kernel_flops(function, *args) -> int:
    """The same inside fused kernels too, one step of their grids: not what they claim, but what they do."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr, True)


def _count(jaxpr, inside: bool) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracting)
            total += 2 * terms * math.prod(eqn.outvars[0].aval.shape)
            continue
        if eqn.primitive.name == "conv_general_dilated":
            raise NotImplementedError(f"{eqn.primitive.name} has no static count")
        if eqn.primitive.name == "pallas_call" and not inside and eqn.params["cost_estimate"] is not None:
            total += eqn.params["cost_estimate"].flops
            continue
        if eqn.primitive.name == "cond":
            total += max(_count(branch.jaxpr, inside) for branch in eqn.params["branches"])
            continue
        repeats = 1
        if eqn.primitive.name == "scan":
            repeats = eqn.params["length"]
        elif eqn.primitive.name == "shard_map":
            repeats = eqn.params["mesh"].size
        elif eqn.primitive.name == "while":
            if any(_count(eqn.params[name].jaxpr, inside) for name in ("cond_jaxpr", "body_jaxpr")):
                raise NotImplementedError("a while loop with products in it has no static count")
            continue
        for value in eqn.params.values():
            for inner in _jaxprs(value):
                total += repeats * _count(inner, inside)
    return total


def _jaxprs(value):
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
