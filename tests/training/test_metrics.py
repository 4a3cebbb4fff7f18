"""Metrics on disk and on screen."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from iha_jax.training.display import Display, sparkline, status_line
from iha_jax.training.hardware import peak_flops
from iha_jax.training.metrics import Fanout, JsonLines, TensorBoard, read_json_lines
from iha_jax.training.mixing_statistics import mixing_statistics


def test_json_lines_continue_without_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for step in (1, 2, 3):
        writer.write(step, {"loss": step / 2, "rate": float("nan")})
    writer.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # cut off by a kill
    assert [line["step"] for line in read_json_lines(path)] == [1, 2, 3]
    writer = JsonLines(path, resume_step=2)
    writer.write(3, {"loss": 9.0})
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5, "rate": "nan"},
        {"step": 2, "loss": 1.0, "rate": "nan"},
        {"step": 3, "loss": 9.0},
    ]


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = Fanout([TensorBoard(tmp_path / "board"), JsonLines(tmp_path / "m.jsonl")])
    writer.write(5, {"loss": 1.5, "note": "text", "mfu": None})
    writer.close()
    events = b"".join(p.read_bytes() for p in (tmp_path / "board").iterdir())
    assert b"loss" in events
    assert b"note" not in events
    assert read_json_lines(tmp_path / "m.jsonl") == [{"step": 5, "loss": 1.5, "note": "text", "mfu": None}]


def test_display_without_a_terminal_prints_lines_and_a_summary():
    out = io.StringIO()
    display = Display(4, line_every=2, console=Console(file=out, width=100))
    display.start(0)
    for step in range(1, 5):
        display.update(
            step, status_line({"loss": 1.0 / step, "learning_rate": 1e-3, "tokens_per_second": 1234.0, "mfu": 0.5})
        )
    display.message("[saved]")
    display.completion("def f(", "x\x1b[31m)")
    display.summary("run", [("parameters", "12")], [4.0, 2.0])
    display.stop()
    text = out.getvalue()
    assert "step 2/4  loss 0.500  1,234 tok/s  MFU 50.0%  lr 1.0e-03" in text
    assert "step 3/4" not in text
    assert "[saved]" in text
    assert "\x1b" not in text
    assert "4.00 → 2.00" in text
    assert "parameters" in text


def test_sparkline():
    assert sparkline([3, 2, 1]) == "█▅▁"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([math.nan]) == ""
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_mixing_statistics_of_copies_and_of_known_tensors():
    copy = jnp.broadcast_to(jnp.eye(3)[..., None], (3, 3, 2))
    found = mixing_statistics(
        {"layers.0.attention.mixing_query": copy, "layers.0.attention.collapse": jnp.full((3, 2), 0.5)}
    )
    assert {name: float(value) for name, value in found.items()} == {
        "mixing/mixing_query/from_copy": 0.0,
        "mixing/mixing_query/spread": 0.0,
        "mixing/collapse/spread": 0.0,
    }
    moved = np.array(copy)
    moved[0, 0, 0] += 6.0  # one of 18 entries; its pair over p is (7, 1): variance 9 in one of 9 pairs
    stacked = jnp.stack([copy, jnp.asarray(moved)])  # two scanned layers
    found = mixing_statistics({"cycle.0.attention.mixing_key": stacked})
    np.testing.assert_allclose(found["mixing/mixing_key/from_copy"], (36 / 36) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(found["mixing/mixing_key/spread"], (9 / 18) ** 0.5, rtol=1e-6)
    assert mixing_statistics({"layers.0.mlp.up_kernel": copy}) == {}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12), ("NVIDIA H200", 989e12),
     ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA H100 PCIe", 756e12),
     ("NVIDIA H100 80GB HBM3", 989e12), ("cpu", None)],
)  # fmt: skip
def test_peaks(kind, peak):
    class Device:
        device_kind = kind

    assert peak_flops(Device()) == peak
