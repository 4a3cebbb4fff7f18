"""The decoder's configuration: frozen dataclasses, validated together, everything else derived."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from iha_jax.nn.init import MixingScheme
from iha_jax.nn.mlp import GATED, MLPKind
from iha_jax.ops.mixing import Collapse
from iha_jax.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from iha_jax.ops.types import Implementation

NormKind = Literal["rms", "layer"]
RematPolicy = Literal["none", "full", "dots"]
DTypeName = Literal["float32", "bfloat16", "float16"]
AttentionKind = Literal["iha", "mha", "local", "talking_heads", "differential", "simplicial"]
Biased = Literal["qkv", "out", "mlp"]


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}.")


def _check_window(what: str, window: object) -> None:
    if window is not None:
        _check_size(f"{what}.window", window)


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


@dataclasses.dataclass(frozen=True)
class IHAConfig:
    """Options of the layers of kind ``"iha"``.

    Attributes:
      num_pseudo_heads: P; default the number of heads.
      window: W in tokens, None for global layers, or ``"auto"`` (the paper): ``max(1, T // (2 P^2))`` for the
        configured ``max_length`` T. `ModelConfig.resolve` makes it a number, once, so that a checkpoint keeps it.
      causal: ``"virtual"`` (the paper) or ``"token"``.
      rope_positions: ``"virtual"`` (the paper) or ``"token"``.
      collapse: ``"per_head"`` (Algorithm 1) or ``"across_heads"`` (Definition 3).
      init: ``"live"``, or ``"exact"`` to start at MHA (needs token RoPE).
      implementation: of the attention; None takes the best that can serve.
    """

    num_pseudo_heads: int | None = None
    window: int | Literal["auto"] | None = "auto"
    causal: Literal["virtual", "token"] = "virtual"
    rope_positions: Literal["virtual", "token"] = "virtual"
    collapse: Collapse = "per_head"
    init: MixingScheme = "live"
    implementation: Implementation = None

    def __post_init__(self):
        if self.num_pseudo_heads is not None and self.num_pseudo_heads < 1:
            raise ValueError(f"iha.num_pseudo_heads must be >= 1 or None, got {self.num_pseudo_heads}.")
        if self.window != "auto":
            _check_window("iha", self.window)
        _check_choice("iha.causal", self.causal, ("virtual", "token"))
        _check_choice("iha.rope_positions", self.rope_positions, ("virtual", "token"))
        _check_choice("iha.collapse", self.collapse, get_args(Collapse))
        _check_choice("iha.init", self.init, get_args(MixingScheme))
        _check_choice("iha.implementation", self.implementation, ("reference", "blockwise", "pallas", None))


@dataclasses.dataclass(frozen=True)
class MHAConfig:
    """Options of the layers of every other kind.

    Attributes:
      window: W in tokens, or None for global layers.
    """

    window: int | None = None

    def __post_init__(self):
        _check_window("mha", self.window)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, shared by all layers.

    Attributes:
      theta: base of the frequencies.
      scaling: context extension, or None; its lengths count tokens.
    """

    theta: float = 500_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self):
        Rope(theta=self.theta, scaling=self.scaling)

    def rope(self, positions: Literal["virtual", "token"]) -> Rope:
        """The embedding as the layers take it."""
        return Rope(theta=self.theta, positions=positions, scaling=self.scaling)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder-only Transformer.

    Attributes:
      vocab_size: V.
      max_length: T, the context length in tokens that the model is made for.
      num_layers: blocks.
      model_dim: D.
      num_heads: N.
      num_kv_heads: K, default N.
      head_dim: H, default ``D / N``.
      mlp_dim: F, hidden size of the feed-forward network, default ``4 D`` (ungated) or ``8 D / 3`` rounded up
        to a multiple of 32 (gated), so that both have the same number of parameters.
      mlp: its kind; ``"swiglu"``, ``"geglu"`` and ``"reglu"`` are gated.
      norm: ``"rms"`` or ``"layer"``.
      norm_epsilon: added to the mean square, or variance, in every normalisation.
      tied_embeddings: whether the logits use the embedding table.
      pattern: kinds of attention, repeated over the layers; a remainder at the end is fine. The paper's is four
        ``"iha"``, then one ``"mha"``.
      iha: options of the layers of kind ``"iha"``.
      mha: options of the layers of kind ``"mha"``.
      local: options of the layers of kind ``"local"``, sliding-window MHA.
      talking_heads: options of the layers of kind ``"talking_heads"``.
      differential: options of the layers of kind ``"differential"``, which have N / 2 heads of 2 H, as their paper
        compares: N maps, and MHA's parameters but for a few vectors.
      simplicial: options of the layers of kind ``"simplicial"``; they are made for short lengths.
      rope: rotary embedding, or None for no positions at all. Layers of kind ``"simplicial"`` have none.
      normalize_qk: root-mean-square normalisation of queries and keys in every layer.
      logits_soft_cap: soft cap of attention logits, or None.
      use_bias: biases in every projection of attention and feed-forward network.
      biases: where there are biases if not everywhere: ``"qkv"`` (query, key and value projections), ``"out"`` (the
        attention's output), ``"mlp"``.
      dropout: rate of residual dropout, after each sub-layer and the embedding; used only in calls with a key.
      dtype: of the computation.
      param_dtype: of the parameters.
      scan_layers: one compiled cycle of the pattern, scanned over its repeats, instead of every layer unrolled.
      remat: what the backward pass recomputes: ``"none"``, ``"full"`` (all but the blocks' inputs), or ``"dots"``
        (all but matrix products without batch dimensions).
    """

    vocab_size: int = 256
    max_length: int = 1024
    num_layers: int = 5
    model_dim: int = 256
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    mlp: MLPKind = "gelu"
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-6
    tied_embeddings: bool = True
    pattern: tuple[AttentionKind, ...] = ("iha", "iha", "iha", "iha", "mha")
    iha: IHAConfig = IHAConfig()
    mha: MHAConfig = MHAConfig()
    local: MHAConfig = MHAConfig(window=512)
    talking_heads: MHAConfig = MHAConfig()
    differential: MHAConfig = MHAConfig()
    simplicial: MHAConfig = MHAConfig()
    rope: RopeConfig | None = RopeConfig()
    normalize_qk: bool = False
    logits_soft_cap: float | None = None
    use_bias: bool = False
    biases: tuple[Biased, ...] = ()
    dropout: float = 0.0
    dtype: DTypeName = "float32"
    param_dtype: DTypeName = "float32"
    scan_layers: bool = False
    remat: RematPolicy = "none"

    def __post_init__(self):
        for name in ("vocab_size", "max_length", "num_layers", "model_dim", "num_heads"):
            _check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise ValueError(f"model_dim={self.model_dim} is no multiple of num_heads={self.num_heads}: give head_dim.")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}.")
        if self.rope is not None and self.dim_per_head % 2:
            raise ValueError(f"rope needs an even head dimension, got head_dim={self.dim_per_head}.")
        _check_choice("mlp", self.mlp, get_args(MLPKind))
        _check_choice("norm", self.norm, get_args(NormKind))
        _check_choice("remat", self.remat, get_args(RematPolicy))
        _check_choice("dtype", self.dtype, get_args(DTypeName))
        _check_choice("param_dtype", self.param_dtype, get_args(DTypeName))
        if not self.pattern:
            raise ValueError("pattern must name at least one kind of attention, got ().")
        for kind in self.pattern:
            _check_choice("pattern's entries", kind, get_args(AttentionKind))
        for place in self.biases:
            _check_choice("biases' entries", place, get_args(Biased))
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon must be > 0, got {self.norm_epsilon}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}.")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap must be > 0 or None, got {self.logits_soft_cap}.")
        if self.uses("differential") and (self.num_heads % 2 or self.kv_heads % 2):
            raise ValueError(
                "differential layers pair heads and need even numbers of them, got "
                f"num_heads={self.num_heads} and num_kv_heads={self.kv_heads}."
            )
        if (
            self.uses("iha")
            and self.iha.init == "exact"
            and self.rope is not None
            and self.iha.rope_positions == "virtual"
            and self.pseudo_heads > 1
        ):
            raise ValueError(
                'iha.init="exact" needs iha.rope_positions="token" (or rope=None), got rope_positions="virtual".'
            )

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def dim_per_head(self) -> int:
        """H."""
        return self.model_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden_dim(self) -> int:
        """F."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return -(-8 * self.model_dim // (3 * 32)) * 32 if self.mlp in GATED else 4 * self.model_dim

    @property
    def pseudo_heads(self) -> int:
        """P of the IHA layers."""
        return self.num_heads if self.iha.num_pseudo_heads is None else self.iha.num_pseudo_heads

    @property
    def iha_window(self) -> int | None:
        """W of the IHA layers, as a number (``"auto"`` worked out for `max_length`) or None."""
        if self.iha.window == "auto":
            return max(1, self.max_length // (2 * self.pseudo_heads**2))
        return self.iha.window

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as jax knows it."""
        return jnp.dtype(self.dtype)

    @property
    def layer_kinds(self) -> tuple[AttentionKind, ...]:
        """The kind of every layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def num_repeats(self) -> int:
        """How many whole cycles of the pattern the layers hold; the rest is the remainder."""
        return self.num_layers // len(self.pattern)

    @property
    def num_cycled_layers(self) -> int:
        """Layers in whole cycles."""
        return self.num_repeats * len(self.pattern)

    def has_bias(self, place: Biased) -> bool:
        """Whether the projections at a place have biases."""
        return self.use_bias or place in self.biases

    def uses(self, kind: AttentionKind) -> bool:
        """Whether any layer is of this kind."""
        return kind in self.layer_kinds

    def window(self, kind: AttentionKind) -> int | None:
        """W of a kind's layers."""
        return self.iha_window if kind == "iha" else getattr(self, kind).window

    def resolve(self) -> "ModelConfig":
        """The same model with nothing left to derive from `max_length`: what belongs in a checkpoint.

        ``iha.window="auto"`` and a default P become numbers, so that a later change of `max_length` (a longer
        context, say) does not change the trained layers.
        """
        iha = dataclasses.replace(self.iha, window=self.iha_window, num_pseudo_heads=self.pseudo_heads)
        return dataclasses.replace(self, iha=iha)
