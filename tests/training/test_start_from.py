"""A run that starts with another's parameters."""

import dataclasses
import json

import chex
import jax
import pytest

from iha_jax.data import SourceConfig
from iha_jax.training.checkpoint import load_params, save_params
from iha_jax.training.config import OptimizerConfig
from iha_jax.training.display import Display
from iha_jax.training.loop import Trainer
from iha_jax.training.signals import StopSignals
from iha_jax.training.trained import open_trained

STILL = OptimizerConfig(peak_lr=0.0, final_lr=0.0, warmup_steps=1)


def run(config):
    with StopSignals(lambda text: None) as stop:
        trainer = Trainer(config, stop, Display(config.steps, bar=False, line_every=10**9))
        try:
            trainer.resume()
            trainer.compile()
            trainer.train()
            trainer.finish()
        finally:
            trainer.close()
    return open_trained(config.run_directory)


@pytest.mark.slow
def test_parameters_are_another_runs_and_the_rest_is_new(tiny, capsys):
    first = run(tiny(steps=4))
    source = first.config.run_directory
    for path, step in ((source, 4), (source / "checkpoints" / "2", 2)):
        name = f"from-{step}"
        second = run(tiny(name=name, steps=2, seed=7, optimizer=STILL, start_from=str(path)))
        assert f"starting with the parameters of {source}, step {step}" in capsys.readouterr().out
        assert second.step == 2
        chex.assert_trees_all_equal(second.params, load_params(source, first.params, step)[1])
    # Resumed, it goes on with its own.
    third = dataclasses.replace(second.config, steps=3, optimizer=dataclasses.replace(STILL, peak_lr=1e-2))
    resumed = run(third)
    assert "resuming" in capsys.readouterr().out
    assert resumed.step == 3


def test_parameters_put_there_by_hand(tiny):
    config = tiny(optimizer=STILL, steps=2)
    start = config.run_directory.with_name("start")
    made = Trainer(config, StopSignals(lambda text: None)).state.params
    changed = {path: x + 1 for path, x in made.items()}
    save_params(start, changed)
    step, read = load_params(start, changed)
    assert step == 0
    chex.assert_trees_all_equal(read, changed)
    with pytest.raises(FileExistsError, match="is there already"):
        save_params(start, made)
    chex.assert_trees_all_equal(load_params(start, changed)[1], changed)
    chex.assert_trees_all_equal(run(dataclasses.replace(config, start_from=str(start))).params, changed)


def test_a_start_that_does_not_fit(tiny):
    config = tiny()
    save_params(config.run_directory.with_name("start"), {"a": jax.numpy.zeros(3)})
    with pytest.raises(ValueError, match=r"has the parameters of another model: a has shape \(3,\) there and None"):
        run(dataclasses.replace(config, start_from=str(config.run_directory.with_name("start"))))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*nowhere"):
        run(dataclasses.replace(config, start_from=str(config.run_directory.with_name("nowhere"))))


@pytest.mark.slow
def test_fine_tuning_on_conversations(tiny, tmp_path):
    """Only the assistant's words count, and they are learnt; the loss is that of those words alone."""
    words = ["yes", "no", "maybe"]
    records = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": words[i % 3]}]}
        for i in range(300)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tiny(steps=60, batch_size=8, optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2))
    data = dataclasses.replace(
        config.data,
        sources=(SourceConfig("files", str(tmp_path / "chats.jsonl"), format="chat"),),
        packing="fit",
        chat_template="plain",
        sequence_length=48,
    )
    model = dataclasses.replace(config.model, max_length=48)
    save_params(config.run_directory.with_name("start"), Trainer(config, StopSignals(lambda text: None)).state.params)
    start = str(config.run_directory.with_name("start"))
    run(dataclasses.replace(config, data=data, model=model, start_from=start))
    lines = [json.loads(line) for line in (config.run_directory / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    # Three answers, equally likely before the number is understood: ln 3 for the first letter, next to nothing after.
    assert losses[0] > 4
    assert losses[-1] < 0.6
    held_out = [line["held_out/loss"] for line in lines if "held_out/loss" in line]
    assert held_out[-1] < 0.6
