"""Benchmarks run, and count what they say they count."""

import dataclasses
import re
import sys

import pytest

from benchmarks import attention, decode
from benchmarks import step as benchmark
from iha_jax.data import DataConfig
from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.serialization import to_json
from tests.jaxpr_flops import matmul_flops

CONFIG = TrainConfig(
    name="one",
    steps=10,
    batch_size=4,
    micro_batches=2,
    model=ModelConfig(
        vocab_size=31,
        max_length=32,
        num_layers=3,
        model_dim=16,
        num_heads=2,
        pattern=("iha", "local", "mha"),
        iha=IHAConfig(num_pseudo_heads=2, window=4),
    ),
    data=DataConfig(sequence_length=32),
    optimizer=OptimizerConfig(warmup_steps=2),
)


@pytest.mark.slow
def test_the_step_is_measured_against_products_of_its_own_sizes(tmp_path, capsys, monkeypatch):
    programs, flops = benchmark.products(CONFIG)
    assert len(programs) == 6
    for program in programs.values():
        assert matmul_flops(program.func, *program.args) == flops == 2 * 64 * 16 * 64
    paths = []
    for config in (CONFIG, dataclasses.replace(CONFIG, name="two")):
        paths.append(tmp_path / f"{config.name}.json")
        paths[-1].write_text(to_json(config))
    monkeypatch.setattr(sys, "argv", ["step.py", str(paths[0]), "--against", str(paths[1]), "--repeats", "2"])
    benchmark.main()
    out = capsys.readouterr().out
    for part in ("2 x 32 tokens, D 16, F 64", "1 x iha core", "1 x local core", "1 x mha core", "logits and loss"):
        assert part in out
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the matmul rate", out)]
    assert len(shares) == 2
    assert 0 < shares[0] <= shares[1]  # masked pairs and recomputation make executed FLOPs the larger
    assert re.search(r"one / two: step time \d", out)
    assert "model FLOPs 1.000" in out


@pytest.mark.slow
def test_decoding_is_compared(capsys, monkeypatch):
    small = {"context": 40, "tokens": 4, "batch": 2, "width": 16, "heads": 2, "vocabulary": 31, "rounds": 1}
    arguments = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["decode.py", "--pseudo-heads", "2", *arguments])
    decode.main()
    rows = re.findall(r"^(\S.*?) {2,}\d+ +([\d.]+) +([\d.]+) MB$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["IHA, P = 2", "MHA", "MHA, same windows"]
    assert rows[1][1] == "1.00"
    assert rows[0][2] == rows[2][2]  # as large as without pseudo-heads


def test_attention_is_put_beside_the_time_of_its_products_and_exponentials(capsys, monkeypatch):
    arguments = ["attention", "--shape", "1", "32", "2", "3", "8", "4", "--bound", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    attention.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[6:8] for line in lines[3:]] == [["iha", "virtual"], ["iha", "token"]]
    for line in lines[3:]:
        products, softmax = map(float, re.findall(r"(?:products|softmax) ([0-9.]+) ms", line))
        assert min(products, softmax) >= 0


def test_the_bound_counts_both_passes():
    products, _ = attention.products_of((1, 64, 4, 2, 16, 8), "virtual")
    scores = next(product for product in products if product.name == "scores")
    # One second a FLOP, none for an exponential: forward, again, and one product an operand's gradient.
    multiply, soften = attention.bound([scores], {"product": 1.0, "softmax": 0.0}, {"product": 1, "softmax": 1})
    assert (multiply, soften) == (4 * 2 * scores.outputs * 16, 0.0)
