"""The fused TPU kernels beyond the shared suite: long sequences, parts of heads, races, costs."""

import dataclasses
import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxpr_as_fun

from iha_jax import Rope
from iha_jax.ops import pallas_tpu, pallas_tpu_base, pallas_tpu_cost, pallas_tpu_plan, pallas_tpu_tile, tuning
from iha_jax.ops import pallas_tpu_prepare as prepare
from iha_jax.ops.arguments import validate
from iha_jax.ops.block_sizes import Sizes
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.pallas_tpu_backward import backward
from iha_jax.ops.pallas_tpu_forward import forward, key_tile, query_tile
from tests import jaxpr_flops
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


def assert_equals_blockwise(spec: cases.Spec):
    """Values and all seven gradients; blockwise has met the oracle on its own."""
    arrays, integers = cases.draw(spec, 0)
    cotangent = np.random.default_rng(1).normal(size=(spec.B, spec.T, spec.N, spec.Hv)).astype(np.float32)
    cotangent /= np.linalg.norm(cotangent)
    out, gradients = cases.compiled(spec, "pallas")(arrays, integers, cotangent)
    expected, expected_gradients = cases.compiled(spec, "blockwise")(arrays, integers, cotangent)
    chex.assert_trees_all_close(out, expected, atol=2e-5)
    chex.assert_trees_all_close(gradients, expected_gradients, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "kind", "atleast"),
    [
        # The kept tiles wrap around the buffer several times, and a tile is seen by the two after it.
        (variant(T=64, S=64, N=2, P=20, window=10), "local", {"lag": 2, "query_tiles": 8}),
        # Queries wait for keys on their right.
        pytest.param(variant(T=90, S=90, P=8, causal=None, window=17), "local", {"delay": 1}, marks=pytest.mark.slow),
        # Several chunks, of which causality skips some.
        pytest.param(variant(T=600, S=600, N=2, P=2, layout="packed"), "global", {"chunks": 3}, marks=pytest.mark.slow),
        # Chunks that are visible to all of a tile's queries are not masked.
        pytest.param(variant(T=300, S=300), "global", {"chunks": 3}, marks=pytest.mark.slow),
        pytest.param(variant(T=300, S=290, causal=None, rope=None), "global", {"chunks": 3}, marks=pytest.mark.slow),
    ],
    ids=["window", "bidirectional window", "causal", "causal without masks", "bidirectional"],
)
def test_long_sequences(spec, kind, atleast):
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == kind
    for name, size in atleast.items():
        assert getattr(found, name) >= size, f"{name}={getattr(found, name)}: the case misses its point"
    assert_equals_blockwise(spec)


@pytest.mark.parametrize(
    ("changes", "mixes"),
    [
        ({"N": 2, "P": 20, "window": 3}, False),
        pytest.param({"N": 4, "P": 3, "window": 4, "T": 50, "S": 50, "B": 2}, False, marks=pytest.mark.slow),
        pytest.param({"N": 4, "P": 2, "window": 9, "T": 50, "S": 50, "causal": None}, False, marks=pytest.mark.slow),
        pytest.param({"N": 2, "P": 20, "window": 3}, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_with_and_without_pseudo_values(monkeypatch, changes, mixes):
    spec = variant(**{"T": 40, "S": 40, **changes})
    monkeypatch.setattr(pallas_tpu_plan, "_mixes_values", lambda spec: mixes)
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == "local"
    assert found.mixes_values == mixes
    assert_equals_blockwise(spec)


@pytest.mark.parametrize(("shape", "mixes"), [((20, 20, 10), False), ((16, 8, 64), False), ((8, 4, 256), True)])
def test_pseudo_values_are_made_where_that_is_less_work(shape, mixes):
    heads, pseudo, window = shape
    spec = variant(T=8 * window, S=8 * window, N=heads, K=heads, P=pseudo, window=window)
    assert pallas_tpu.spec_of(arguments(spec)).mixes_values == mixes


@pytest.mark.parametrize(("size", "copies"), [(128, 1), (80, 1), (64, 2), (63, 2), (33, 2), (16, 8)])
def test_small_heads_fill_their_lanes(size, copies):
    """Every lane of a copy is a lane of the head or padding; in all of them together products are those of one."""
    spec = variant(T=256, S=256, N=8, K=8, H=size, Hv=size, window=64, rope=None)
    args = arguments(spec)
    found = pallas_tpu.spec_of(args)
    assert found.copies == found.value_copies == copies
    sharing = found.sharing(found.key_groups)
    assert sharing.count == np.gcd(copies, found.key_groups)
    tokens = prepare.tokens(args, found)
    query, key = (np.asarray(x).reshape(spec.B, -1, 8, 128)[0] for x in (tokens.query, tokens.key))
    scores = np.einsum("tnh,snh->nts", query, key) / copies
    expected = np.einsum("tnh,snh->nts", args.query[0], args.key[0])
    np.testing.assert_allclose(scores[:, :256, :256], expected, rtol=1e-4, atol=1e-4)
    # A lane's owner has as many lanes as any other, in both halves.
    owner = np.asarray(pallas_tpu_tile.owners((8, 128), sharing))[0].reshape(2, -1)
    assert (owner[0] == owner[1]).all()
    assert set(np.bincount(owner[0])) == {64 // sharing.count}


def test_wide_windows_keep_the_pipeline_over_heads_full():
    found = pallas_tpu_plan.plan(
        batch=1, query_len=8192, key_len=8192, sources=20, key_sources=20, heads=20, kv_heads=20, head_dim=128,
        value_dim=128, pseudo=4, causal="virtual", window=512, aligned=True, plain=True, across_heads=False, scale=1.0,
        logits_soft_cap=None, precision=None, dtype="bfloat16",
    )  # fmt: skip
    assert found.kind == "local"
    assert found.heads >= pallas_tpu_plan.PIPELINED


@pytest.mark.parametrize(("pseudo", "heads"), [(20, 20), (4, 16), (8, 8)])
def test_pieces_and_rows_by_token_are_undone(pseudo, heads):
    """Inner products agree with those of the transposes, and every row of a unit has its token's own sum."""
    spec = variant(T=64, S=64, N=heads, K=heads, P=pseudo, window=pseudo)
    found = pallas_tpu.spec_of(arguments(spec))
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(found.tile, 128)).astype(np.float32)
    units = rng.normal(size=(found.query_groups * found.unit, 128)).astype(np.float32)
    g = found.query_group
    by_hand = units.reshape(found.query_groups, found.unit // g, g, 128).sum(1).reshape(found.tile, 128)
    repeated = np.repeat(tokens.reshape(found.query_groups, 1, g, 128), found.unit // g, axis=1)

    def both(x, y):
        return pallas_tpu_base.per_token(found, x), pallas_tpu_base.per_unit_row(found, y)

    summed, spread = jax.jit(both)(units, tokens)
    np.testing.assert_allclose(summed, by_hand, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(spread, repeated.reshape(units.shape))


@pytest.mark.slow
@pytest.mark.parametrize("causal", ["virtual", "token", None])
def test_wide_windows_skip_chunks_on_both_sides(monkeypatch, causal):
    monkeypatch.setattr(pallas_tpu_plan, "LOCAL_CHUNK", 0)
    spec = variant(T=150, S=150, window=30, causal=causal)
    with tuning.force(Sizes(global_chunk=128, global_rows=64)):
        found = pallas_tpu.spec_of(arguments(spec))
        assert found.kind == "global"
        assert pallas_tpu_cost.chunk_visits(found) < found.query_tiles * found.chunks * 0.75
        assert_equals_blockwise(spec)


@pytest.mark.slow
@pytest.mark.parametrize("across_heads", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_heads_in_parts(monkeypatch, across_heads, window):
    spec = variant(T=40, S=40, across_heads=across_heads, window=window)
    whole = pallas_tpu.spec_of(arguments(spec))
    assert whole.groups == 1
    smallest = dataclasses.replace(whole, slots=max(whole.lag, 1))
    monkeypatch.setattr(pallas_tpu_plan, "PIPELINED", 1)  # no smaller tiles in place of parts
    monkeypatch.setattr(pallas_tpu_plan, "VMEM_BYTES", smallest.vmem_bytes(backward=True) - 1)
    assert pallas_tpu.spec_of(arguments(spec)).groups == 2
    assert_equals_blockwise(spec)


def test_what_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(pallas_tpu_plan, "VMEM_BYTES", 2**18)
    with pytest.raises(NotImplementedError, match=cases.naming("S=64", "P=4", "MiB", "blockwise")):
        cases.call(BASE, "pallas", *cases.draw(BASE, 0))


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, None], ids=["local", "global"])
def test_no_races(window):
    """The interpreter that tracks every access to memory sees no two of them unordered."""
    spec = variant(T=24, S=24, N=2, P=20, window=window)
    args = arguments(spec)
    found = pallas_tpu.spec_of(args)
    assert found.kind == ("global" if window is None else "local")
    operands = prepare.tokens(args, found), prepare.weights(args, found)
    interpret = pltpu.InterpretParams(detect_races=True)
    races = _race_detector()
    out = forward(found, *operands, interpret=interpret)
    jax.block_until_ready(out)
    assert races() is False
    chex.assert_trees_all_close(out, forward(found, *operands, interpret=True), atol=1e-6)
    jax.block_until_ready(backward(found, *operands, out, interpret=interpret))
    assert races() is False


def _race_detector():
    for name in ("interpret.interpret_pallas_call", "interpret"):
        try:
            module = importlib.import_module(f"jax._src.pallas.mosaic.{name}")
        except ModuleNotFoundError:
            continue
        return lambda: module.races.races_found
    raise AssertionError("this version of jax keeps its race detector elsewhere")


@pytest.mark.parametrize("across_heads", [False, True])
def test_cost_is_what_a_kernel_executes(across_heads):
    """Counted from the traced kernel: where a tile arrives, takes its turn and departs in every step."""
    # One token's window with one pseudo-head: no history, so forward and backward have no idle steps.
    spec = variant(T=512, S=512, P=1, window=1, across_heads=across_heads)
    args = arguments(spec)
    found = pallas_tpu.spec_of(args)
    assert found.kind == "local"
    assert found.steps == found.backward_steps == found.key_tiles == found.query_tiles > 1
    operands = prepare.tokens(args, found), prepare.weights(args, found)
    out = jax.eval_shape(lambda *x: forward(found, *x, interpret=True), *operands)
    kernels = {
        False: (lambda *x: forward(found, *x, interpret=True), operands),
        True: (lambda *x: backward(found, *x, interpret=True), (*operands, out)),
    }
    for is_backward, (kernel, inputs) in kernels.items():
        counted = jaxpr_flops.kernel_flops(kernel, *inputs) * found.batch * found.steps
        # The pipeline over heads computes the last head's scores twice.
        claimed = pallas_tpu_cost.flops(found, is_backward)
        assert claimed <= counted <= claimed * (1 + 1.01 / found.heads)
        (call,) = pallas_calls(kernel, *inputs)
        estimate = call["cost_estimate"]
        assert estimate.flops == claimed
        assert estimate.bytes_accessed == bytes_by_walking(call["grid_mapping"])
        counted = transcendental_elements(call["jaxpr"]) * found.batch * found.steps
        # Beside the powers of scores: the score pipeline's surplus head.
        assert estimate.transcendentals <= counted <= estimate.transcendentals * (1 + 1.01 / found.heads)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 10, "N": 2, "P": 20},
        pytest.param({"B": 3, "causal": None, "window": 17, "P": 8, "layout": "packed"}, marks=pytest.mark.slow),
        pytest.param({"B": 2, "T": 600, "S": 600, "layout": "packed"}, marks=pytest.mark.slow),
        {"T": 300, "S": 290, "causal": None, "rope": None, "across_heads": True},
    ],
    ids=str,
)
def test_bytes_are_what_the_blocks_move(changes):
    """Operands fetched once a step, once a row or once in all; a local or global kernel, forward and backward."""
    args = arguments(variant(**changes))
    found = pallas_tpu.spec_of(args)
    operands = prepare.tokens(args, found), prepare.weights(args, found)
    out = jax.eval_shape(lambda *x: forward(found, *x, interpret=True), *operands)
    for kernel, inputs in ((forward, operands), (backward, (*operands, out))):
        (call,) = pallas_calls(lambda *x, kernel=kernel: kernel(found, *x, interpret=True), *inputs)
        assert call["cost_estimate"].bytes_accessed == bytes_by_walking(call["grid_mapping"])


@pytest.mark.parametrize("spec", [variant(T=600, S=600), variant(T=300, S=290, causal=None)], ids=["causal", "not"])
def test_visits_are_the_loops_of_the_kernel(spec):
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == "global"
    turns = 0
    for number in range(found.query_tiles):
        low, high = pallas_tpu_tile.chunk_range(found, jnp.int32(number))
        turns += int(high) - int(low)
    assert turns == pallas_tpu_cost.chunk_visits(found)


def pallas_calls(function, *args) -> list[dict]:
    """The parameters of every kernel call in a traced function."""

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield eqn.params
                continue
            for value in eqn.params.values():
                for inner in jaxpr_flops._jaxprs(value):
                    yield from find(inner)

    return list(find(jax.make_jaxpr(function)(*args).jaxpr))


def bytes_by_walking(mapping) -> int:
    """One grid step after the other: a block is moved when its index is not that of the step before."""
    total = 0
    for block in mapping.block_mappings:
        index_map = jaxpr_as_fun(block.index_map_jaxpr)
        shape = [getattr(size, "block_size", size) for size in block.block_shape]
        # jax renamed it after 0.7.
        array = block.array_aval if hasattr(block, "array_aval") else block.array_shape_dtype
        previous = None
        steps = np.array(list(np.ndindex(*mapping.grid)), np.int32)
        for index in zip(*jax.vmap(index_map)(*steps.T), strict=True):
            index = tuple(int(i) for i in index)
            if index != previous:
                total += int(np.prod(shape)) * array.dtype.itemsize
            previous = index
    return total


def transcendental_elements(jaxpr) -> int:
    """Results of powers and hyperbolic tangents, loops times their length."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("exp", "exp2", "tanh"):
            total += eqn.outvars[0].aval.size
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in jaxpr_flops._jaxprs(value):
                total += repeats * transcendental_elements(inner)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_corners_of_wide_windows_are_skipped(causal, layout):
    spec = variant(T=230, S=230, N=2, K=1, window=68, causal=causal, layout=layout)
    with tuning.force(Sizes(local_rows=256)):
        found = pallas_tpu.spec_of(arguments(spec))
        assert found.kind == "local"
        assert len(found.parts) > 1
        assert found.query_tiles > 3
        assert_equals_blockwise(spec)


@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize(("pseudo", "window"), [(20, 10), (8, 64), (4, 120), (2, 33), (1, 130)])
def test_parts_of_a_tile_hold_every_visible_pair(causal, pseudo, window):
    """Against all pairs of a tile's pseudo-queries and a chunk's pseudo-keys, by the definition of the window."""
    spec = variant(T=2048, S=2048, P=pseudo, window=window, causal=causal)
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == "local"
    # Rows of a group of tokens are (pseudo-head, token), those of keys (token, pseudo-head).
    group = np.arange(found.tile).reshape(-1, 1, found.query_group)
    query = (group * pseudo + np.arange(pseudo)[None, :, None]).reshape(-1, 1)
    key = np.arange(found.chunk)[None] - found.history + found.delay * found.rows
    distance, tokens = query - key, query // pseudo - key // pseudo
    visible = {
        "virtual": (distance >= 0) & (distance < window * pseudo),
        "token": (tokens >= 0) & (tokens < window),
        None: abs(tokens) < window,
    }[causal]
    assert visible.sum(axis=1).min() >= window * pseudo  # the chunk holds whole windows
    computed = np.zeros_like(visible)
    for part in found.parts:
        computed[part.rows, part.columns] = True
    assert not (visible & ~computed).any()
    covered = np.zeros_like(visible)
    for rows, columns in found.blocks:
        assert not covered[rows].any()
        covered[rows, columns] = True
    assert not (visible & ~covered).any()
    assert [part.rows.start for part in found.parts] == [0, *(part.rows.stop for part in found.parts[:-1])]
    assert found.parts[-1].rows.stop == found.rows


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize("most", [0, 4, 7, 20])
def test_pipeline_runs_every_stage_once_and_in_order(count, most):
    """Every stage of every head once, in order, and no slot written before it is read."""
    counts = np.zeros((3, count), np.int64)
    held: list[list[int]] = [[-1, -1], [-1, -1]]

    def stage(number, head, slot):
        assert slot == head % 2
        counts[number, head] += 1
        if number > 0:
            assert held[number - 1][slot] == head
        if number < 2:
            held[number][slot] = head

    def eager(start, stop, body, carry):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu_tile.lax, "fori_loop", eager)
        pallas_tpu_tile.pipeline(count, most, *(functools.partial(stage, i) for i in range(3)))
    assert (counts == 1).all()


@pytest.mark.parametrize("pseudo", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("heads", [1, 4, 6, 20, 64])
def test_groups_of_tokens_fill_registers(pseudo, heads):
    for tile in (16, 64, 256):
        group = pallas_tpu_plan.mixing_group(tile, heads, pseudo)
        assert tile % group == 0
        assert group * pseudo % 16 == 0
        assert group >= 8 or group * pseudo % 8 == 0


@pytest.mark.parametrize("window", [5, None])
def test_ids_may_be_negative(window):
    """Padding is marked by numbers that are nobody's."""
    spec = variant(T=24, S=24, N=2, P=2, H=16, Hv=16, window=window)
    arrays, _ = cases.draw(spec, 0)
    ids = np.repeat(np.int32([[-1, 0, -2]]), 8, axis=1)
    integers = {"query_segment_ids": np.broadcast_to(ids, (spec.B, 24))}
    outs = [cases.call(spec, implementation, arrays, integers) for implementation in ("pallas", "reference")]
    np.testing.assert_allclose(*outs, atol=2e-5)


def test_costs_are_counted_without_a_device():
    """While a program is traced for a mesh, what JAX computes would run on that mesh."""
    found = pallas_tpu.spec_of(arguments(variant(window=5)))
    steps = np.arange(found.steps, dtype=np.int32)
    for tiles in (query_tile(found, steps), key_tile(found, steps)):
        assert isinstance(tiles, np.ndarray)
        assert tiles.min() == 0
