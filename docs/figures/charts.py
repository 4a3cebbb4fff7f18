"""Line charts as plain SVG, no dependencies: what the scripts of this folder draw with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, FAINT, SOFT = "#1f2933", "#9aa5b1", "#e4e7eb"


@dataclass(frozen=True)
class Line:
    """A named line of points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Chart:
    """A panel; its axes start at 0 and end at round numbers."""

    title: str
    x_label: str
    lines: tuple[Line, ...]


def figure(charts: Sequence[Chart], width: int = 340, height: int = 270) -> str:
    """Panels side by side, as an SVG document."""
    panels = "".join(
        f'<g transform="translate({i * width} 0)">{_panel(chart, width, height)}</g>' for i, chart in enumerate(charts)
    )
    total = width * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="Helvetica, Arial, '
        f'sans-serif"><rect width="{total}" height="{height}" fill="white"/>{panels}</svg>\n'
    )


def _panel(chart: Chart, width: int, height: int) -> str:
    left, right, top, bottom = 52, width - 22, 44, height - 44
    x_ticks = _ticks(max(x for line in chart.lines for x in line.xs))
    y_ticks = _ticks(max(y for line in chart.lines for y in line.ys))

    def x_at(x: float) -> float:
        return left + (right - left) * x / x_ticks[-1]

    def y_at(y: float) -> float:
        return bottom - (bottom - top) * y / y_ticks[-1]

    parts = [_text(left - 30, 22, chart.title, 14, "start", weight="bold")]
    for tick in y_ticks:
        parts.append(
            f'<line x1="{left}" y1="{y_at(tick):.1f}" x2="{right}" y2="{y_at(tick):.1f}" stroke="{SOFT}"/>'
            + _text(left - 6, y_at(tick) + 4, _short(tick), 11, "end")
        )
    parts += [_text(x_at(tick), bottom + 16, _short(tick), 11) for tick in x_ticks]
    parts.append(_text((left + right) / 2, height - 10, chart.x_label, 12))
    for line in chart.lines:
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="2.2"/>')
    for i, line in enumerate(chart.lines):
        y = top + 10 + 18 * i
        parts.append(f'<rect x="{left + 10}" y="{y - 6}" width="16" height="4" fill="{line.colour}"/>')
        parts.append(_text(left + 32, y, line.name, 12, "start"))
    return "".join(parts)


def _text(x: float, y: float, words: str, size: int, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def _ticks(largest: float) -> list[float]:
    """From 0 past the largest value, in four to eight steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(largest))
    step = next(s * power for s in (0.1, 0.2, 0.5, 1.0, 2.0) if largest / (s * power) <= 7)
    return [i * step for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
