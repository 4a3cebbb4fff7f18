"""Pictures for a page that loads nothing: curves as SVG, matrices as PNG."""

import base64
import html
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Distinct for most eyes, in print too, and readable on white and on near-black; dashes say it again.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195")
DASHES = ("", "6 3", "2 2.5", "8 3 2 3", "10 4", "1 3", "5 2 1 2")

_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 34


class Series(NamedTuple):
    """One curve with its band.

    Attributes:
      label: for the tooltip.
      style: which of the colours and dashes.
      points: x, mean, low and high; low and high may be NaN.
    """

    label: str
    style: int
    points: Sequence[tuple[float, float, float, float]]


def line_chart(title: str, series: Sequence[Series], x_label: str, number: Callable[[float], str]) -> str:
    """Curves over a common x axis, as SVG that scales to its container.

    Args:
      title: read aloud in place of the picture.
      series: the curves.
      x_label: under the x axis.
      number: writes a value of the y axis.
    """
    finite = [(x, y) for s in series for x, *ys in s.points for y in ys if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_low, x_high = min(xs), max(xs)
    x_high = x_high if x_high > x_low else x_low + 1
    ticks = nice_ticks(min(ys), max(ys))
    y_low, y_high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))

    def at(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (y_high - y) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in ticks:
        y = at(x_low, tick).split(",")[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="axis" x="{_LEFT - 5}" y="{y}" dy="0.32em" text-anchor="end">'
            f"{html.escape(number(tick))}</text>"
        )
    base = _HEIGHT - _BOTTOM
    for tick in nice_ticks(x_low, x_high, whole=all(x == int(x) for x in xs)):
        if x_low <= tick <= x_high:
            x = at(tick, y_low).split(",")[0]
            parts.append(f'<text class="axis" x="{x}" y="{base + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
    )
    for s in series:
        colour, dash = COLOURS[s.style % len(COLOURS)], DASHES[s.style % len(DASHES)]
        band = [p for p in s.points if all(math.isfinite(v) for v in p)]
        if len(band) > 1:
            outline = [at(x, high) for x, _, _, high in band] + [at(x, low) for x, _, low, _ in reversed(band)]
            parts.append(f'<polygon fill="{colour}" fill-opacity="0.16" points="{" ".join(outline)}"/>')
        line = [at(x, mean) for x, mean, _, _ in s.points if math.isfinite(mean)]
        if len(line) == 1:
            x, y = line[0].split(",")
            parts.append(
                f'<circle fill="{colour}" cx="{x}" cy="{y}" r="3"><title>{html.escape(s.label)}</title></circle>'
            )
        else:
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" '
                f'points="{" ".join(line)}"><title>{html.escape(s.label)}</title></polyline>'
            )
    return "".join(parts) + "</svg>"


def key_sample(style: int) -> str:
    """The piece of line that stands beside a name in a legend."""
    return (
        f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true"><line x1="1" x2="29" y1="5" y2="5" stroke-width="3" '
        f'stroke="{COLOURS[style % len(COLOURS)]}" stroke-dasharray="{DASHES[style % len(DASHES)]}"/></svg>'
    )


def nice_ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that enclose a range, about ``count`` of them.

    Args:
      low: smallest value.
      high: largest value.
      count: wished number.
      whole: whether only whole numbers will do.
    """
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / max(1, count - 1)
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


# ------------------------------------------------------------------------------------------------------- matrices


def diverging(values: np.ndarray, limit: float) -> np.ndarray:
    """Blue for negative, white for 0, red for positive, full at ``±limit``: uint8 ``[..., 3]``."""
    x = np.clip(np.nan_to_num(values) / (limit or 1.0), -1, 1)[..., None]
    red, blue, white = np.array([178, 24, 43]), np.array([33, 102, 172]), np.full(3, 255)
    return np.round(white + np.abs(x) * (np.where(x > 0, red, blue) - white)).astype(np.uint8)


def sequential(values: np.ndarray, limit: float) -> np.ndarray:
    """White for 0 to dark blue at ``limit``: uint8 ``[..., 3]``."""
    x = np.sqrt(np.clip(np.nan_to_num(values) / (limit or 1.0), 0, 1))[..., None]
    return np.round(255 + x * (np.array([8, 48, 107]) - 255)).astype(np.uint8)


def linear(values: np.ndarray, limit: float) -> np.ndarray:
    """The same colours in equal steps from 0 to ``limit``, grey for NaN: uint8 ``[..., 3]``."""
    x = np.clip(np.nan_to_num(values) / (limit or 1.0), 0, 1)[..., None]
    colours = np.round(255 + x * (np.array([8, 48, 107]) - 255)).astype(np.uint8)
    return np.where(np.isnan(values)[..., None], np.uint8(200), colours)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 pixels ``[height, width, 3]``."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def image(pixels: np.ndarray, alt: str, width: int | None = None) -> str:
    """An ``img`` element of pixels ``[height, width, 3]``, drawn without smoothing.

    Args:
      pixels: uint8.
      alt: what it shows, in words.
      width: in CSS pixels, at most the container's; default that of the pixels.
    """
    data = base64.b64encode(png(pixels)).decode()
    size = pixels.shape[1] if width is None else width
    return f'<img class="map" alt="{html.escape(alt)}" style="width:{size}px" src="data:image/png;base64,{data}">'


def tiled(maps: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """Maps ``[count, R, C]`` side by side in rows of ``columns``, NaN between them."""
    count, height, width = maps.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap), np.nan)
    for i, one in enumerate(maps):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = one
    return sheet
