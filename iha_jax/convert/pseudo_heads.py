"""A trained model given pseudo-heads, so that it starts exactly where it was (`paper.md` section 7)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax.models import IHAConfig, ModelConfig
from iha_jax.nn.init import initial_mixing
from iha_jax.ops.mixing import Collapse


def with_pseudo_heads(
    config: ModelConfig,
    params: Mapping[str, Any],
    num_pseudo_heads: int,
    *,
    layers: tuple[bool, ...] = (True,),
    collapse: Collapse = "per_head",
    seed: int = 0,
) -> tuple[ModelConfig, dict[str, Any]]:
    """The same function with P pseudo-heads a head.

    RoPE stays on token positions and the collapse selects the last pseudo-head, the only one that sees all P copies of
    its own token; all it sees are copies. What cannot matter yet (the other queries, and the values around their mean)
    starts as noise that differs over p, so that training tells the pseudo-heads apart.

    Args:
      config: of a model whose layers are plain (kind "mha") or windowed ("local").
      params: path → array, of the unrolled model.
      num_pseudo_heads: P.
      layers: which layers get them, a cycle; default all.
      collapse: ``"per_head"`` or ``"across_heads"``.
      seed: of the noise.

    Raises:
      ValueError: the model has other kinds of layers, or the chosen layers have different windows.
    """
    kinds = config.layer_kinds
    if config.scan_layers or not {*kinds} <= {"mha", "local"}:
        raise ValueError(
            'pseudo-heads are added to unrolled models with layers of the kinds "mha" and "local", got '
            f"scan_layers={config.scan_layers} and {sorted({*kinds})}"
        )
    if num_pseudo_heads < 1:
        raise ValueError(f"num_pseudo_heads must be at least 1, got {num_pseudo_heads}")
    chosen = [i for i in range(len(kinds)) if layers[i % len(layers)]]
    if not chosen:
        raise ValueError(f"layers={layers} chooses none of the {len(kinds)} layers")
    windows = {config.window(kinds[i]) for i in chosen}
    if len(windows) > 1:
        raise ValueError(f"the layers that get pseudo-heads must have one window, got {sorted(map(str, windows))}")
    [window] = windows
    new = dataclasses.replace(
        config,
        pattern=tuple("iha" if i in chosen else kind for i, kind in enumerate(kinds)),
        iha=IHAConfig(
            num_pseudo_heads=num_pseudo_heads, window=window, rope_positions="token", collapse=collapse, init="exact"
        ),
    )
    grown = dict(params)
    for i, key in zip(chosen, jax.random.split(jax.random.key(seed), len(chosen)), strict=True):
        mixing = initial_mixing(
            "exact",
            key,
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            num_pseudo_heads=num_pseudo_heads,
            head_dim=config.dim_per_head,
            causal="virtual",
            window=window,
            rope=None if config.rope is None else config.rope.rope("token"),
            collapse=collapse,
            dtype=jnp.dtype(config.param_dtype),
        )
        for name in ("query", "key", "value", "collapse"):
            path = name if name == "collapse" else f"mixing_{name}"
            grown[f"layers.{i}.attention.{path}"] = np.asarray(getattr(mixing, name))
    return new, grown
