"""The planner: its command line, its arithmetic against sums by hand, and one real plan."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec

from iha_jax.data import DataConfig
from iha_jax.models import ModelConfig
from iha_jax.nn.dot_product import computed_pairs
from iha_jax.training.config import MeshConfig, TrainConfig
from iha_jax.training.flops import Split, account
from iha_jax.training.hardware import memory_of
from iha_jax.training.placement import Placement
from iha_jax.training.program import StepProgram
from tpu import plan, topology
from tpu.bounds import Bounds, Network, Traffic, bounds, seconds, traffic
from tpu.compiling import Flops, HbmUse, Plan, make_plan, needed_bytes
from tpu.counts import Collective, Counts
from tpu.report import compared, to_json, to_text
from tpu.search import rank, search, space_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
NETWORK = Network((4, 4, 8), (True, True, True), 100e9, 5e9)
OPEN = Network((4, 4), (False, False), 50e9, 3e9)


def place(sizes):
    """Row-major positions, as of a mesh that follows the torus."""

    def coordinates(position):
        found = []
        for size in reversed(sizes):
            found.insert(0, position % size)
            position //= size
        return found

    return coordinates


@pytest.mark.parametrize(
    ("kind", "group", "network", "expected"),
    [
        # 1 MB at every one of 8 along a ring: seven eighths arrive over two links.
        ("all-gather", tuple(range(8)), NETWORK, 1e6 * 7 / 8 / 200e9),
        ("all-reduce", tuple(range(8)), NETWORK, 2 * 1e6 * 7 / 8 / 200e9),
        ("reduce-scatter", tuple(range(8)), NETWORK, 1e6 * 7 / 200e9),
        # All 128: three rings.
        ("all-gather", tuple(range(128)), NETWORK, 1e6 * 127 / 128 / 600e9),
        # Half of a side, and a side without joined ends: a line has one link at its end.
        ("all-gather", tuple(range(4)), NETWORK, 1e6 * 3 / 4 / 100e9),
        ("all-gather", tuple(range(4)), OPEN, 1e6 * 3 / 4 / 50e9),
        ("all-gather", tuple(range(16)), OPEN, 1e6 * 15 / 16 / 100e9),
        ("collective-permute", (0, 1), OPEN, 1e6 / 50e9),
        ("all-to-all", tuple(range(8)), NETWORK, 1e6 * 1 / 100e9),
        ("all-reduce", (0,), OPEN, 0.0),
    ],
)
def test_seconds_of_collectives(kind, group, network, expected):
    one = Collective(kind, ("fsdp",), group, 10**6, 1, "")
    assert seconds(one, network, place(network.sizes)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "slices", "expected"),
    [
        # Of a sum of 1 MB over two slices a device gets a half twice: what it adds to, and what the other has added.
        ("all-reduce", 2, 1e6 / 5e9),
        ("all-reduce", 4, 2 * 0.75e6 / 5e9),
        ("all-gather", 4, 0.75e6 / 5e9),
        ("reduce-scatter", 4, 3e6 / 5e9),
        ("all-to-all", 4, 0.75e6 / 5e9),
        ("collective-permute", 2, 1e6 / 5e9),
    ],
)
def test_seconds_between_slices(kind, slices, expected):
    """Whatever the torus: devices of several slices have the same place in it."""
    group = tuple(128 * i for i in range(slices))
    one = Collective(kind, ("replica",), group, 10**6, 3, "", between_slices=True)
    assert seconds(one, NETWORK, lambda position: (0, 0, 0)) == pytest.approx(expected, rel=1e-12)
    within = dataclasses.replace(one, kind="all-gather", group=tuple(range(8)), axes=("fsdp",), between_slices=False)
    counts = Counts(0, 0, 0, (one, within))
    found = bounds(counts, 1e9, 1e12, 1e12, NETWORK, place(NETWORK.sizes))
    assert found.dcn == pytest.approx(3 * expected)
    assert found.ici == pytest.approx(3 * 1e6 * 7 / 8 / 200e9)
    assert (found.binds, found.step, found.mfu) == ("dcn", found.dcn, pytest.approx(1e-3 / found.dcn))
    rows = traffic(counts, NETWORK, place(NETWORK.sizes))
    assert [(row.axes, row.network, row.count, row.bytes) for row in rows] == [
        (("replica",), "dcn", 3, 3 * 10**6),
        (("fsdp",), "ici", 3, 3 * 10**6),
    ]


def test_what_binds():
    found = Bounds(compute=0.2, hbm=0.5, ici=0.1, dcn=0.3, model=0.15)
    assert (found.step, found.binds, found.mfu) == (0.5, "hbm", pytest.approx(0.3))


def test_topologies():
    assert topology.check("v5p:4x4x8") == ("v5p", (4, 4, 8))
    assert topology.check("v5p:4x12x16") == ("v5p", (4, 12, 16))
    assert topology.torus("v5p:4x4x8") == ((4, 4, 8), (True, True, True))
    assert topology.torus("v5p:2x2x4") == ((2, 2, 4), (False, False, False))
    assert topology.torus("v6e:8x16") == ((8, 16), (False, True))
    for name in ("v5e:3x3", "v5p:4x4", "v9:2x2", "v5e", "v6e:xx", "v5p:4x4x6"):
        with pytest.raises(ValueError, match=rf"unknown topology '{name}'; valid are\n.*v5e:2x2 v5e:2x4"):
            topology.check(name)
    with pytest.raises(ValueError, match="'cpu': known are"):
        memory_of("cpu")
    assert topology.describe("v5e:2x2", 1) == "v5e:2x2"
    assert topology.describe("v5e:2x2", 3) == "3 slices of v5e:2x2"
    with pytest.raises(ValueError, match="slices must be at least 1, got 0"):
        topology.devices_of("v5e:2x2", 0)
    # 6.4 and 25.6 Tbit/s for 256 chips, 50 Gbit/s for one.
    assert memory_of("TPU v5 lite").dcn_bandwidth == 6.4e12 / 8 / 256
    assert memory_of("TPU v6 lite").dcn_bandwidth == 25.6e12 / 8 / 256
    assert memory_of("TPU v5").dcn_bandwidth == 50e9 / 8


def test_the_compilers_own_words():
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory. Used 40.23G of 15.75G hbm. Exceeded"
    assert needed_bytes(text) == round(40.23 * 2**30)
    assert needed_bytes("RESOURCE_EXHAUSTED: something else") is None


SMALL = TrainConfig(
    name="small",
    batch_size=16,
    steps=2000,
    model=ModelConfig(vocab_size=256, max_length=64, num_layers=2, model_dim=64, num_heads=4, pattern=("iha", "mha")),
    data=DataConfig(sequence_length=64),
)


def test_meshes_are_ranked_and_divide():
    found = rank(SMALL, 16, 1, 8)
    for mesh in found:
        assert mesh.data * mesh.fsdp * mesh.context * mesh.tensor == 8
        assert mesh.tensor in (1, 2, 4)
        Placement(mesh).check(dataclasses.replace(SMALL, mesh=mesh))
    assert MeshConfig(fsdp=8) in found
    # With eight rows nothing but rows need be split; with one, nothing can be.
    assert all(mesh.data * mesh.fsdp == 1 for mesh in rank(SMALL, 1, 1, 8))
    assert rank(SMALL, 1, 1, 7) == []


def test_meshes_over_slices():
    """The replica axis goes over the slices, the others are within them."""
    found = rank(SMALL, 16, 1, 8, slices=2)
    for mesh in found:
        assert mesh.replica == 2
        assert mesh.data * mesh.fsdp * mesh.context * mesh.tensor == 4
        Placement(mesh).check(dataclasses.replace(SMALL, mesh=mesh))
    assert MeshConfig(replica=2, fsdp=4) in found
    # Copies of parameters within a slice would send as many bytes between slices, from every device.
    assert found.index(MeshConfig(replica=2, fsdp=4)) < found.index(MeshConfig(replica=2, data=4, fsdp=1))
    # Two rows for two slices: within them they cannot be split.
    assert all(mesh.data * mesh.fsdp == 1 for mesh in rank(SMALL, 2, 1, 8, slices=2))
    assert rank(SMALL, 1, 1, 8, slices=2) == []


def test_a_search_plans_for_the_slices(monkeypatch):
    asked = []

    def plan_of(config, name, price, slices):
        asked.append((config.mesh, name, price, slices))
        return dataclasses.replace(PLAN, error="RESOURCE_EXHAUSTED: no")

    monkeypatch.setattr("tpu.search.make_plan", plan_of)
    monkeypatch.setattr(topology, "devices_of", lambda name, slices: [None] * 4 * slices)
    space = space_of(SMALL, [], [], ["full"], 3)
    assert len(search(SMALL, "v5e:2x2", space, 1.5, lambda text: None, slices=2)) == 3
    assert asked == [(mesh, "v5e:2x2", 1.5, 2) for mesh in rank(SMALL, 16, 1, 8, slices=2)[:3]]
    odd = dataclasses.replace(space, batch_sizes=(5,))
    with pytest.raises(ValueError, match=r"nothing to try on 2 slices of v5e:2x2: no mesh divides .* \(5,\)"):
        search(SMALL, "v5e:2x2", odd, None, lambda text: None, slices=2)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(replica=4, fsdp=2)], ids=str)
def test_the_replica_axis_must_match_the_slices(mesh, monkeypatch):
    slices = 2 if mesh.replica == 1 else 3
    monkeypatch.setattr(topology, "devices_of", lambda name, slices: jax.devices())
    message = rf"mesh.replica {mesh.replica} cannot go over {slices} slices: .* give --mesh.replica {slices}"
    with pytest.raises(ValueError, match=message):
        make_plan(dataclasses.replace(SMALL, mesh=mesh), "v5e:2x2", slices=slices)


def test_shapes_are_laid_out_and_nothing_is_allocated():
    config = dataclasses.replace(SMALL, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    program = StepProgram(config, Placement(config.mesh))
    before = len(jax.live_arrays())
    state, batch = program.state_shapes(), program.batch_shapes()
    assert len(jax.live_arrays()) == before
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    assert state.params["layers.0.mlp.up_kernel"].sharding.spec == PartitionSpec("fsdp", "tensor")
    assert batch["inputs"].shape == (1, 16, 64)
    assert batch["inputs"].sharding.shard_shape((1, 16, 64)) == (1, 4, 64)


def test_executed_flops_on_a_mesh():
    """Rows and heads split evenly; where tokens are, a window layer's part has a halo, and a global one's all keys."""
    model = SMALL.model
    whole, rows = account(model, 16), account(model, 16, split=Split(rows=4))
    assert rows.model_training_per_token == whole.model_training_per_token
    assert account(model, 4).executed_training_per_token == rows.executed_training_per_token
    # Without causal skipping: every query with every key, in each of four parts.
    assert computed_pairs(2, 4, 16, True, None, 64) == (16 * 64, False)
    mha = dataclasses.replace(model, pattern=("mha",))
    # Causal global layers deal their 64 tokens out in 4 ranges, each with all keys up to its end: (1 + 2 + 3 + 4) / 4²
    # of the whole square.
    split, whole = account(mha, 2, split=Split(tokens=4)), account(mha, 2)
    saved = 6 * 2 * 64 * (64 - 64 * 10 / 16) * 4 * 16 * 2 / 64
    assert split.executed_training_per_token == pytest.approx(whole.executed_training_per_token - saved, rel=1e-12)


PLAN = Plan("a", "v5e:2x2", 1, 4, 4, {"fsdp": 4}, 8, 1, 64, "full", 1000, 10, 1.0)


def test_reports():
    out = dataclasses.replace(PLAN, error="RESOURCE_EXHAUSTED: no", needed=3 * 2**30)
    assert "does not fit (needs 3.00 GiB of HBM)" in to_text(out)
    assert json.loads(to_json([out]))["fits"] is False
    hbm = HbmUse(arguments=1, outputs=2, temporaries=3, program=4, capacity=9)
    assert hbm.total == 10
    assert not dataclasses.replace(PLAN, hbm=hbm).fits
    slow, fast = (
        dataclasses.replace(
            PLAN, remat=name, hbm=dataclasses.replace(hbm, capacity=10), bounds=Bounds(s, 0.0, 0.0, 0.0, 0.1)
        )
        for name, s in (("full", 0.4), ("none", 0.2))
    )
    lines = compared([out, slow, fast]).splitlines()
    assert [line.split()[3] for line in lines[2:]] == ["none", "full", "full"]
    assert "2,560" in lines[2]
    assert "50.0%" in lines[2]
    assert len(json.loads(to_json([slow, fast]))) == 2


def test_reports_of_several_slices():
    rows = (
        Traffic("all-reduce", ("replica",), 7, 2 * 10**9, 0.6, "dcn"),
        Traffic("all-gather", ("fsdp",), 9, 3 * 10**9, 0.1, "ici"),
    )
    two = dataclasses.replace(
        PLAN,
        slices=2,
        chips=8,
        devices=8,
        mesh={"replica": 2, "fsdp": 4},
        hbm=HbmUse(1, 1, 1, 1, capacity=9),
        flops=Flops(1e12, 1e12, 0.0, 1e12, 1e12, 1e12, 1.0),
        hbm_traffic=10**9,
        collectives=rows,
        bounds=Bounds(0.2, 0.3, 0.1, 0.6, 0.15),
    )
    text = to_text(two)
    assert "a on 2 slices of v5e:2x2: 8 chips, mesh replica=2 fsdp=4\n" in text
    lines = {tuple(line.split()[:2]): line.split() for line in text.splitlines() if line}
    assert lines["all-reduce", "replica"] == ["all-reduce", "replica", "DCN", "7", "2.000", "600.00"]
    assert lines["all-gather", "fsdp"] == ["all-gather", "fsdp", "ICI", "9", "3.000", "100.00"]
    assert lines["ICI", "100.00"][2:4] == ["3.00", "GB"]
    assert lines["DCN", "600.00"][2:4] == ["2.00", "GB"]
    assert "DCN binds: at least 600.0 ms a step" in text
    assert "25.0% MFU" in text
    found = json.loads(to_json([two]))
    assert (found["slices"], found["binds"], found["bounds"]["dcn"]) == (2, "dcn", 0.6)
    assert [c["network"] for c in found["collectives"]] == ["dcn", "ici"]
    assert "DCN ms" in compared([two])
    one = dataclasses.replace(two, slices=1, collectives=rows[1:])
    assert "DCN" not in to_text(dataclasses.replace(one, bounds=Bounds(0.2, 0.3, 0.1, 0.0, 0.15)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c.py", "--topology", "v5e:3x5"], "valid are"),
        (["no-such.py", "--topology", "v5e:2x2"], "no config at 'no-such.py'"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(plan, "prepare_environment", lambda: None)
    assert plan.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_several_values_need_a_search(capsys):
    with pytest.raises(SystemExit):
        plan.main(["c.py", "--topology", "v5e:2x2", "--batch", "8", "16"])
    assert "--batch need --search" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_plan():
    pytest.importorskip("libtpu")
    if jax.__version_info__ < (0, 8):
        pytest.skip("jax 0.7's libtpu dies when it compiles without a TPU")
    command = [sys.executable, "-m", "tpu.plan", "configs/tiny.py", "--topology", "v5e:2x2", "--json", "--price", "1.2"]
    model = ["--model.scan-layers", "--model.dtype", "bfloat16", "--batch", "8", "--remat", "full"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run([*command, *model], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["mesh"] == {"fsdp": 4}
    assert found["flops"]["executed"] == pytest.approx(found["flops"]["accounted"], rel=0.02)
    assert {tuple(c["axes"]) for c in found["collectives"]} == {("fsdp",)}
    assert found["dollars_per_step"] == pytest.approx(found["step_seconds"] / 3600 * 1.2 * 4)


@pytest.mark.slow
def test_a_real_plan_of_two_slices(monkeypatch):
    """Gradients cross the network between slices once, each device its part; within a slice all is as in one alone."""
    pytest.importorskip("libtpu")
    if jax.__version_info__ < (0, 8):
        pytest.skip("jax 0.7's libtpu dies when it compiles without a TPU")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Every device's part of a matrix fills whole tiles of 8 by 128 floats: buffers between slices are of whole tiles.
    width, vocabulary, layers = 512, 256, 2
    model = dataclasses.replace(SMALL.model, model_dim=width, mlp_dim=width, num_layers=layers, pattern=("mha",))
    config = dataclasses.replace(SMALL, model=model)
    two, one = (
        make_plan(
            dataclasses.replace(config, batch_size=8 * slices, mesh=MeshConfig(replica=slices)),
            "v5e:2x2",
            slices=slices,
        )
        for slices in (2, 1)
    )
    assert (two.chips, two.mesh) == (8, {"replica": 2, "fsdp": 4})
    # Four matrices of attention and two of the feed-forward network, and the embedding, as float32.
    matrices = 4 * (6 * layers * width**2 + vocabulary * width) // 4
    # Scales of two norms in a layer and one at the end, whole on every device, and a few sums; in tiles.
    scales = 4 * (2 * layers + 1) * width
    (crossing,) = [row for row in two.collectives if row.network == "dcn"]
    assert (crossing.kind, crossing.axes) == ("all-reduce", ("replica",))
    assert matrices + scales <= crossing.bytes <= matrices + scales + 4096
    assert two.bounds is not None
    assert two.bounds.dcn == pytest.approx(crossing.bytes / 3.125e9)
    assert two.bounds.binds == "dcn"
    assert not [row for row in one.collectives if row.network == "dcn"]

    def within(plan, *kinds):
        assert {row.axes for row in plan.collectives if row.network == "ici"} == {("fsdp",)}
        return sum(row.bytes for row in plan.collectives if row.network == "ici" and row.kind in kinds)

    assert within(two, "all-gather") == pytest.approx(within(one, "all-gather"), rel=0.03)
    sums = ("all-reduce", "reduce-scatter")
    assert within(two, *sums) == pytest.approx(within(one, *sums), rel=0.03)
    assert one.bounds is not None
    assert two.bounds.ici == pytest.approx(one.bounds.ici, rel=0.03)
    assert two.flops is not None
    assert one.flops is not None
    assert two.flops.executed == pytest.approx(2 * one.flops.executed)
