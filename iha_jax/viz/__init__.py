"""Looking inside: patterns of attention, mixing tensors, and which pseudo-heads the collapse uses.

look(layer, x)                        # of a layer and an input: shows itself in a notebook
look_at_model(model, tokens)          # of a decoder, layer by layer
python -m iha_jax.viz runs/tiny --prompt "def main(" --out page.html
"""

from iha_jax.viz.patterns import attention_patterns, layer_inputs, pictures_of
from iha_jax.viz.summaries import CollapseSummary, MixingSummary, collapse_summary, mixing_summary
from iha_jax.viz.views import LayerView, ModelView, look, look_at_model

__all__ = [
    "CollapseSummary",
    "LayerView",
    "MixingSummary",
    "ModelView",
    "attention_patterns",
    "collapse_summary",
    "layer_inputs",
    "look",
    "look_at_model",
    "mixing_summary",
    "pictures_of",
]
