"""Benchmarks reach a trained model: from a run's directory to answers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from iha_jax.data import DataConfig
from iha_jax.evaluation.answering import model_answerer
from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.ruler.__main__ import main
from iha_jax.evaluation.sampling import Sampling
from iha_jax.models import IHAConfig, ModelConfig, Transformer
from iha_jax.training.checkpoint import Checkpoints
from iha_jax.training.config import CheckpointConfig, TrainConfig
from iha_jax.training.serialization import to_json
from iha_jax.training.state import ModelFunctions, initial_state
from iha_jax.training.trained import open_trained

MODEL = ModelConfig(
    vocab_size=258,
    max_length=1024,
    num_layers=1,
    model_dim=8,
    num_heads=2,
    pattern=("iha",),
    iha=IHAConfig(num_pseudo_heads=2, window=4),
)


class NoOptimizer:
    @staticmethod
    def init(params):
        return {"count": jnp.int32(0)}


class Nowhere:
    def get_state(self):
        return b"{}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one checkpoint, of an untrained model."""
    folder = str(tmp_path_factory.mktemp("runs"))
    data = DataConfig(sequence_length=32)
    config = TrainConfig(name="small", directory=folder, model=MODEL, steps=2000, data=data)
    config.run_directory.mkdir()
    (config.run_directory / "config.json").write_text(to_json(config))
    functions = ModelFunctions(Transformer(MODEL, rngs=jax.random.key(1)))
    state = dataclasses.replace(initial_state(functions, NoOptimizer, 0), step=jnp.int32(3))
    checkpoints = Checkpoints(config.run_directory / "checkpoints", CheckpointConfig(asynchronous=False))
    checkpoints.save(state, Nowhere(), {}, None)
    checkpoints.close()
    return config.run_directory


def test_a_checkpoint_answers(run):
    model = model_answerer(run)
    assert model.name == "small, step 3"
    assert model.tokenizer.vocab_size == 258
    prompts = ["def f(", "x"]
    answers = model(prompts, max_new_tokens=6)
    assert answers == model(prompts, max_new_tokens=6)
    assert len(answers) == 2
    drawn = model.sample(prompts, num_samples=3, max_new_tokens=6, seed=1, temperature=1.0)
    assert [len(texts) for texts in drawn] == [3, 3]
    assert len(set(drawn[0])) == 3
    assert drawn == model.sample(prompts, num_samples=3, max_new_tokens=6, seed=1, temperature=1.0)
    longest = max(answers, key=len)
    stopped = model(prompts, max_new_tokens=6, stop=[longest[2]])
    assert stopped[answers.index(longest)] == longest[: longest.index(longest[2])]


def test_prompts_that_are_too_long_lose_their_beginning_and_are_counted(run):
    whole, cut = model_answerer(run, max_length=20), model_answerer(run, max_length=20, truncate=True)
    long, short = "a text of forty bytes or so, and a tail", "tail"
    with pytest.raises(ValueError, match="max_length=20"):
        whole([long], max_new_tokens=6)
    assert cut([long, short], max_new_tokens=6)[1] == whole([short], max_new_tokens=6)[0]
    assert cut.truncated == 1
    # What is left are the last 14 tokens, the start of the document gone with the beginning.
    [[kept]] = Generator.of(open_trained(run)).complete([list(long[-14:].encode())], Sampling(max_new_tokens=6))
    assert cut([long], max_new_tokens=6) == [kept.text]
    assert cut.truncated == 2


@pytest.mark.slow
def test_ruler_from_a_checkpoint(run, tmp_path, capsys):
    arguments = [str(run), "--tasks", "vt", "--lengths", "600", "--samples", "2", "--depths", "50"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "vt" in capsys.readouterr().out
    assert "RULER, small, step 3" in (tmp_path / "report.html").read_text()
    assert main([str(run), "--tasks", "vt", "--lengths", "1100", "--samples", "1", "--out", str(tmp_path)]) == 0
    assert "above 1024 are beyond" in (tmp_path / "report.html").read_text()
