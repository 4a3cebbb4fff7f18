"""The page and what it is made of: numbers by hand, well-formed, self-contained, and right in a browser."""

import html.parser
import math
import re
import struct
import zlib

import numpy as np
import pytest

from iha_jax.experiments.report import write_report
from iha_jax.experiments.runner import run_grid
from iha_jax.experiments.statistics import paired, spread
from iha_jax.viz.drawing import Series, diverging, line_chart, nice_ticks, png, sequential, tiled
from tests.experiments import browser
from tests.experiments.grids import comparison


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    output = tmp_path_factory.mktemp("grid")
    assert run_grid(comparison(), 3, output, "run <it>", lambda line: None)
    return write_report(comparison(), 3, output, "make <it>")


class Checker(html.parser.HTMLParser):
    """Tags must close in order; text and addresses are collected."""

    VOID = ("meta", "link", "img", "line", "circle", "polyline", "polygon")

    def __init__(self):
        super().__init__()
        self.open, self.words, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(page):
    checker = Checker()
    checker.feed(page.read_text())
    assert checker.open == []
    return checker, " ".join(" ".join(checker.words).split())


def test_the_page_is_well_formed_and_loads_nothing(page):
    checker, _ = parsed(page)
    assert all(address.startswith("data:") for address in checker.addresses)
    assert "<script" not in page.read_text()
    assert "@import" not in page.read_text()


def test_the_page_has_the_numbers(page):
    _, text = parsed(page)
    assert "Known & <sure>" in text
    # 0.8, 0.85, 0.9 against 0.7 with every seed: mean 0.85, deviation 0.05; differences 10, 15, 20 points.
    assert "mixed & more: 85.00 ± 5.00 %, +15.00 ± 5.00 points; better with 3 of 3 seeds" in text
    assert "plain 70.00 ± 0.00 % – 0.3000 ± 0.0000 –" in text
    assert "\N{MINUS SIGN}0.1500 ± 0.0500" in text  # the loss, lower and better
    assert "test accuracy without any skill: 50.00 %" in text
    assert "hard <1> plain 1,000 2.5 M – – 3.0 MiB" in text
    assert "make <it>" in text
    assert "run <it>" in text
    assert re.search(r"effective rank \d\.\d of 4", text)
    assert "jax 0." in text
    assert page.read_text().count("<polyline") == 4
    assert page.read_text().count("<tr>") > 12


def test_an_unfinished_grid_says_so(tmp_path):
    page = write_report(comparison(), 2, tmp_path, "command")
    assert "0 of 8 runs are finished" in parsed(page)[1]


# -------------------------------------------------------------------------------------------------------- pieces


def test_spread_and_pairs():
    assert spread([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3), 3))
    assert spread([5.0])[0] == 5
    assert math.isnan(spread([5.0]).deviation)
    assert math.isnan(spread([]).mean)
    both = paired({0: 1.0, 1: 5.0, 7: 9.0}, {1: 3.0, 0: 2.0, 5: 1.0})
    assert both.spread == pytest.approx((0.5, math.sqrt(4.5), 2))
    assert both.better == 1
    assert paired({0: 1.0}, {0: 2.0}, higher_is_better=False).better == 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.71, 0.89, [0.7, 0.75, 0.8, 0.85, 0.9]), (-3, 5, [-4, -2, 0, 2, 4, 6]), (0, 0, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_whole_ticks():
    assert nice_ticks(1, 3, whole=True) == [1, 2, 3]
    assert all(t == int(t) for t in nice_ticks(1, 87, whole=True))


def test_a_chart_puts_points_where_they_belong():
    nan = math.nan
    points = [(1, 0.0, nan, nan), (2, 0.5, 0.25, 0.75), (3, 1.0, 1.0, 1.0)]
    chart = line_chart(
        "a & b", [Series("s", 0, points), Series("dot", 1, [(2, 0.5, nan, nan)])], "epoch", "{:g}".format
    )
    assert 'aria-label="a &amp; b"' in chart
    line = [tuple(map(float, p.split(","))) for p in re.search(r'<polyline[^>]* points="([^"]*)"', chart)[1].split()]
    assert line[0][0] < line[1][0] < line[2][0]
    assert line[0][1] > line[1][1] > line[2][1]
    assert line[1] == pytest.approx(((line[0][0] + line[2][0]) / 2, (line[0][1] + line[2][1]) / 2))
    circle = re.search(r'<circle[^>]* cx="([^"]*)" cy="([^"]*)"', chart)
    assert (float(circle[1]), float(circle[2])) == line[1]
    assert chart.count("<polygon") == 1
    assert line_chart("empty", [Series("s", 0, [(1, nan, nan, nan)])], "x", str) == ""


def test_png_holds_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    data, chunks, at = png(pixels), {}, 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (5, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 16)
    assert not rows[:, 0].any()
    np.testing.assert_array_equal(rows[:, 1:].reshape(3, 5, 3), pixels)


def test_colours_and_tiles():
    np.testing.assert_array_equal(diverging(np.array([0.0, 2.0, -2.0]), 2)[0], [255] * 3)
    assert diverging(np.array(1.0), 1)[0] > diverging(np.array(1.0), 1)[2]
    assert diverging(np.array(-1.0), 1)[0] < diverging(np.array(-1.0), 1)[2]
    np.testing.assert_array_equal(sequential(np.array([0.0, 1.0]), 1), [[255] * 3, [8, 48, 107]])
    sheet = tiled(np.arange(12.0).reshape(3, 2, 2), columns=2)
    assert sheet.shape == (5, 5)
    np.testing.assert_array_equal(sheet[:2, 3:], [[4, 5], [6, 7]])
    assert np.isnan(sheet[2]).all()
    assert np.isnan(sheet[3:, 3:]).all()


# ------------------------------------------------------------------------------------------------------- a browser


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
@pytest.mark.parametrize("width", [1280, 375])
def test_in_a_browser(page, width):
    with browser.Browser(width, 900, phone=width < 500) as chromium:
        chromium.open(page.as_uri())
        assert chromium.evaluate("document.title") == "Known & <sure>"
        assert chromium.evaluate("innerWidth") == width
        # Nothing but what scrolls by itself may be wider than the window.
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        assert chromium.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        assert chromium.evaluate("document.querySelectorAll('svg.chart').length") == 2
        assert chromium.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 15
        assert chromium.complaints() == []
