"""An independent witness for FLOP counts: walks the traced program and adds up its matrix products."""

import math

import jax


def matmul_flops(function, *args) -> int:
    """Multiplications and additions of every `dot_general` in the traced function; loops times their length."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracting)
            total += 2 * terms * math.prod(eqn.outvars[0].aval.shape)
            continue
        if eqn.primitive.name in ("while", "conv_general_dilated"):
            raise NotImplementedError(f"{eqn.primitive.name} has no static count")
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in _jaxprs(value):
                total += repeats * _count(inner)
    return total


def _jaxprs(value):
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
