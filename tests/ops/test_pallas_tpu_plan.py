"""What is planned for a TPU kernel, against its definition and against what the traced kernel does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from iha_jax.ops import pallas_tpu, pallas_tpu_cost, pallas_tpu_plan, pallas_tpu_tile, pallas_tpu_unmix
from iha_jax.ops import pallas_tpu_prepare as prepare
from iha_jax.ops.pallas_tpu_backward import backward
from iha_jax.ops.pallas_tpu_forward import forward, key_tile, query_tile
from tests import jaxpr_flops
from tests.ops.tpu_cases import arguments, variant


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
    owner = np.asarray(pallas_tpu_unmix.owners((8, 128), sharing))[0].reshape(2, -1)
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


@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize(("pseudo", "window"), [(20, 10), (8, 64), (4, 120), (2, 33), (1, 130)])
def test_parts_of_a_tile_hold_every_visible_pair(causal, pseudo, window):
    """Against all pairs of a tile's pseudo-queries and a chunk's pseudo-keys, by the definition of the window."""
    spec = variant(T=2048, S=2048, P=pseudo, window=window, causal=causal)
    found = pallas_tpu.spec_of(arguments(spec))
    assert found.kind == "local"
    # Rows of a span of tokens are (pseudo-head, token), those of keys (token, pseudo-head).
    span = np.arange(found.tile).reshape(-1, 1, found.span)
    query = (span * pseudo + np.arange(pseudo)[None, :, None]).reshape(-1, 1)
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
    for products in (found.blocks, found.strips):
        covered = np.zeros_like(visible)
        for rows, columns in products:
            assert not covered[rows, columns].any()  # a product twice would count twice
            covered[rows, columns] = True
        assert not (visible & ~covered).any()
    assert not (computed & ~covered).any()  # strips hold whole parts
    assert [part.rows.start for part in found.parts] == [0, *(part.rows.stop for part in found.parts[:-1])]
    assert found.parts[-1].rows.stop == found.rows


@pytest.mark.parametrize("pseudo", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("heads", [1, 4, 6, 20, 64])
def test_groups_of_tokens_fill_registers(pseudo, heads):
    for tile in (16, 64, 256):
        group = pallas_tpu_plan.mixing_group(tile, heads, pseudo)
        assert tile % group == 0
        assert group * pseudo % 16 == 0
        assert group >= 8 or group * pseudo % 8 == 0


def test_costs_are_counted_without_a_device():
    """While a program is traced for a mesh, what JAX computes would run on that mesh."""
    found = pallas_tpu.spec_of(arguments(variant(window=5)))
    steps = np.arange(found.steps, dtype=np.int32)
    for tiles in (query_tile(found, steps), key_tile(found, steps)):
        assert isinstance(tiles, np.ndarray)
        assert tiles.min() == 0
