"""The account of a model: parameters, model FLOPs and executed FLOPs of every kind of layer.

*Model FLOPs* count what the mathematics asks for: visible pairs of pseudo-query and pseudo-key, the three mixings,
the collapse and the projections, as Algorithm 1 has them. They compare models, and give MFU.
The *full* count is the same with whole squares instead of visible pairs, T² for global layers and T·W for windows: how
the paper counts, and so what its statements about matched FLOPs are in (`paper.md` section 2).
*Executed FLOPs* count what the chosen implementation's tiles compute: masked pairs and padding included, the cheap
forms of `paper.md` section 7 accounted for, and everything that the backward pass recomputes; on a TPU those of the
fused kernels, on a mesh those of all devices together.
A multiplication and an addition are two. Norms, activations, softmax (and a per-head collapse fused into it) and
rotations are not counted, as is usual: executed FLOPs are those of matrix products.
"""

import dataclasses
from typing import Literal

from iha_jax.models.config import AttentionKind, ModelConfig
from iha_jax.nn.dot_product import computed_pairs
from iha_jax.nn.mlp import GATED
from iha_jax.nn.simplicial import computed_triples
from iha_jax.ops import forms, pallas_tpu_cost
from iha_jax.ops.block_sizes import band_of
from iha_jax.ops.sharded import pieces_of_causal
from iha_jax.ops.types import Causal

Pairs = Literal["visible", "full"]


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of one layer for one sequence, by part.

    Attributes:
      projections: query, key, value and output.
      mixing: the three mixings of IHA; the two of talking heads, of every pair's logits and weights; else 0.
      scores: pairs (triples, for 2-simplicial attention) times head dimension.
      values: likewise with values.
      collapse: of pseudo-outputs.
      mlp: the feed-forward network.
    """

    projections: int
    mixing: int
    scores: int
    values: int
    collapse: int
    mlp: int

    @property
    def attention(self) -> int:
        """Everything between the projections."""
        return self.mixing + self.scores + self.values + self.collapse

    @property
    def total(self) -> int:
        """The whole layer."""
        return self.projections + self.attention + self.mlp


@dataclasses.dataclass(frozen=True)
class LayerAccount:
    """All layers of one kind.

    Attributes:
      kind: of attention.
      layers: how many there are.
      parameters: of one layer.
      model: forward FLOPs of one layer for one sequence, by visible pairs.
      full: likewise, by whole squares.
      executed_forward: FLOPs that one layer's forward pass computes, per sequence.
      executed_training: the same for forward and backward pass together.
    """

    kind: AttentionKind
    layers: int
    parameters: int
    model: ModelFlops
    full: ModelFlops
    executed_forward: float
    executed_training: float


@dataclasses.dataclass(frozen=True)
class Account:
    """A model's parameters and FLOPs at one batch size and sequence length.

    Attributes:
      tokens: T, tokens of a sequence.
      layers: one entry per kind of attention in use.
      embedding_parameters: tables of embedding and logits.
      norm_parameters: of the final norm.
      logits: forward FLOPs of the logits of one sequence.
    """

    tokens: int
    layers: tuple[LayerAccount, ...]
    embedding_parameters: int
    norm_parameters: int
    logits: int

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        per_layer = sum(entry.layers * entry.parameters for entry in self.layers)
        return per_layer + self.embedding_parameters + self.norm_parameters

    @property
    def model_forward_per_token(self) -> float:
        """Model FLOPs of a forward pass."""
        return (sum(entry.layers * entry.model.total for entry in self.layers) + self.logits) / self.tokens

    @property
    def model_training_per_token(self) -> float:
        """Model FLOPs of a training step: the backward pass counts twice the forward pass."""
        return 3 * self.model_forward_per_token

    @property
    def full_forward_per_token(self) -> float:
        """FLOPs of a forward pass by the full count."""
        return (sum(entry.layers * entry.full.total for entry in self.layers) + self.logits) / self.tokens

    @property
    def full_training_per_token(self) -> float:
        """FLOPs of a training step by the full count."""
        return 3 * self.full_forward_per_token

    @property
    def attention_forward_per_token(self) -> float:
        """Model FLOPs between the projections: mixing, scores, values and collapse of all layers."""
        return sum(entry.layers * entry.model.attention for entry in self.layers) / self.tokens

    @property
    def executed_forward_per_token(self) -> float:
        """Executed FLOPs of a forward pass."""
        return (sum(entry.layers * entry.executed_forward for entry in self.layers) + self.logits) / self.tokens

    @property
    def executed_training_per_token(self) -> float:
        """Executed FLOPs of a training step, recomputation included."""
        return (sum(entry.layers * entry.executed_training for entry in self.layers) + 3 * self.logits) / self.tokens


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts that a mesh cuts a step's work into: tiles, and hence executed FLOPs, are those of one part.

    Attributes:
      rows: parts of the batch.
      tokens: parts of every sequence.
      heads: parts of the heads.
    """

    rows: int = 1
    tokens: int = 1
    heads: int = 1


def account(
    config: ModelConfig, batch: int = 1, tokens: int | None = None, *, fused: bool = False, split: Split = Split()
) -> Account:
    """Accounts for a model.

    Args:
      config: the model's.
      batch: sequences in a step; tiles, and hence executed FLOPs, may depend on it.
      tokens: T, default the configured context length.
      fused: whether executed FLOPs are those of the fused TPU kernels, where these can serve a layer.
      split: of the work; executed FLOPs are the sum over all parts.
    """
    config = config.resolve()
    tokens = config.max_length if tokens is None else tokens
    kinds = dict.fromkeys(config.layer_kinds)
    vocab = config.vocab_size * config.model_dim
    return Account(
        tokens=tokens,
        layers=tuple(_layer(config, kind, batch, tokens, fused, split) for kind in kinds),
        embedding_parameters=vocab if config.tied_embeddings else 2 * vocab,
        norm_parameters=_norm_parameters(config),
        logits=2 * tokens * vocab,
    )


def visible_pairs(tokens: int, causal: Causal, window: int | None, pseudo: int = 1) -> int:
    """Pairs of pseudo-query and pseudo-key that see each other, per head, in one sequence (`design.md`).

    Args:
      tokens: T.
      causal: ``"virtual"``, ``"token"`` or None.
      window: W in tokens, or None.
      pseudo: P; 1 for plain attention.
    """
    if causal == "virtual":
        tokens, window, pseudo = tokens * pseudo, None if window is None else window * pseudo, 1
    reach = tokens if window is None else min(window, tokens)
    # Position i sees min(i + 1, reach) positions up to its own.
    back = reach * (reach + 1) // 2 + (tokens - reach) * reach
    return pseudo**2 * (back if causal is not None else 2 * back - tokens)


def visible_triples(tokens: int, window: int | None) -> int:
    """Pairs of keys that causal queries see, per head, in one sequence: what 2-simplicial attention attends to.

    Args:
      tokens: T.
      window: W in tokens, or None.
    """
    reach = tokens if window is None else min(window, tokens)
    return reach * (reach + 1) * (2 * reach + 1) // 6 + (tokens - reach) * reach**2


def full_pairs(tokens: int, window: int | None, pseudo: int = 1) -> int:
    """Pairs by the full count: every query with as many keys as its window holds, or all.

    Args:
      tokens: T.
      window: W in tokens, or None.
      pseudo: P; 1 for plain attention.
    """
    return tokens * (tokens if window is None else min(window, tokens)) * pseudo**2


def model_flops(config: ModelConfig, kind: AttentionKind, tokens: int, count: Pairs = "visible") -> ModelFlops:
    """Forward FLOPs of one layer for one sequence, as its algorithm is written.

    Args:
      config: the model's.
      kind: of attention.
      tokens: T.
      count: of pairs.
    """
    n, k, h, p = config.num_heads, config.kv_heads, config.dim_per_head, config.pseudo_heads
    window, iha = config.window(kind), kind == "iha"
    if kind == "simplicial":
        reach = tokens if window is None else min(window, tokens)
        pairs = visible_triples(tokens, window) if count == "visible" else tokens * reach**2
    elif count == "full":
        pairs = full_pairs(tokens, window, p if iha else 1)
    else:
        pairs = visible_pairs(tokens, config.iha.causal if iha else "token", window, p if iha else 1)
    mixing = collapse = 0
    if iha:
        mixing = 2 * tokens * p * h * (n * n + 2 * k * k)
        collapse = 2 * tokens * (n if config.iha.collapse == "per_head" else n * n) * p * h
    elif kind == "talking_heads":
        mixing = 2 * 2 * pairs * n * n
    key_value_pairs = 2 if kind == "simplicial" else 1
    return ModelFlops(
        projections=2 * tokens * config.model_dim * h * (2 * n + 2 * k * key_value_pairs),
        mixing=mixing,
        scores=2 * pairs * n * h,
        values=2 * pairs * n * h,
        collapse=collapse,
        mlp=2 * tokens * config.model_dim * config.hidden_dim * _mlp_matrices(config),
    )


def _layer(
    config: ModelConfig, kind: AttentionKind, batch: int, tokens: int, fused: bool, split: Split
) -> LayerAccount:
    model = model_flops(config, kind, tokens)
    core_forward, core_training = _executed_core(config, kind, batch, tokens, fused, split)
    dense = model.projections + model.mlp
    forward, training = dense + core_forward, 3 * dense + core_training
    if config.remat != "none":
        # The block is run once more, but what only its output needs is not: the last matrix of the MLP.
        last_matrix = model.mlp // _mlp_matrices(config)
        training += core_forward + (dense - last_matrix if config.remat == "full" else 0)
    return LayerAccount(
        kind=kind,
        layers=config.layer_kinds.count(kind),
        parameters=_layer_parameters(config, kind),
        model=model,
        full=model_flops(config, kind, tokens, "full"),
        executed_forward=forward,
        executed_training=training,
    )


def _executed_core(
    config: ModelConfig, kind: AttentionKind, batch: int, tokens: int, fused: bool, split: Split
) -> tuple[float, float]:
    """FLOPs per sequence of the attention between the projections: of the forward pass, and of both passes."""
    n, h, iha = config.num_heads, config.dim_per_head, kind == "iha"
    if kind == "simplicial":
        triples, recomputed = computed_triples(batch, n, tokens)
        product = 2 * triples * n * h
        return 2 * product, (6 + 2 * recomputed) * product
    if iha and config.iha.implementation == "reference":
        exact = model_flops(config, kind, tokens)
        forward = exact.mixing + exact.collapse + 2 * 2 * (tokens * config.pseudo_heads) ** 2 * n * h
        return forward, 3 * forward
    # One device's part; all parts do the same.
    share = split.rows * split.tokens * split.heads / batch
    rows, heads = -(-batch // split.rows), n // split.heads
    causal, window, length = (config.iha.causal if iha else "token"), config.window(kind), tokens // split.tokens
    band = band_of(causal, window)
    pieces = [(length, tokens)]
    if split.tokens > 1 and band is not None and band.left + band.right < tokens:
        pieces = [(length + band.left + band.right,) * 2]  # the halo, queries included
    elif split.tokens > 1 and causal is not None:
        pieces = pieces_of_causal(length, split.tokens)
    forward = training = 0.0
    for queries, keys in pieces:
        if iha:
            found = _executed_iha(config, rows, heads, queries, keys, fused)
        else:
            pairs, recomputed = computed_pairs(rows, heads, queries, queries == keys, window, keys)
            product = 2 * pairs * rows * heads * h
            mixing = 2 * 2 * pairs * rows * heads * n if kind == "talking_heads" else 0
            found = 2 * product + mixing, (6 + recomputed) * product + (3 + recomputed) * mixing
        forward, training = forward + found[0] * share, training + found[1] * share
    return forward, training


def _executed_iha(
    config: ModelConfig, rows: int, heads: int, queries: int, keys: int, fused: bool
) -> tuple[float, float]:
    """FLOPs of one call of the operation: of the forward pass, and of both passes."""
    n, k, h = config.num_heads, config.kv_heads, config.dim_per_head
    problem = forms.Problem(
        batch=rows,
        query_len=queries,
        key_len=keys,
        heads=heads,
        kv_heads=max(1, k * heads // n),
        sources=n,
        kv_sources=k,
        head_dim=h,
        value_dim=h,
        pseudo=config.pseudo_heads,
        causal=config.iha.causal,
        window=config.iha_window,
        rotates_pseudo_heads=(
            config.rope is not None and config.iha.rope_positions == "virtual" and config.pseudo_heads > 1
        ),
        across_heads=config.iha.collapse == "across_heads",
        aligned=queries == keys,
    )
    if fused and (found := pallas_tpu_cost.flops_of(problem, config.dtype)) is not None:
        forward, backward = found
        return forward, forward + backward
    products = forms.products(problem, *forms.choose(problem))
    return sum(p.flops for p in products), sum(p.training_flops for p in products)


def _layer_parameters(config: ModelConfig, kind: AttentionKind) -> int:
    d, n, k, h = config.model_dim, config.num_heads, config.kv_heads, config.dim_per_head
    f, ups = config.hidden_dim, _mlp_matrices(config) - 1
    count = d * h * (2 * n + 2 * k) + d * f * (ups + 1) + 2 * _norm_parameters(config)
    count += h * (n + 2 * k) * config.has_bias("qkv") + d * config.has_bias("out")
    count += (f * ups + d) * config.has_bias("mlp")
    if config.normalize_qk:
        count += 2 * h
    if kind == "talking_heads":
        count += 2 * n * n
    if kind == "differential":
        count += 4 * h + 2 * h + 1  # the vectors of λ, the norm of heads of 2 H, λ's start
    if kind == "simplicial":
        count += 2 * k * h * (d + config.has_bias("qkv"))
    if kind == "iha":
        collapse = n if config.iha.collapse == "per_head" else n * n
        count += config.pseudo_heads * (n * n + 2 * k * k + collapse)
    return count


def _norm_parameters(config: ModelConfig) -> int:
    return config.model_dim * (1 if config.norm == "rms" else 2)


def _mlp_matrices(config: ModelConfig) -> int:
    return 3 if config.mlp in GATED else 2
