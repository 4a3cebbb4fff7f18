"""Differential attention in every layer: four heads of two maps each instead of eight heads.

Command:   python train.py configs/compare/differential.py
Compared:  with ``global_mha.py``, which describes hardware and data

It costs what global attention costs, and has its parameters but for a few vectors.
"""

import dataclasses
import pathlib

from iha_jax.training.cli import load

_GLOBAL = load(str(pathlib.Path(__file__).with_name("global_mha.py")))
CONFIG = dataclasses.replace(
    _GLOBAL,
    name="compare_differential",
    model=dataclasses.replace(
        _GLOBAL.model,
        pattern=("differential",),
    ),
)
