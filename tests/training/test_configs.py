"""The configurations that ship: the twins match, and the paper's numbers are the paper's."""

import dataclasses
import pathlib

import pytest

from iha_jax.training.cli import load
from iha_jax.training.flops import account

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def _load(name):
    return load(str(CONFIGS / f"{name}.py"))


def test_the_tiny_twins_differ_in_attention_only_and_cost_the_same():
    iha, mha = _load("tiny"), _load("tiny_mha")
    same = dataclasses.replace(mha, name=iha.name, model=dataclasses.replace(mha.model, pattern=iha.model.pattern))
    assert same == iha
    costs = [account(c.model, tokens=c.data.sequence_length).attention_forward_per_token for c in (iha, mha)]
    assert costs[0] == pytest.approx(costs[1], rel=0.1)
    assert iha.model.iha_window == 16


def test_the_papers_model():
    config = _load("paper_2b4")
    model = config.model
    assert [model.layer_kinds.count(kind) for kind in ("iha", "mha")] == [21, 5]
    assert model.layer_kinds[-1] == "iha"
    assert model.iha_window == 10
    assert config.tokens_per_step == 2**20
    assert account(model).parameters / 1e9 == pytest.approx(2.37, abs=0.005)


def test_the_small_model_has_its_size():
    assert account(_load("small_124m").model).parameters / 1e6 == pytest.approx(124, abs=1)
