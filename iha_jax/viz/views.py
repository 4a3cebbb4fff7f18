"""What there is to see of a layer or a model, as objects that show themselves in a notebook."""

import dataclasses
import html
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from iha_jax.models.transformer import Transformer
from iha_jax.nn.projections import AttentionProjections
from iha_jax.viz.figures import mixing_figures, pattern_figures
from iha_jax.viz.patterns import layer_inputs, layer_number, pictures_of
from iha_jax.viz.summaries import CollapseSummary, MixingSummary, collapse_summary, mixing_summary

_STYLE = pathlib.Path(__file__).with_name("page.css")


@dataclasses.dataclass(frozen=True, eq=False)
class LayerView:
    """One attention layer and one input.

    Attributes:
      name: for people.
      arrays: as `pictures_of` gives them.
    """

    name: str
    arrays: Mapping[str, np.ndarray]

    @property
    def mixing(self) -> dict[str, MixingSummary]:
        """Numbers of the tensors "query", "key" and "value"; empty for a layer without mixing."""
        names = [name for name in ("query", "key", "value") if f"mixing/{name}" in self.arrays]
        return {name: mixing_summary(self.arrays[f"mixing/{name}"]) for name in names}

    @property
    def collapse(self) -> CollapseSummary | None:
        """Which pseudo-heads the collapse uses; None for a layer without one."""
        found = self.arrays.get("mixing/collapse")
        return None if found is None else collapse_summary(found)

    def figures(self) -> str:
        """HTML without a style of its own."""
        return mixing_figures(self.arrays) + pattern_figures(self.arrays)

    def _repr_html_(self) -> str:
        return _in_notebook(f"<h4>{html.escape(self.name)}</h4>{self.figures()}")


@dataclasses.dataclass(frozen=True, eq=False)
class ModelView:
    """The attention layers of a decoder and one input.

    Attributes:
      title: for people.
      layers: first to last.
      words: the input's tokens as text; may be empty.
    """

    title: str
    layers: tuple[LayerView, ...]
    words: tuple[str, ...] = ()

    def figures(self, notes: Sequence[str] = ()) -> str:
        """HTML without a style of its own.

        Args:
          notes: paragraphs of text under the title.
        """
        parts = [f"<h1>{html.escape(self.title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
        if self.words:
            shown = " ".join(f"<code>{index}&nbsp;{html.escape(word)}</code>" for index, word in enumerate(self.words))
            parts.append(f"<details open><summary>{len(self.words)} tokens</summary><p>{shown}</p></details>")
        parts.append(self._table())
        for index, layer in enumerate(self.layers):
            unfolded = " open" if index == 0 else ""
            parts.append(
                f"<details{unfolded}><summary><strong>{html.escape(layer.name)}</strong></summary>"
                f"{layer.figures()}</details>"
            )
        return "".join(parts)

    def page(self, notes: Sequence[str] = ()) -> str:
        """A page of its own that loads nothing.

        Args:
          notes: paragraphs of text under the title.
        """
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{html.escape(self.title)}</title><style>{page_style()}</style></head><body><main>"
            f"{self.figures(notes)}</main></body></html>\n"
        )

    def _repr_html_(self) -> str:
        return _in_notebook(self.figures())

    def _table(self) -> str:
        """The numbers of all mixing tensors; "" if no layer has any."""
        rows = []
        for layer in self.layers:
            used = layer.collapse
            for name, found in layer.mixing.items():
                numbers = [f"{found.from_copy:.3f}", f"{found.spread:.3f}", f"{found.effective_rank:.2f}"]
                numbers.append("" if used is None or name != "query" else f"{used.used.mean():.2f}")
                cells = "".join(f"<td class=n>{number}</td>" for number in numbers)
                rows.append(f"<tr><td>{html.escape(layer.name)}</td><td>{name}</td>{cells}</tr>")
        if not rows:
            return ""
        names = ("distance from copies", "spread over pseudo-heads", "effective rank", "pseudo-heads the collapse uses")
        head = "<th>layer</th><th>mixing of</th>" + "".join(f"<th class=n>{name}</th>" for name in names)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return f'<div class="scroll" tabindex="0">{table}</div>'


def look(layer: AttentionProjections, x: Float[Array, "1 T D"], name: str = "layer") -> LayerView:
    """A layer and what it makes of one input.

    Args:
      layer: any attention layer whose heads weigh values.
      x: what it reads, ``[1, T, D]``.
      name: for people.
    """
    graph, state = nnx.split(layer)
    arrays = jax.jit(lambda state, x: pictures_of(nnx.merge(graph, state), x))(state, x)
    return LayerView(name, {key: np.asarray(array) for key, array in arrays.items()})


def look_at_model(
    model: Transformer, tokens: Int[Array, "1 T"], words: Sequence[str] = (), title: str = "Inside a model"
) -> ModelView:
    """The attention layers of a decoder and what they make of one input.

    Args:
      model: the decoder.
      tokens: integers ``[1, T]``.
      words: the tokens as text.
      title: for people.
    """
    graph, state = nnx.split(model)

    def pictures(state, tokens: Array) -> dict[str, dict[str, Array]]:
        layers = layer_inputs(nnx.merge(graph, state), tokens)
        return {name: pictures_of(layer, x) for name, (layer, x) in layers.items()}

    # By number: a jitted function gives its dict back in the order of names, "layer 10" before "layer 2".
    found = sorted(jax.jit(pictures)(state, tokens).items(), key=lambda item: layer_number(item[0]))
    views = (LayerView(name, {key: np.asarray(array) for key, array in arrays.items()}) for name, arrays in found)
    return ModelView(title, tuple(views), tuple(words))


def page_style() -> str:
    """The style of pages, as CSS."""
    return _STYLE.read_text()


def _in_notebook(figures: str) -> str:
    # A notebook's own page keeps its style: ours is confined to what is ours.
    style = (
        ".iha-look figure{margin:0;min-width:0}.iha-look figcaption,.iha-look .note{font-size:.85em;opacity:.75}"
        ".iha-look .maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(18rem,100%),1fr));gap:1rem}"
        ".iha-look img{max-width:100%;height:auto;image-rendering:pixelated;background:#fff}"
        ".iha-look .n{text-align:right}"
    )
    return f'<style>{style}</style><div class="iha-look">{figures}</div>'
