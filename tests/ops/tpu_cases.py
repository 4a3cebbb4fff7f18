"""A small problem for the TPU kernels, and its variants."""

import dataclasses

import jax.numpy as jnp

from iha_jax import Rope
from iha_jax.ops.arguments import validate
from iha_jax.ops.mixing import HeadMixing
from tests.ops import cases

# N 4 over K 2, H 16: everything else is what a case is about.
BASE = cases.Spec(
    *(1, 64, 64, 4, 2, 16),
    Hv=16,
    P=4,
    layout="plain",
    causal="virtual",
    window=None,
    rope=Rope(),
    scale=None,
    logits_soft_cap=None,
    across_heads=False,
    dtype="float32",
)


def variant(**changes) -> cases.Spec:
    return dataclasses.replace(BASE, **changes)


def arguments(spec: cases.Spec):
    arrays, integers = cases.draw(spec, 0)
    query, key, value, *mixing = (jnp.asarray(x) for x in arrays)
    integers = {name: integers.get(name) for name in cases.INTEGERS}
    return validate(query, key, value, HeadMixing(*mixing), precision="highest", **spec.options, **integers)
