"""The table of measured tile sizes: read, written, obeyed; and the command that fills it."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import pytest

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from iha_jax.ops import forms, tune, tuning
from iha_jax.ops.block_sizes import Sizes
from iha_jax.ops.tune import Measurement


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    path = tmp_path / "nested" / "table.json"
    monkeypatch.setenv("IHA_JAX_TUNING", str(path))
    return path


def problem(tokens=64, window=None):
    x = jnp.zeros((1, tokens, 4, 8))
    return tune.problem_of(x, x, x, HeadMixing.copy(4, 2), window=window)


def stripes(problem):
    return len(forms.choose(problem)[0].slabs)


def this_device():
    return jax.devices()[0].device_kind


def test_without_a_table_the_defaults_hold():
    assert tuning.sizes_for(problem()) == Sizes()


def test_what_is_added_is_used_for_that_problem_on_that_device(table):
    default = stripes(problem(512))
    tuning.add(table, this_device(), problem(512), Sizes(stripes=2))
    tuning.add(table, "TPU v9", problem(256), Sizes(stripes=2))
    assert default == 8
    assert stripes(problem(512)) == 2
    assert stripes(problem(256)) == 8
    assert tuning.sizes_for(problem(512)) == Sizes(stripes=2)


def test_adding_keeps_what_is_there(table):
    tuning.add(table, this_device(), problem(64), Sizes(stripes=2))
    tuning.add(table, this_device(), problem(128), Sizes(stripes=4))
    tuning.add(table, this_device(), problem(64), Sizes(stripes=3))
    assert tuning.sizes_for(problem(64)).stripes == 3
    assert tuning.sizes_for(problem(128)).stripes == 4
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_forced_sizes_go_before_the_table_and_end(table):
    tuning.add(table, this_device(), problem(512), Sizes(stripes=2))
    with tuning.force(Sizes(stripes=4)):
        assert stripes(problem(512)) == 4
    assert stripes(problem(512)) == 2


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"version": 2, "devices": {}}',
        '{"version": 1, "devices": {"cpu": {"x": {"stripes": 0}}}}',
        '{"version": 1, "devices": {"cpu": {"x": {"stripes": "many"}}}}',
        '{"version": 1, "devices": {"cpu": {"x": {"unknown": 1}}}}',
        '{"version": 1}',
    ],
)
def test_a_table_that_is_none_says_what_to_do_and_stays(table, content):
    table.parent.mkdir()
    table.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json is not a table of tile sizes .* Delete it"):
        tuning.sizes_for(problem())
    with pytest.raises(ValueError, match="not a table"):
        tuning.add(table, "cpu", problem(), Sizes())
    assert table.read_text() == content


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="local_score_bytes must be a positive whole number, got 0"):
        Sizes(local_score_bytes=0)
    with pytest.raises(ValueError, match="global_chunk must be a multiple of 128, got 200"):
        Sizes(global_chunk=200)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_candidates_differ_and_begin_with_the_default(fused, window):
    found = tune.candidates(fused, window)
    assert found[0] == Sizes()
    assert len(set(found)) == len(found) > 3


@pytest.mark.parametrize("window", [None, 5])
def test_every_candidate_computes_the_same(window):
    x = jax.random.normal(jax.random.key(0), (3, 1, 96, 4, 8))
    mixing = HeadMixing.copy(4, 2)
    default = interleaved_head_attention(*x, mixing, window=window)
    for score_bytes, stripes in [(1, 1), (2**10, 3), (2**30, 8)]:
        sizes = Sizes(local_score_bytes=score_bytes, global_score_bytes=score_bytes, stripes=stripes)
        with tuning.force(sizes):
            chex.assert_trees_all_close(interleaved_head_attention(*x, mixing, window=window), default, atol=1e-5)


def test_the_default_is_kept_unless_another_is_clearly_faster():
    default, other = Sizes(), Sizes(stripes=4)
    close = [Measurement(default, 1.0), Measurement(other, 0.98)]
    clear = [Measurement(default, 1.0), Measurement(Sizes(stripes=2), None), Measurement(other, 0.9)]
    assert tune.best_of(close).sizes == default
    assert tune.best_of(clear).sizes == other


SHAPE = ["--batch", "1", "--tokens", "64", "--heads", "2", "--pseudo", "2", "--head-dim", "8"]
COMMAND = [*SHAPE, "--dtype", "float32", "--repeats", "2"]


def test_the_command_measures_and_writes_what_is_then_read(table, capsys):
    tune.main(COMMAND)
    printed = capsys.readouterr().out
    assert f"written to {table}" in printed
    assert printed.count("<- best") == 1
    ((key, sizes),) = json.loads(table.read_text())["devices"][this_device()].items()
    x = jnp.zeros((1, 64, 2, 8))
    found = tune.problem_of(x, x, x, HeadMixing.copy(2, 2), rope=Rope())
    assert key == tuning.key_of(found)
    assert tuning.sizes_for(found) == Sizes(**sizes)


def test_a_dry_run_writes_nothing(table, capsys):
    tune.main([*COMMAND, "--dry-run", "--window", "4", "--rope", "none", "--causal", "token"])
    assert not table.exists()
    assert "x  default" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["batch", "tokens", "heads", "pseudo", "head-dim", "kv-heads", "window", "repeats"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5"])
def test_sizes_are_positive_whole_numbers(table, capsys, name, value):
    with pytest.raises(SystemExit):
        tune.main([*COMMAND, f"--{name}={value}"])
    assert f"--{name}: expected a positive whole number, got '{value}'" in capsys.readouterr().err


def test_the_command_names_bad_arguments(table):
    with pytest.raises(SystemExit, match=r"error: .*kv_heads|error: .*K=3"):
        tune.main([*COMMAND, "--kv-heads", "3"])
    table.parent.mkdir()
    table.write_text("mine")
    with pytest.raises(SystemExit, match=r"error: .*not a table"):
        tune.main(COMMAND)
    assert table.read_text() == "mine"
    other = table.with_name("other.json")
    other.write_text("mine too")
    table.unlink()
    with pytest.raises(SystemExit, match=r"error: .*other\.json is not a table"):
        tune.main([*COMMAND, "--out", str(other)])
    assert other.read_text() == "mine too"


def test_measuring_survives_sizes_that_do_not_compile(monkeypatch):
    def attend(x):
        if tuning.sizes_for(problem()).stripes == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")
        return x * 2

    sizes = [Sizes(), Sizes(stripes=3), Sizes(stripes=4)]
    found = tune.measure(attend, (jnp.ones(3),), sizes, 2)
    assert [m.sizes for m in found] == sizes
    assert found[1].seconds is None
    assert dataclasses.astuple(found[0])[1] == found[2].seconds  # one program, run once a turn
