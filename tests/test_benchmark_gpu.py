"""The GPU benchmark runs, and counts what it says it counts."""

import re

import numpy as np
import pytest

from benchmarks import gpu


@pytest.mark.parametrize("window", [None, 3])
def test_visible_pairs(window):
    shape = gpu.Shape(batch=2, tokens=10, heads=3, pseudo=4, dim=5, window=window)
    distance = np.arange(40)[:, None] - np.arange(40)[None]
    seen = (distance >= 0) & (distance < 4 * (window or 10))
    assert shape.pairs == seen.sum()
    assert shape.flops == 2 * (3 * 2 * 10 * 3 * 3 * 4 * 5 + 2 * 2 * seen.sum() * 3 * 5)


@pytest.mark.slow
def test_smoke(capsys):
    gpu.main(["--smoke"])
    out = capsys.readouterr().out
    assert len(re.findall(r"error at most [012]\.\d\d of materialised bfloat16's", out)) == 2
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| 32")]
    assert [row[3].strip() for row in rows] == list(gpu.VARIANTS) * 2
    assert all(float(cell) >= 0 for row in rows for cell in row[4:])


@pytest.mark.slow
def test_materialised_is_the_same_operation():
    shape = gpu.Shape(batch=1, tokens=16, heads=2, pseudo=4, dim=8, window=3)
    *operands, _ = gpu.inputs(shape, np.float32)
    expected = gpu.named("reference", "highest")(shape)(*operands)
    np.testing.assert_allclose(gpu.materialised(shape)(*operands), expected, atol=2e-5)


def test_a_wrong_kernel_is_found(monkeypatch):
    shape = gpu.Shape(batch=1, tokens=8, heads=2, pseudo=2, dim=32, window=None)
    wrong = gpu.Shape(batch=1, tokens=8, heads=2, pseudo=2, dim=32, window=2)
    monkeypatch.setattr(gpu, "fused", lambda shape: gpu.named("reference")(wrong))
    with pytest.raises(SystemExit, match="output of the fused kernels"):
        gpu.check(shape, np.float32)


@pytest.mark.slow
def test_tiles_are_timed(capsys):
    gpu.main(["--smoke", "--tune", "--windows", "auto"])
    out = capsys.readouterr().out
    for kernel in ("forward", "query", "key"):
        assert len(re.findall(rf"{kernel}: +[\d.]+ ms Tile", out)) >= 3
    assert out.count("<- default") == 3
