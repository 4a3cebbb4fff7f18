"""Configurations: checked together, overridden by name, and written as JSON."""

import dataclasses
import json
import pathlib

import pytest

from iha_jax.models import RopeConfig
from iha_jax.ops.rope import Llama3Scaling
from iha_jax.training.cli import config_in, override, parse
from iha_jax.training.config import OptimizerConfig, ParameterGroup, TrainConfig
from iha_jax.training.serialization import differences, from_json, from_plain, to_json, to_plain

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_survives_json(path):
    config = config_in(path, object)
    if not isinstance(config, TrainConfig):
        # A comparison: its results are filed under the experiments' values.
        for comparison in filter(None, (config, config.reduced)):
            for entry in comparison.entries:
                kind, values = type(entry.experiment), to_plain(entry.experiment)
                assert from_plain(kind, json.loads(json.dumps(values)), "experiment") == entry.experiment
        return
    assert config.name == path.stem
    assert from_json(TrainConfig, to_json(config)) == config


def test_json_keeps_unions_tuples_and_nones(tiny):
    model = dataclasses.replace(tiny().model, rope=RopeConfig(scaling=Llama3Scaling(original_max_position=32)))
    config = tiny(model=model, optimizer=OptimizerConfig(warmup_steps=1, clip_norm=None, groups=(ParameterGroup("x"),)))
    again = from_json(TrainConfig, to_json(config))
    assert again == config
    assert isinstance(again.model.rope.scaling, Llama3Scaling)
    assert isinstance(again.model.pattern, tuple)


def test_json_errors_name_the_place(tiny):
    plain = to_plain(tiny())
    plain["optimizer"]["peek_lr"] = 1.0
    with pytest.raises(ValueError, match=r"TrainConfig.optimizer has no field 'peek_lr'; did you mean 'peak_lr'"):
        from_json(TrainConfig, json.dumps(plain))
    plain = to_plain(tiny())
    plain["steps"] = "many"
    with pytest.raises(ValueError, match=r"TrainConfig.steps must be int, got 'many'"):
        from_json(TrainConfig, json.dumps(plain))


def test_differences():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == {"a.c": (2, 3), "d": (None, 4)}


def test_overrides(tiny):
    config = override(
        tiny(), ["--optimizer.peak-lr", "0.5", "--model.iha.window", "auto", "--data.sources.0.weight", "2"], "x"
    )
    assert config.optimizer.peak_lr == 0.5
    assert config.model.iha.window == "auto"
    assert config.data.sources[0].weight == 2.0
    assert dataclasses.replace(config, optimizer=tiny().optimizer, model=tiny().model, data=tiny().data) == tiny()


def test_misspelt_and_impossible_overrides_say_what_was_meant(tiny, tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(to_json(tiny()))
    for arguments, expected in (
        (["--optimizer.peak-lrr", "1"], "--optimizer.peak-lr"),
        (["--batch-size", "6", "--micro-batches", "4"], "micro_batches 4"),
        (["--steps", "many"], "many"),
        (["--data.sequence-length", "64"], "64 and 32"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            parse([str(path), *arguments])
        assert exit_info.value.code == 2
        assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_print_config_and_help(tiny, tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(to_json(tiny()))
    with pytest.raises(SystemExit) as exit_info:
        parse([str(path), "--steps", "9", "--print-config"])
    assert exit_info.value.code == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 9
    with pytest.raises(SystemExit):
        parse([str(path), "--help"])
    text = capsys.readouterr().out
    assert "--model.rope.theta" in text
    assert "floor" in text or "cosine" in text
    with pytest.raises(SystemExit, match="config file comes first"):
        parse(["--steps", "3"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        (
            {"directory": "gs://bucket/runs"},
            "directory must be a path in the file system, got the address 'gs://bucket",
        ),
        ({"batch_size": 6, "micro_batches": 4}, "micro_batches 4 and batch_size 6"),
        ({"optimizer": OptimizerConfig(warmup_steps=6)}, "below the 6 steps of the schedule, got 6"),
        ({"name": "a/b"}, "single folder name, got 'a/b'"),
        ({"z_loss": float("nan")}, "z_loss must be at least 0 and finite"),
    ],
)
def test_sizes_are_checked_together(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_learning_rates_are_checked():
    with pytest.raises(ValueError, match=r"got 0.1 with peak_lr 0.01"):
        OptimizerConfig(peak_lr=0.01, final_lr=0.1)
