"""The part of a report that looks inside: mixing tensors and patterns of attention of the first seed."""

import html
from collections.abc import Sequence

import numpy as np

from iha_jax.experiments.runner import Cell
from iha_jax.viz.figures import mixing_figures, pattern_figures


def looks_inside(cells: Sequence[Cell]) -> str:
    """HTML about the runs of the first seed that kept arrays; the first setting is open, the others folded."""
    first = min((cell.seed for cell in cells), default=0)
    by_setting: dict[str, list[str]] = {}
    for cell in cells:
        if cell.seed == first and (arrays := cell.arrays()):
            parts = []
            for place, found in _by_place(arrays).items():
                heading = ": ".join(part for part in (cell.entry.variant, place) if part)
                parts.append(f"<h4>{html.escape(heading)}</h4>{mixing_figures(found)}{pattern_figures(found)}")
            by_setting.setdefault(cell.entry.setting, []).append(f"<section>{''.join(parts)}</section>")
    if not by_setting:
        return ""
    sections = "".join(
        f"<details{' open' if i == 0 else ''}><summary>{html.escape(setting)}</summary>{''.join(parts)}</details>"
        for i, (setting, parts) in enumerate(by_setting.items())
    )
    return f"<h2>Inside, seed {first}</h2>{sections}"


def _by_place(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Layer → its arrays by their names without the layer; "" where there is but one."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        *place, kind, name = path.split("/")
        found.setdefault("/".join(place), {})[f"{kind}/{name}"] = array
    return found
