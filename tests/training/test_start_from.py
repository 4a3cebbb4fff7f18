"""A run that starts with another's parameters."""

import dataclasses

import chex
import jax
import pytest

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
