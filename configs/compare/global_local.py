"""Four layers of sliding-window attention to one global layer.

Command:   python train.py configs/compare/global_local.py
Compared:  with ``global_mha.py``, which describes hardware and data

The paper's window is 512 of 8,192 tokens, here 32 of 512. That saves a tenth of the FLOPs, which go into the
feed-forward network: 1,208 hidden units instead of 1,024.
"""

import dataclasses
import pathlib

from iha_jax.models import MHAConfig
from iha_jax.training.cli import load

_GLOBAL = load(str(pathlib.Path(__file__).with_name("global_mha.py")))
CONFIG = dataclasses.replace(
    _GLOBAL,
    name="compare_global_local",
    model=dataclasses.replace(
        _GLOBAL.model,
        pattern=("local", "local", "local", "local", "mha"),
        local=MHAConfig(window=32),
        mlp_dim=1208,
    ),
)
