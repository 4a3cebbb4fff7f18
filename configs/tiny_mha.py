"""The twin of ``configs/tiny.py`` with global multi-head attention in every layer, all else equal.

Command:   python train.py configs/tiny_mha.py
Hardware:  2 CPU cores, 2 GB of memory
Data:      as in ``tiny.py``
Expected:  held-out bits per byte at least 20% below a byte bigram's; attention FLOPs within 10% of ``tiny.py``'s
"""

import dataclasses
import pathlib

from iha_jax.training.cli import load

_TINY = load(str(pathlib.Path(__file__).with_name("tiny.py")))
CONFIG = dataclasses.replace(_TINY, name="tiny_mha", model=dataclasses.replace(_TINY.model, pattern=("mha",)))
