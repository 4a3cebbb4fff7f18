"""Arrays of a layer as HTML figures: mixing tensors, collapse, what heads read, and the P² patterns of a head."""

import html
from collections.abc import Mapping

import numpy as np

from iha_jax.viz.drawing import diverging, image, sequential, tiled
from iha_jax.viz.summaries import collapse_summary, mixing_summary

_TENSORS = ("query", "key", "value")


def mixing_figures(arrays: Mapping[str, np.ndarray]) -> str:
    """Heat maps of "mixing/query", "mixing/key", "mixing/value" and "mixing/collapse"; "" where there are none."""
    tensors = {name: np.asarray(arrays[f"mixing/{name}"]) for name in _TENSORS if f"mixing/{name}" in arrays}
    collapse = arrays.get("mixing/collapse")
    if not tensors and collapse is None:
        return ""
    limit = max((float(np.abs(x).max()) for x in tensors.values()), default=0.0)
    figures = []
    for name, tensor in tensors.items():
        # One map [source head, head] for every pseudo-head.
        sheet = tiled(np.moveaxis(tensor, 2, 0), columns=min(4, tensor.shape[2]))
        found = mixing_summary(tensor)
        caption = (
            f"mixing of {name}: {found.from_copy:.2f} from copies (root mean square), {found.spread:.2f} spread over "
            f"pseudo-heads, effective rank {found.effective_rank:.1f} of {tensor.shape[0]}"
        )
        figures.append(_figure(diverging(sheet, limit), caption, least=7, most=280))
    note = (
        "Mixing: one map per pseudo-head, rows are source heads, columns the heads made of them; red is positive, blue "
        f"negative, full colour ±{limit:.2f}."
    )
    if collapse is not None:
        figures.append(_collapse_figure(np.asarray(collapse)))
    return f'<p class=note>{note}</p><div class="maps">{"".join(figures)}</div>'


def pattern_figures(arrays: Mapping[str, np.ndarray], heads: int = 2, tokens: int = 16) -> str:
    """Maps of "patterns/effective", and of "patterns/pseudo" the P² maps of the first heads, more of them folded away.

    Args:
      arrays: as `iha_jax.viz.pictures_of` gives them.
      heads: so many are in view.
      tokens: so many of the P² maps' tokens are drawn.
    """
    figures = []
    if (effective := arrays.get("patterns/effective")) is not None:
        effective = np.asarray(effective)
        limit = float(np.abs(effective).max())
        sheet = tiled(effective, columns=min(4, len(effective)))
        signed = bool((effective < 0).any())
        caption = (
            f"what each of {len(effective)} heads reads, {effective.shape[1]} tokens: rows queries, columns keys"
            + (f"; red adds, blue subtracts, full colour ±{limit:.2f}" if signed else f"; darkest {limit:.2f}")
        )
        figures.append(_figure(diverging(sheet, limit) if signed else sequential(sheet, limit), caption, least=2))
    parts = [f'<div class="maps">{"".join(figures)}</div>'] if figures else []
    if (pseudo := arrays.get("patterns/pseudo")) is not None and "mixing/query" in arrays:
        count = np.asarray(arrays["mixing/query"]).shape[2]
        shown = [_head_figure(head, np.asarray(one), count, tokens) for head, one in enumerate(pseudo)]
        parts.append(f'<div class="maps">{"".join(shown[:heads])}</div>')
        if shown[heads:]:
            parts.append(
                f"<details><summary>{len(shown) - heads} more heads</summary>"
                f'<div class="maps">{"".join(shown[heads:])}</div></details>'
            )
    return "".join(parts)


def _collapse_figure(collapse: np.ndarray) -> str:
    limit = float(np.abs(collapse).max())
    found = collapse_summary(collapse)
    used = ", ".join(f"head {head}: {number:.1f}" for head, number in enumerate(found.used))
    across = "" if collapse.ndim == 2 else f" of each of {collapse.shape[1]} source heads"
    caption = (
        f"collapse, full colour ±{limit:.2f}: rows heads, columns {collapse.shape[-1]} pseudo-heads{across}. "
        f"Pseudo-heads in use, {collapse.shape[-1]} if all count alike: {used}"
    )
    return _figure(diverging(collapse.reshape(len(collapse), -1), limit), caption, least=16, most=280)


def _head_figure(head: int, weights: np.ndarray, pseudo: int, tokens: int) -> str:
    """The P² maps of one head from its weights ``[T P, T P]``."""
    length = len(weights) // pseudo
    maps = weights.reshape(length, pseudo, length, pseudo).transpose(1, 3, 0, 2)[:, :, :tokens, :tokens]
    sheet = tiled(maps.reshape(pseudo**2, *maps.shape[2:]), columns=pseudo)
    limit = float(maps.max())
    caption = (
        f"head {head}, its {pseudo**2} patterns over {maps.shape[2]} tokens: down, pseudo-queries 0 to {pseudo - 1}; "
        f"across, pseudo-keys; darkest {limit:.2f}"
    )
    return _figure(sequential(sheet, limit), caption, least=3)


def _figure(pixels: np.ndarray, caption: str, least: int, most: int = 340) -> str:
    """A picture with its caption; a pixel has ``least`` to 24 CSS pixels, so that small maps are still seen."""
    width = min(most, max(least * pixels.shape[1], min(200, 24 * pixels.shape[1])))
    return f"<figure>{image(pixels, caption, width=width)}<figcaption>{html.escape(caption)}</figcaption></figure>"
