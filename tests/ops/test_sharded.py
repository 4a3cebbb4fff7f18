"""The operation on a mesh equals the operation on one device, and moves base heads only."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from iha_jax import HeadMixing, Rope, compat, interleaved_head_attention
from iha_jax.ops.sharded import attend_sharded, layout_of
from iha_jax.sharding import Rules, use_rules
from tests.jaxpr_flops import matmul_flops
from tests.ops.cases import QUICK

ALL = {"data": 2, "context": 2, "tensor": 2}


def operands(batch, tokens, heads, kv_heads, pseudo, across_heads, layout):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    query, key, value = (normal(batch, tokens, *rest) for rest in ((heads, 8), (kv_heads, 8), (kv_heads, 6)))
    shapes = [(heads, heads, pseudo), *[(kv_heads, kv_heads, pseudo)] * 2]
    shapes.append((heads, heads, pseudo) if across_heads else (heads, pseudo))
    mixing = HeadMixing(*(normal(*shape) / 2 for shape in shapes))
    cotangent = normal(batch, tokens, heads, 6)
    integers = {}
    if layout in ("packed", "positions"):
        ids = np.sort(rng.integers(0, 4, (batch, tokens)), axis=1)  # padding first, then three documents
        integers["query_segment_ids"] = ids.astype(np.int32)
    if layout == "positions":  # with gaps, each document from its own start
        gaps = np.cumsum(rng.integers(1, 4, (batch, tokens)), axis=1)
        starts = np.stack([[gaps[b][ids[b] == i].min() for i in ids[b]] for b in range(batch)])
        integers["query_positions"] = (gaps - starts + 7).astype(np.int32)
    if layout == "crossed":  # each half of the queries looks at the other half of the keys
        ids = np.broadcast_to(np.repeat(np.int32([1, 2]), tokens // 2), (batch, tokens))
        integers = {"query_segment_ids": ids, "key_segment_ids": ids[:, ::-1]}
        integers["query_positions"] = np.broadcast_to(np.tile(np.arange(tokens // 2), 2), (batch, tokens)).astype("i4")
    if layout == "key_padding":
        integers["key_segment_ids"] = (rng.random((batch, tokens)) < 0.7).astype(np.int32)
    return query, key, value, mixing, integers, cotangent


def value_and_gradients(options):
    def loss(query, key, value, mixing, integers, cotangent):
        out = interleaved_head_attention(query, key, value, mixing, **integers, **options)
        return jnp.sum(out * cotangent), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True), compiler_options=QUICK)


@pytest.mark.parametrize(
    ("mesh", "explicit", "heads", "layout", "options"),
    [
        (ALL, True, (4, 2, 3), "plain", {"window": 5}),
        (ALL, False, (4, 4, 2), "packed", {"window": 5, "across": True}),
        (ALL, True, (4, 1, 2), "positions", {"window": 6, "causal": "token", "rope": Rope(positions="token")}),
        (ALL, True, (6, 2, 2), "packed", {"logits_soft_cap": 5.0}),
        ({"context": 8}, True, (3, 3, 2), "packed", {"window": 13}),  # a window over several shards
        ({"context": 4, "tensor": 2}, True, (4, 2, 2), "packed", {"causal": None, "window": 7}),
        ({"context": 4, "tensor": 2}, True, (4, 2, 2), "key_padding", {"window": 7, "across": True}),
        ({"data": 2, "tensor": 4}, True, (8, 2, 2), "positions", {"window": 7}),  # K < devices
        ({"data": 1, "fsdp": 8}, True, (3, 1, 20), "plain", {"window": 4}),
        (ALL, True, (4, 2, 2), "packed", {"window": 7, "implementation": "pallas"}),
        ({"context": 8}, False, (3, 1, 2), "positions", {"causal": "token"}),  # 5 tokens a device: queries stay put
        ({"context": 4, "tensor": 2}, True, (4, 2, 2), "crossed", {"window": 3}),
        ({"context": 4, "tensor": 2}, False, (4, 4, 2), "crossed", {}),
        pytest.param(
            *({"context": 4, "tensor": 2}, True, (4, 2, 2), "plain", {"implementation": "pallas", "across": True}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equals_one_device(mesh, explicit, heads, layout, options):
    options = {"rope": Rope(), **options}
    across = options.pop("across", False)
    *arrays, integers, cotangent = operands(8, 40, *heads, across, layout)
    (_, expected), expected_gradients = value_and_gradients(options)(*arrays, integers, cotangent)
    with jax.set_mesh(compat.make_mesh(tuple(mesh.values()), tuple(mesh), explicit=explicit)):
        (_, out), gradients = value_and_gradients(options)(*arrays, integers, cotangent)
    if explicit:
        assert out.sharding.spec == Rules().resolve(("batch", "sequence", "heads", None), tuple(mesh))
    for ours, theirs in zip(
        jax.tree.leaves((out, gradients)), jax.tree.leaves((expected, expected_gradients)), strict=True
    ):
        scale = max(1.0, float(jnp.abs(theirs).max()))
        np.testing.assert_allclose(jax.device_get(ours) / scale, jax.device_get(theirs) / scale, atol=1e-5)


def test_cross_attention_gathers_the_context():
    query, _, _, mixing, _, _ = operands(4, 16, 4, 2, 2, False, "plain")
    _, key, value, _, _, _ = operands(4, 24, 4, 2, 2, False, "plain")
    ids = (np.arange(24)[None] < np.array([24, 20, 3, 0])[:, None]).astype(np.int32)
    attend = jax.jit(
        functools.partial(interleaved_head_attention, causal=None, key_segment_ids=ids, implementation="blockwise"),
        compiler_options=QUICK,
    )
    expected = attend(query, key, value, mixing)
    with jax.set_mesh(compat.make_mesh(tuple(ALL.values()), tuple(ALL))):
        out = attend(query, key, value, mixing)
    np.testing.assert_allclose(jax.device_get(out), jax.device_get(expected), atol=2e-6)


def collectives(mesh, options, heads=(4, 4, 3), across=False, gradients=False):
    """(operation, elements of its result) of the compiled program for one device."""
    *arrays, _, cotangent = operands(8, 64, *heads, across, "plain")
    devices = compat.make_mesh(tuple(mesh.values()), tuple(mesh))
    with jax.set_mesh(devices):
        place = lambda x, *axes: jax.device_put(  # noqa: E731
            x, NamedSharding(devices, Rules().resolve(axes, tuple(mesh)))
        )
        query, key, value = (place(x, "batch", "sequence", "heads", None) for x in arrays[:3])
        cotangent = place(cotangent, "batch", "sequence", "heads", None)
        mixing = HeadMixing(
            *(place(x, None, "heads", None) for x in jax.tree.leaves(arrays[3])[:3]),
            place(arrays[3].collapse, *((None, "heads", None) if across else ("heads", None))),
        )
        program = value_and_gradients(options)
        if not gradients:
            program = jax.jit(lambda q, k, v, m: interleaved_head_attention(q, k, v, m, **options))
            text = program.lower(query, key, value, mixing).compile().as_text()
        else:
            text = program.lower(query, key, value, mixing, {}, cotangent).compile().as_text()
    found = []
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    for shapes, kind in re.findall(rf"= (\(?[^=]*?) ({kinds})(?:-start)?\(", text):
        sizes = [np.prod([int(n) for n in s.split(",") if n]) for s in re.findall(r"\w\[([\d,]*)\]", shapes)]
        found.append((kind, int(sum(sizes))))
    return found


def test_causal_global_layers_compute_about_half_of_the_square_on_every_device():
    """Counted in the program that every device runs."""

    def flops(causal):
        *arrays, _, _ = operands(2, 1024, 4, 4, 3, False, "plain")
        with jax.set_mesh(compat.make_mesh((4,), ("context",))):
            attend = functools.partial(interleaved_head_attention, causal=causal, implementation="blockwise")
            return matmul_flops(attend, *arrays)

    assert flops("virtual") < 0.7 * flops(None)


def test_heads_cross_the_mesh_as_base_heads():
    """Tensor-sharded: three gathers of base heads, whose results are no larger than the base heads themselves."""
    found = collectives({"tensor": 8}, {"window": 4, "implementation": "blockwise"}, heads=(8, 8, 3))
    assert {kind for kind, _ in found} == {"all-gather"}
    assert sum(size for _, size in found) == 8 * 64 * 8 * (8 + 8 + 6)


def test_windows_cross_the_mesh_as_halos():
    """Sequence-sharded: W tokens of keys and values, their positions and ids, and nothing else."""
    window = 4
    found = collectives({"context": 8}, {"window": window, "implementation": "blockwise"})
    assert {kind for kind, _ in found} == {"collective-permute"}
    assert sum(size for _, size in found) <= 8 * window * (4 * (8 + 6) + 2)


@pytest.mark.parametrize("layout", ["plain", "packed", "positions"])
def test_windows_skip_work_by_index_on_every_device(layout):
    """Keys come without positions and ids of their own, which would make index order mean nothing."""
    query, key, value, mixing, integers, _ = operands(2, 64, 4, 4, 2, False, layout)
    given = []

    def attend(query, key, value, mixing, **integers):
        given.append((query.shape[1], key.shape[1], set(integers)))
        return query

    absent = dict.fromkeys(("query_positions", "key_positions", "query_segment_ids", "key_segment_ids"))
    with jax.set_mesh(compat.make_mesh((8,), ("context",))):
        layout = layout_of(query, key)
        jax.eval_shape(
            lambda *x: attend_sharded(attend, layout, *x, causal="virtual", window=3, **{**absent, **integers}),
            *(query, key, value, mixing),
        )
    assert given == [(8 + 3, 8 + 3, {"query_positions", "query_segment_ids"})]


def test_rows_do_not_cross_the_mesh():
    assert not collectives({"data": 8}, {"window": 4, "implementation": "blockwise"})
    # Backward: the sum of the loss and of the mixing tensors' gradients over rows.
    found = collectives({"data": 8}, {"window": 4, "implementation": "blockwise"}, gradients=True)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(size for _, size in found) == 1 + 3 * 4 * 4 * 3 + 4 * 3


@pytest.mark.parametrize(
    ("mesh", "shape", "message"),
    [
        ({"data": 8}, (4, 16, 4, 4), r"batch size B=4 .* 8, the devices along mesh axes \('data',\)"),
        ({"context": 8}, (4, 12, 4, 4), r"query tokens T=12 .* 8"),
        ({"tensor": 8}, (4, 16, 4, 4), r"query heads N=4 .* 8"),
        ({"tensor": 4}, (4, 16, 12, 3), r"key/value heads K=3 .* 4"),
    ],
)
def test_sizes_that_do_not_divide(mesh, shape, message):
    batch, tokens, heads, kv_heads = shape
    *arrays, _, _ = operands(batch, tokens, heads, kv_heads, 2, False, "plain")
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    with (
        jax.set_mesh(compat.make_mesh(tuple(mesh.values()), tuple(mesh), devices=devices)),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(interleaved_head_attention, *arrays)


def test_rules_say_what_is_split():
    *arrays, _, _ = operands(3, 16, 4, 4, 2, False, "plain")
    attend = jax.jit(functools.partial(interleaved_head_attention, window=3), compiler_options=QUICK)
    expected = attend(*arrays)
    mesh = compat.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh), use_rules(Rules(batch=(), sequence=("x",), heads=("y",), kv_heads=("y",))):
        out = attend(*arrays)
    assert out.sharding.spec == PartitionSpec(None, "x", "y", None)
    np.testing.assert_allclose(jax.device_get(out), jax.device_get(expected), atol=2e-6)
