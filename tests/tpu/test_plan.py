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
from tpu.bounds import Bounds, Network, seconds
from tpu.compiling import HbmUse, Plan, needed_bytes
from tpu.counts import Collective
from tpu.report import compared, to_json, to_text
from tpu.search import rank

ROOT = pathlib.Path(__file__).resolve().parents[2]
NETWORK = Network((4, 4, 8), (True, True, True), 100e9)
OPEN = Network((4, 4), (False, False), 50e9)


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


def test_what_binds():
    found = Bounds(compute=0.2, hbm=0.5, ici=0.1, model=0.15)
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


PLAN = Plan("a", "v5e:2x2", 4, 4, {"fsdp": 4}, 8, 1, 64, "full", 1000, 10, 1.0)


def test_reports():
    out = dataclasses.replace(PLAN, error="RESOURCE_EXHAUSTED: no", needed=3 * 2**30)
    assert "does not fit (needs 3.00 GiB of HBM)" in to_text(out)
    assert json.loads(to_json([out]))["fits"] is False
    hbm = HbmUse(arguments=1, outputs=2, temporaries=3, program=4, capacity=9)
    assert hbm.total == 10
    assert not dataclasses.replace(PLAN, hbm=hbm).fits
    slow, fast = (
        dataclasses.replace(
            PLAN, remat=name, hbm=dataclasses.replace(hbm, capacity=10), bounds=Bounds(s, 0.0, 0.0, 0.1)
        )
        for name, s in (("full", 0.4), ("none", 0.2))
    )
    lines = compared([out, slow, fast]).splitlines()
    assert [line.split()[3] for line in lines[2:]] == ["none", "full", "full"]
    assert "2,560" in lines[2]
    assert "50.0%" in lines[2]
    assert len(json.loads(to_json([slow, fast]))) == 2


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
