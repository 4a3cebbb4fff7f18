"""FLOPs of the one-layer encoder's training step, counted as `iha_jax.training.flops` counts those of decoders."""

from collections.abc import Sequence
from typing import NamedTuple

from iha_jax.models.encoder import EncoderConfig
from iha_jax.nn.simplicial import computed_triples
from iha_jax.ops import forms


class FlopsPerToken(NamedTuple):
    """Of forward and backward pass.

    Attributes:
      model: what the mathematics asks for.
      executed: what the programs compute.
    """

    model: float
    executed: float


def encoder_flops_per_token(config: EncoderConfig, lengths: Sequence[int], batch: int) -> FlopsPerToken:
    """FLOPs of a step on ``batch`` sequences of each length, over its tokens.

    Args:
      config: of the model.
      lengths: tokens of a sequence, for every program that a step consists of.
      batch: sequences of each.
    """
    model = executed = 0.0
    projections = 6 if config.attention == "simplicial" else 4
    for tokens in lengths:
        dense = 2 * tokens * config.model_dim * (projections * config.model_dim + 2 * config.mlp_dim + 1)
        core_model, core_executed = _core(config, tokens, batch)
        model += 3 * (dense + core_model)
        # Tokens need no gradient, but their embeddings do: every product has both of its gradients.
        executed += 3 * dense + core_executed
    return FlopsPerToken(model / sum(lengths), executed / sum(lengths))


def _core(config: EncoderConfig, tokens: int, batch: int) -> tuple[float, float]:
    """Between the projections, of one sequence: model FLOPs forward, executed FLOPs of both passes."""
    n, h = config.num_heads, config.model_dim // config.num_heads
    if config.attention == "mha":
        products = 2 * 2 * tokens**2 * n * h
        return products, 3 * products
    if config.attention == "simplicial":
        triples, recomputed = computed_triples(batch, n, tokens)
        return 2 * 2 * tokens**3 * n * h, (6 + 2 * recomputed) * 2 * triples * n * h
    p = config.num_pseudo_heads
    pseudo = p * tokens
    collapse = n if config.collapse == "per_head" else n * n
    model = 2 * pseudo * h * (3 * n * n + collapse) + 2 * 2 * pseudo**2 * n * h
    if config.implementation == "reference":
        return model, 3 * model
    problem = forms.Problem(
        batch=batch,
        query_len=tokens,
        key_len=tokens,
        heads=n,
        kv_heads=n,
        sources=n,
        kv_sources=n,
        head_dim=h,
        value_dim=h,
        pseudo=p,
        causal=None,
        window=None,
        rotates_pseudo_heads=False,
        across_heads=config.collapse == "across_heads",
        aligned=True,
    )
    return model, sum(p.training_flops for p in forms.products(problem, *forms.choose(problem))) / batch
