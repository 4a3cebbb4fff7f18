"""The held-out loss: one number whatever the batch size."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np


def evaluate(
    eval_step: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    bytes_per_target: float,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss, perplexity, accuracy and bits per byte over batches.

    Sums are added in float64 and divided once, so padding and the last, shorter batch don't count.

    Args:
      eval_step: (params, batch) → sums "loss" (nats), "correct", "weight".
      params: path → parameter.
      batches: arrays [B, T].
      bytes_per_target: UTF-8 bytes per predicted token.
      check: called between batches; may raise to break off.

    Returns:
      "loss" (nats per token), "perplexity", "accuracy", "bits_per_byte", "tokens"; NaN without a token.
    """
    sums = {"loss": 0.0, "correct": 0.0, "weight": 0.0}
    for batch in batches:
        check()
        for name, value in jax.device_get(eval_step(params, dict(batch))).items():
            if name in sums:
                sums[name] += float(value)
    weight = sums["weight"]
    loss = sums["loss"] / weight if weight else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "accuracy": sums["correct"] / weight if weight else math.nan,
        "bits_per_byte": loss / math.log(2) / bytes_per_target,
        "tokens": weight,
    }
