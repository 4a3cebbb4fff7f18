"""The part of a report that looks inside: mixing tensors and patterns of attention of the first seed."""

import html
from collections.abc import Sequence

import numpy as np

from iha_jax.experiments.drawing import diverging, image, sequential, tiled
from iha_jax.experiments.runner import Cell
from iha_jax.viz import mixing_summary

# Pictures of pseudo-heads get large: so many heads, and so many tokens of each, are shown.
_HEADS, _TOKENS = 2, 8
_TENSORS = ("query", "key", "value", "collapse")


def looks_inside(cells: Sequence[Cell]) -> str:
    """HTML about the runs of the first seed that kept arrays; the first setting is open, the others folded."""
    first = min((cell.seed for cell in cells), default=0)
    by_setting: dict[str, list[str]] = {}
    for cell in cells:
        if cell.seed == first and (arrays := cell.arrays()):
            parts = []
            for place, found in _by_place(arrays).items():
                heading = ": ".join(part for part in (cell.entry.variant, place) if part)
                parts.append(f"<h4>{html.escape(heading)}</h4>{_mixing(found)}{_patterns(found)}")
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


def _mixing(arrays: dict[str, np.ndarray]) -> str:
    tensors = {name: arrays[f"mixing/{name}"] for name in _TENSORS if f"mixing/{name}" in arrays}
    if not tensors:
        return ""
    limit = max(float(np.abs(x).max()) for x in tensors.values())
    figures = []
    for name, tensor in tensors.items():
        if name == "collapse":
            # [N, P], or [N, N, P] with the pseudo-heads one beside the other.
            flat, numbers = (
                tensor.reshape(tensor.shape[0], -1),
                f"rows: heads; columns: {tensor.shape[-1]} pseudo-heads",
            )
        else:
            # One map [source head, head] for every pseudo-head.
            flat = tiled(np.moveaxis(tensor, 2, 0), columns=min(4, tensor.shape[2]))
            found = mixing_summary(tensor)
            numbers = (
                f"{found.from_copy:.2f} from copies (root mean square), {found.spread:.2f} spread over pseudo-heads, "
                f"effective rank {found.effective_rank:.1f} of {tensor.shape[0]}"
            )
        label = "collapse" if name == "collapse" else f"mixing of {name}"
        picture = image(diverging(flat, limit), f"{label}: {numbers}", width=min(280, 7 * flat.shape[1]))
        figures.append(f"<figure>{picture}<figcaption>{label}: {numbers}</figcaption></figure>")
    note = (
        f"One map per pseudo-head, rows are source heads, columns the heads made of them; red is positive, blue "
        f"negative, full colour ±{limit:.2f}."
    )
    return f'<p class=note>{note}</p><div class="maps">{"".join(figures)}</div>'


def _patterns(arrays: dict[str, np.ndarray]) -> str:
    figures = []
    if (effective := arrays.get("patterns/effective")) is not None:
        limit = float(np.abs(effective).max())
        sheet = tiled(effective, columns=min(4, len(effective)))
        figures.append(
            _figure(diverging(sheet, limit), f"what each of {len(effective)} heads reads, rows queries, columns keys")
        )
    if (pseudo := arrays.get("patterns/pseudo")) is not None:
        size = arrays["mixing/query"].shape[2] if "mixing/query" in arrays else 1
        shown = pseudo[:_HEADS, : _TOKENS * size, : _TOKENS * size]
        for head, one in enumerate(shown):
            figures.append(
                _figure(
                    sequential(one, float(one.max())),
                    f"head {head}: weights of {size} pseudo-keys (columns) a token for {size} pseudo-queries (rows) a "
                    f"token, first {len(one) // size} tokens",
                )
            )
    return f'<div class="maps">{"".join(figures)}</div>' if figures else ""


def _figure(pixels: np.ndarray, caption: str) -> str:
    picture = image(pixels, caption, width=max(200, min(320, 3 * pixels.shape[1])))
    return f"<figure>{picture}<figcaption>{html.escape(caption)}</figcaption></figure>"
