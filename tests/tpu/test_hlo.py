"""Compiled programs counted against counts by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from iha_jax import compat
from tpu.counts import count
from tpu.groups import replica_groups, slices_of
from tpu.hlo import Module

ONE = {"x": 1}


def module_of(function, *arguments):
    return Module(jax.jit(function).lower(*arguments).compile().as_text())


def struct(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_nested_loops_count_as_often_as_they_run():
    def step(x, w):
        def inner(y, _):
            return jnp.tanh(jnp.einsum("ik,kj->ij", y, w)), None

        def outer(y, _):
            return jax.lax.scan(inner, y, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    found = count(module_of(step, struct(7, 11), struct(11, 11)), ONE)
    assert found.flops == 5 * 3 * 2 * 7 * 11 * 11


def test_batched_products():
    product = module_of(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), struct(3, 5, 7), struct(3, 7, 11))
    assert count(product, ONE).flops == 2 * 3 * 5 * 7 * 11


def test_a_conditional_counts_its_larger_branch():
    def step(p, x):
        return jax.lax.cond(p, lambda x: jnp.sin(jnp.sin(x) @ x) @ x, lambda x: x + 1, x)

    assert count(module_of(step, struct(dtype=bool), struct(13, 13)), ONE).flops == 2 * 2 * 13**3


# The TPU compiler's products: batch axes are spatial (b of 4 here), or the contracted axis is split.
CONVOLUTION = """HloModule m

ENTRY %main (a: f32[4,4,96,64], b: f32[4,4,64,32]) -> f32[4,4,96,32] {{
  %a = f32{a}{{3,2,1,0:T(8,128)}} parameter(0)
  %b = f32{b}{{3,2,1,0:T(8,128)S(1)}} parameter(1)
  ROOT %c = f32{out}{{3,2,1,0:T(8,128)}} convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""


@pytest.mark.parametrize(
    ("a", "b", "out", "window", "labels", "flops"),
    [
        ("[8,64]", "[64,32]", "[8,32]", "", "bf_io->bf", 2 * 8 * 64 * 32),
        (
            *("[4,4,96,64]", "[4,4,64,32]", "[4,4,96,32]", "size=4x4 stride=3x3 lhs_dilate=4x4", "01bf_01io->01bf"),
            2 * 4 * 4 * 96 * 64 * 32,
        ),
        # A window over a whole axis contracts it; one padded by its own size spreads it.
        ("[5,8,2,16]", "[2,16,24,1]", "[5,8,1,24]", "size=2x1", "1b0f_0io1->1b0f", 2 * 5 * 8 * 24 * (2 * 16)),
        (
            *("[8,192,1]", "[192,4,96]", "[8,4,96]", "size=4 pad=3_3 rhs_reversal=1", "bf0_i0o->b0f"),
            2 * 8 * 4 * 96 * 192,
        ),
    ],
)
def test_products_written_as_convolutions(a, b, out, window, labels, flops):
    text = CONVOLUTION.format(a=a, b=b, out=out, window=window, labels=labels)
    assert count(Module(text), ONE).flops == flops


WHILE = """HloModule m

%fused (p: f32[10,128], i: s32[]) -> f32[1,128] {
  %p = f32[10,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %cut = f32[1,128]{1,0:T(8,128)} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,128}
}

%condition (state: (s32[], f32[10,128])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[10,128]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(9)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%body (state: (s32[], f32[10,128])) -> (s32[], f32[10,128]) {
  %state = (s32[]{:T(128)}, f32[10,128]{1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  %two = s32[]{:T(128)} constant(2)
  %table = f32[10,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %row = f32[1,128]{1,0:T(8,128)} fusion(%table, %at), kind=kLoop, calls=%fused
  %sum = f32[1,128]{1,0:T(8,128)} all-reduce(%row), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%add
  %next = s32[]{:T(128)} add(%at, %two)
  ROOT %out = (s32[]{:T(128)}, f32[10,128]{1,0:T(8,128)}) tuple(%next, %table)
}

ENTRY %main (table: f32[10,128]) -> (s32[], f32[10,128]) {
  %table = f32[10,128]{1,0:T(8,128)} parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %start = (s32[]{:T(128)}, f32[10,128]{1,0:T(8,128)}) tuple(%one, %table)
  ROOT %loop = (s32[]{:T(128)}, f32[10,128]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
}
"""


def test_loops_as_the_tpu_compiler_leaves_them():
    """Counter from 1 below 9 in steps of 2: four trips; of the table only a row is read."""
    found = count(Module(WHILE), {"x": 2, "y": 2})
    (one,) = found.collectives
    assert (one.kind, one.axes, one.group, one.bytes, one.count) == ("all-reduce", ("x",), (0, 2), 512, 4)
    # A trip: the fusion reads and writes a row, the collective too, and the counter is read twice and written.
    assert found.hbm_bytes == 4 * (512 + 4 + 512 + 2 * 512 + 3 * 4)
    with pytest.raises(ValueError, match=r"loop loop: cannot tell its trips"):
        count(Module(WHILE.replace("direction=LT", "direction=EQ")), {"x": 2, "y": 2})


def test_elements_of_tuples_named_where_they_are_used():
    """As jaxlib 0.12 prints them: no instruction takes the element out."""
    lines = [line for line in WHILE.splitlines() if "get-tuple-element" not in line]
    short = "\n".join(lines)
    for name, index in (("at", 0), ("table", 1)):
        body = short.index("%condition")
        end = short.index("ENTRY")
        short = short[:body] + re.sub(rf"%{name}\b", f"%state#{index}", short[body:end]) + short[end:]
    assert short.count("#") == 5
    whole, found = (count(Module(text), {"x": 2, "y": 2}) for text in (WHILE, short))
    assert found.hbm_bytes == whole.hbm_bytes
    assert found.collectives == whole.collectives
    # A tuple in a tuple is one element.
    nested = "ENTRY %main (p: f32[2]) -> f32[3] {\n"
    nested += "  %p = (f32[1], (f32[2], s32[4]), f32[3]{0}) custom-call()\n  ROOT %r = f32[3] negate(%p#2)\n}\n"
    element = Module(nested).entry.instructions["p#2"]
    assert [shape.dims for shape in element.shapes] == [(3,)]


SPREAD = """HloModule m

%first (x: bf16[8]) -> bf16[32] {{
  %x = bf16[8]{{0}} parameter(0)
  ROOT %piece = bf16[32]{{0}} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={{0}}{chain}
}}

%second (y: bf16[8]) -> bf16[32] {{
  %y = bf16[8]{{0}} parameter(0)
  ROOT %rest = bf16[32]{{0}} all-gather(%y), channel_id=1, replica_groups=[1,4]<=[4], dimensions={{0}}{chain}
}}

ENTRY %main (a: bf16[8]) -> (bf16[32], bf16[32]) {{
  %a = bf16[8]{{0}} parameter(0)
  %b = bf16[32]{{0}} fusion(%a), kind=kCustom, calls=%first
  %c = bf16[32]{{0}} fusion(%a), kind=kCustom, calls=%second
  ROOT %d = (bf16[32]{{0}}, bf16[32]{{0}}) tuple(%b, %c)
}}
"""


@pytest.mark.parametrize(("chain", "times"), [("", 2), (', frontend_attributes={chain_id="7"}', 1)])
def test_pieces_of_one_collective_count_once(chain, times):
    """And those of different ones do not, although all within shard_map are of channel 1."""
    found = count(Module(SPREAD.format(chain=chain)), {"x": 4}).collectives
    assert [c.bytes for c in found] == [64] * times


# What the compiler leaves of a sum over two slices of two chips, once for each of three layers: a sum within the slice,
# a buffer handed to the host and one taken back.
SLICES = """HloModule m, num_partitions=2

%condition (state: (s32[], f32[2,8,128])) -> pred[] {{
  %state = (s32[]{{:T(128)}}, f32[2,8,128]{{2,1,0:T(8,128)}}) parameter(0)
  %limit = s32[]{{:T(128)}} constant(3)
  %at = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%at, %limit), direction=LT
}}

%body (state: (s32[], f32[2,8,128])) -> (s32[], f32[2,8,128]) {{
  %state = (s32[]{{:T(128)S(1)}}, f32[2,8,128]{{2,1,0:T(8,128)}}) parameter(0)
  %at = s32[]{{:T(128)S(1)}} get-tuple-element(%state), index=0
  %one = s32[]{{:T(128)S(1)}} constant(1)
  %own = f32[2,8,128]{{2,1,0:T(8,128)}} get-tuple-element(%state), index=1
  %here = f32[2,8,128]{{2,1,0:T(8,128)S(1)}} all-reduce(%own), channel_id=9, replica_groups={{}}, to_apply=%add
  %token = token[] after-all()
  %send = (f32[2,8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) send(%own, %token), channel_id=1, {attributes}
  %sent = token[] send-done(%send), channel_id=1, {attributes}
  %recv = ({result}{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) recv(%token), channel_id=2, {attributes}
  %done = ({result}{{2,1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=2, {attributes}
  %next = s32[]{{:T(128)S(1)}} add(%at, %one)
  ROOT %out = (s32[]{{:T(128)S(1)}}, f32[2,8,128]{{2,1,0:T(8,128)}}) tuple(%next, %own)
}}

ENTRY %main (start: f32[2,8,128]) -> (s32[], f32[2,8,128]) {{
  %start = f32[2,8,128]{{2,1,0:T(8,128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %both = (s32[]{{:T(128)}}, f32[2,8,128]{{2,1,0:T(8,128)}}) tuple(%zero, %start)
  ROOT %loop = (s32[]{{:T(128)}}, f32[2,8,128]{{2,1,0:T(8,128)}}) while(%both), condition=%condition, body=%body
}}
"""
TO_OTHERS = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '{target}_xla_megascale_transfer_type="{kind}"}}, metadata={{op_name="step/sum"}}'
)


@pytest.mark.parametrize(
    ("kind", "target", "result", "expected"),
    [
        ("ALL_REDUCE", '_xla_megascale_target="{1,2}x{0:1}",', "f32[2,8,128]", ("all-reduce", (0, 2), 8192)),
        ("ALL_REDUCE", '_xla_megascale_target="{1:4}x{0:1}",', "f32[2,8,128]", ("all-reduce", (0, 2, 4, 6), 8192)),
        ("ALL_GATHER", '_xla_megascale_target="{1,2}x{0:1}",', "f32[4,8,128]", ("all-gather", (0, 2), 16384)),
        ("REDUCE_SCATTER", '_xla_megascale_target="{2,1}x{0:1}",', "f32[1,8,128]", ("reduce-scatter", (2, 0), 4096)),
        ("ALL_TO_ALL", "", "f32[2,8,128]", ("all-to-all", (0, 2), 8192)),
        ("ONE_TO_ONE", "", "f32[2,8,128]", ("collective-permute", (0, 2), 8192)),
    ],
)
def test_collectives_between_slices(kind, target, result, expected):
    slices = 4 if "4" in target else 2
    attributes = TO_OTHERS.format(kind=kind, target=target)
    found = count(Module(SLICES.format(attributes=attributes, result=result)), {"replica": slices, "x": 2}, slices)
    here, over = found.collectives
    assert (here.kind, here.axes, here.group, here.between_slices) == ("all-reduce", ("x",), (0, 1), False)
    assert (over.kind, over.group, over.bytes) == expected
    assert (over.axes, over.count, over.name, over.between_slices) == (("replica",), 3, "step/sum", True)
    # A trip reads the buffer for the sum here and for the host, and writes what comes back; the rest is on chip.
    assert found.hbm_bytes == 3 * (8192 + 8192 + expected[2])


def test_other_transfers_of_hosts_are_no_collectives():
    attributes = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="callback"}'
    found = count(Module(SLICES.format(attributes=attributes, result="f32[2,8,128]")), {"replica": 2, "x": 2}, 2)
    assert [c.between_slices for c in found.collectives] == [False]
    unknown = SLICES.format(attributes=TO_OTHERS.format(kind="ALL_OR_NOTHING", target=""), result="f32[2,8,128]")
    with pytest.raises(ValueError, match=r"transfer between slices: .*'ALL_REDUCE'.* got 'ALL_OR_NOTHING'"):
        count(Module(unknown), {"replica": 2, "x": 2}, 2)


def test_slices_are_numbered_from_one():
    assert slices_of('_xla_megascale_target="{1,2,3,4}x{0:3}"') == (0, 1, 2, 3)
    assert slices_of('_xla_megascale_target="{1:3,5}x{0:255}"') == (0, 1, 2, 4)
    assert slices_of('_xla_megascale_transfer_type="ALL_TO_ALL"') is None


def test_groups_in_every_notation():
    assert replica_groups("replica_groups={{0,2},{1,3}}, x", 4) == [(0, 2), (1, 3)]
    assert replica_groups("replica_groups=[2,4]<=[4,2]T(1,0), x", 8) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert replica_groups("replica_groups=[2,2]<=[4]", 4) == [(0, 1), (2, 3)]
    assert replica_groups("replica_groups={}, x", 3) == [(0, 1, 2)]
    assert replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", 4) == [(0, 2), (1, 3)]
    assert replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b','a'}, x", 4) == [(0, 2, 1, 3)]
    assert replica_groups("replica_groups=mesh['a'=8] {'a':(2)2}", 8) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert replica_groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", 4) == [(0, 1), (2, 3)]
    assert replica_groups("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4) == [(3, 1), (2, 0)]
    with pytest.raises(ValueError, match="replica_groups"):
        replica_groups("replica_groups=everyone, x", 4)


def test_collectives_of_a_sharded_product():
    mesh = compat.make_mesh((2, 4), ("data", "tensor"), explicit=False)

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    def step(x, w):
        return jax.lax.scan(lambda y, _: (jnp.einsum("ik,kj->ij", y, w), None), x, length=3)[0]

    x = struct(8, 16, sharding=place("data", "tensor"))
    w = struct(16, 16, sharding=place("tensor", None))
    compiled = jax.jit(step, out_shardings=place("data", "tensor")).lower(x, w).compile()
    found = count(Module(compiled.as_text()), {"data": 2, "tensor": 4})
    assert {(c.axes, c.count) for c in found.collectives} == {(("tensor",), 3)}
    assert found.flops == 3 * 2 * 8 * 16 * 16 / 8
    assert all(len(c.group) == 4 for c in found.collectives)
    np.testing.assert_array_equal(sorted({c.group for c in found.collectives})[0], [0, 1, 2, 3])


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="ENTRY"):
        Module("module @jit_f {}")
