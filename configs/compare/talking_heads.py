"""Talking heads in every layer: logits and weights are mixed across heads.

Command:   python train.py configs/compare/talking_heads.py
Compared:  with ``global_mha.py``, which describes hardware and data

The mixings cost 3.5% of the FLOPs; the feed-forward network pays: 960 hidden units instead of 1,024.
"""

import dataclasses
import pathlib

from iha_jax.training.cli import load

_GLOBAL = load(str(pathlib.Path(__file__).with_name("global_mha.py")))
CONFIG = dataclasses.replace(
    _GLOBAL,
    name="compare_talking_heads",
    model=dataclasses.replace(
        _GLOBAL.model,
        pattern=("talking_heads",),
        mlp_dim=960,
    ),
)
