"""The fused GPU kernels, interpreted: against the oracle, what they skip, what they refuse, what they keep."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import HeadMixing, Rope, YarnScaling, interleaved_head_attention
from iha_jax.ops import api, pallas_gpu
from iha_jax.ops.arguments import validate
from iha_jax.ops.pallas_gpu_plan import Spec, Tile, Tiles, default_tiles
from tests.ops import cases, test_oracle

# Small tiles: short sequences have several, of which some are skipped and some need no mask.
TINY = Tile(owner=32, visitor=16, warps=4, stages=1)
TILES = Tiles(TINY, TINY, TINY)

BASE = cases.Spec(
    *(1, 40, 40, 4, 2, 32),
    Hv=32,
    P=4,
    layout="plain",
    causal="virtual",
    window=10,
    rope=Rope(),
    scale=None,
    logits_soft_cap=None,
    across_heads=False,
    dtype="float32",
)


def variant(**changes) -> cases.Spec:
    return dataclasses.replace(BASE, **changes)


@pytest.fixture
def gpu(monkeypatch):
    """Traced for a GPU; lowered for the CPU that is here, the kernels are interpreted."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


EVERY_DAY = {
    "window, grouped queries": BASE,
    "global": variant(window=None),
    "bfloat16": variant(dtype="bfloat16", N=8, K=8, H=64, Hv=64),
    "documents, soft cap, token order": variant(
        T=30, S=30, P=2, layout="packed_twice", causal="token", window=None, logits_soft_cap=3.0, rope=None
    ),
}
SLOW = {
    "several rows, odd heads, one pseudo-head": variant(B=2, N=3, K=3, P=1, T=37, S=37, window=None),
    "bidirectional window": variant(causal=None, window=4, layout="left_padding"),
    "bidirectional": variant(causal=None, window=None, Hv=64, scale=0.3),
    "token order, window, plain": variant(causal="token", window=9, rope=Rope(positions="token")),
    "token order, plain": variant(causal="token", window=None),
    "context": variant(layout="context_padding", causal=None, window=None, S=23),
    "prefix": variant(layout="prefix_padding", T=11, window=None, P=8, rope=Rope(scaling=YarnScaling(4.0, 128))),
    "no order of indices": variant(layout="sparse", T=20, S=33),
    "gaps": variant(layout="gaps", P=16, T=20, S=20),
    "holes": variant(layout="holes", window=3),
    "bfloat16, wide, eight pseudo-heads": variant(dtype="bfloat16", P=8, T=24, S=24, H=128, Hv=128, window=None),
    "bfloat16, documents, soft cap": variant(
        dtype="bfloat16", layout="packed_restart", P=2, window=None, logits_soft_cap=20.0
    ),
}


@pytest.mark.parametrize(
    "spec",
    [*EVERY_DAY.values(), *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW.values())],
    ids=[*EVERY_DAY, *SLOW],
)
def test_values_and_all_gradients(gpu, spec):
    """Outputs, and derivatives of all seven inputs; bfloat16 within twice the error of a materialised one."""
    with pallas_gpu.force(TILES):
        test_oracle.TestPallas().check(spec, cases.compiled(spec, "pallas"), seed=len(str(spec)))


@pytest.mark.slow
def test_default_tiles_and_a_batch_of_mixings(gpu):
    """Rows beyond the sequence, and `jax.vmap` over everything."""
    spec = variant(T=70, S=70, window=20, rope=Rope(positions="token"))
    draws = [cases.draw(spec, seed)[0] for seed in range(2)]
    call = jax.jit(lambda *arrays: cases.call(spec, "pallas", arrays, {}))
    looped = np.stack([call(*arrays) for arrays in draws])
    stacked = [np.stack(pair) for pair in zip(*draws, strict=True)]
    chex.assert_trees_all_close(np.asarray(jax.jit(jax.vmap(call))(*stacked)), looped, atol=1e-5)
    expected = np.stack([cases.expected(spec, arrays, {}) for arrays in draws])
    chex.assert_trees_all_close(looped, expected.astype(np.float32), atol=2e-5)


@pytest.mark.slow
def test_a_part_of_the_heads():
    """As on a mesh that splits heads: all base heads are read, some heads are made; with ids below zero."""
    inputs, _ = cases.draw(BASE, 0)
    ids = np.where(np.arange(BASE.T) < 17, -1, -2)[None].astype(np.int32)
    expected = cases.expected(BASE, inputs, {"query_segment_ids": ids, "key_segment_ids": ids})[:, :, 2:]
    query, key, value, mix_query, mix_key, mix_value, collapse = (jnp.asarray(x) for x in inputs)
    mixing = HeadMixing(mix_query[:, 2:], mix_key[:, 1:], mix_value[:, 1:], collapse[2:])
    options = {**BASE.options, "query_positions": None, "key_positions": None, "precision": "highest"}

    def attend(query):
        ids_of = {"query_segment_ids": jnp.asarray(ids), "key_segment_ids": jnp.asarray(ids)}
        return pallas_gpu.pallas_gpu(validate(query, key, value, mixing, part_of_heads=True, **options, **ids_of))

    with pallas_gpu.force(TILES):
        out = jax.jit(attend, compiler_options=cases.QUICK)(query)
    chex.assert_trees_all_close(np.asarray(out), expected.astype(np.float32), atol=2e-5)


def problem(causal, window, pseudo, aligned=True, plain=True) -> Spec:
    return Spec(
        *(1, 96 // pseudo - 3, 96 // pseudo - 3, 2, 2, 2, 2, 32, 32, pseudo, TILES, causal, window),
        *(aligned, plain, False, 1.0, None, None, "float32"),
    )


@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize("pseudo", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 1, 3, 11, 200])
def test_what_a_tile_reaches(causal, pseudo, window):
    """Every visible pair lies within the reach, its ends are touched, and nothing in its core is hidden."""
    spec = problem(causal, window, pseudo)
    rows = np.arange(-400, 400)
    token = rows // pseudo
    if causal == "virtual":
        distance = rows[:, None] - rows[None, :]
        visible = (distance >= 0) & (distance < (window or 10**6) * pseudo)
    else:
        distance = token[:, None] - token[None, :]
        low = 0 if causal == "token" else -(window or 10**6) + 1
        visible = (distance >= low) & (distance < (window or 10**6))
    here = (rows >= 0) & (rows < TINY.owner)
    for by_query in (True, False):
        seen = visible[here] if by_query else visible.T[here]
        reach = spec.reach(TINY, by_query)
        touched = rows[seen.any(axis=0)]
        assert touched[0] == (rows[0] if reach.start is None else max(reach.start, rows[0]))
        assert touched[-1] == (rows[-1] if reach.stop is None else min(reach.stop - 1, rows[-1]))
        core = rows[seen.all(axis=0)]
        start = -math.inf if reach.core_start is None else reach.core_start
        stop = math.inf if reach.core_stop is None else reach.core_stop
        assert set(core) == {r for r in rows.tolist() if start <= r < stop}


def test_reach_where_indices_say_little():
    spec = problem("virtual", 3, 2, aligned=False, plain=False)
    reach = spec.reach(TINY, by_query=True)
    assert (reach.start, reach.stop, reach.core_start, reach.core_stop) == (None, None, 0, 0)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((96, 32, 4, 1), "owner.*96"),
        ((64, 8, 4, 1), "visitor=8"),
        ((32, 64, 4, 1), "visitor=64, owner=32"),
        ((64, 32, 3, 1), "warps.*3"),
        ((64, 32, 4, 0), "stages.*0"),
    ],
)
def test_tiles_validate_themselves(sizes, named):
    with pytest.raises(ValueError, match=named):
        Tile(*sizes)


def arrays(tokens=64, pseudo=4, dim=64, value_dim=64, dtype=jnp.bfloat16, collapse="per_head"):
    shapes = ((1, tokens, 2, dim), (1, tokens, 2, dim), (1, tokens, 2, value_dim))
    return [jnp.zeros(shape, dtype) for shape in shapes], HeadMixing.copy(2, pseudo, collapse=collapse)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": jnp.float16}, "float16"),
        ({"collapse": "across_heads"}, "across-heads"),
        ({"pseudo": 3}, "P=3"),
        ({"dim": 80}, "H=80"),
        ({"value_dim": 48}, "Hv=48"),
    ],
)
def test_says_what_is_missing(gpu, change, named):
    heads, mixing = arrays(**change)
    with pytest.raises(NotImplementedError, match=cases.naming(named, "GPU", "blockwise")):
        interleaved_head_attention(*heads, mixing, implementation="pallas")
    program = jax.make_jaxpr(lambda *heads: interleaved_head_attention(*heads, mixing))(*heads)
    assert "pallas_call" not in str(program)


def test_only_by_name_and_only_on_gpus(gpu, monkeypatch):
    taken = []
    monkeypatch.setattr(api, "pallas_gpu", lambda args: taken.append(args) or args.query)
    heads, mixing = arrays()

    def takes_kernels(implementation):
        taken.clear()
        call = lambda *heads: interleaved_head_attention(*heads, mixing, implementation=implementation)  # noqa: E731
        jax.make_jaxpr(call)(*heads)
        return bool(taken)

    assert takes_kernels("pallas")
    assert not takes_kernels(None)
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):  # of CPUs
        assert not takes_kernels("pallas")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not takes_kernels("pallas")


def test_nothing_outside_the_kernels_is_as_large_as_pseudo_heads(gpu):
    """In the traced forward and backward pass: at most base heads, mixing matrices, and two numbers a pseudo-query."""
    heads, mixing = arrays(tokens=256, pseudo=8)
    base = heads[0].size

    def step(heads, mixing):
        attend = lambda heads, mixing: interleaved_head_attention(*heads, mixing, implementation="pallas", rope=Rope())  # noqa: E731
        out, vjp = jax.vjp(attend, heads, mixing)
        return vjp(out)

    sizes, kernels = [], []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                kernels.append(equation)
                continue
            sizes.extend(var.aval.size for var in equation.outvars)
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(step)(heads, mixing).jaxpr)
    assert len(kernels) == 6  # each of the three for a GPU and for a CPU
    assert base <= max(sizes) < 2 * base


def test_default_tiles_serve_every_size():
    for dim in (32, 64, 128):
        for dtype in ("bfloat16", "float32"):
            tiles = default_tiles(dim, dtype)
            for tile in (tiles.forward, tiles.query, tiles.key):
                assert tiles.owner % tile.owner == 0
