"""Rotary position embedding whose phase stays exact at large virtual indices.

IHA numbers P pseudo-tokens for every token (paper section 1, step 4), so indices grow P times faster than
in ordinary attention and ``position * frequency`` in float32 loses the phase early: with P = 20 it is off by
5e-4 rad at token 900. Here the product is taken in 64-bit fixed-point *turns*, built from 32-bit limbs that
every accelerator has, and reduced modulo one turn before it is rounded to a float.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by ``factor``."""

    factor: float

    def __post_init__(self):
        _require_positive(self, "factor")

    def apply(self, freqs: np.ndarray, theta: float, tokens_to_index: int) -> tuple[np.ndarray, float]:
        """Returns the scaled frequencies (rad per index, float64) and the factor for cos and sin."""
        del theta, tokens_to_index
        return freqs / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones kept, the rest blended.

    ``original_max_position`` is the trained context length in *tokens*, whatever positions the rotation uses.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        _require_positive(self, "factor", "low_freq_factor", "original_max_position")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                "Llama3Scaling needs high_freq_factor > low_freq_factor, got "
                f"high_freq_factor={self.high_freq_factor} and low_freq_factor={self.low_freq_factor}."
            )

    def apply(self, freqs: np.ndarray, theta: float, tokens_to_index: int) -> tuple[np.ndarray, float]:
        """Returns the scaled frequencies (rad per index, float64) and the factor for cos and sin."""
        del theta
        turns = self.original_max_position * tokens_to_index * freqs / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return keep * freqs + (1 - keep) * freqs / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolates slow dimensions, keeps fast ones, and rescales the logits.

    ``original_max_position`` is the trained context length in *tokens*. ``attention_factor`` multiplies both
    rotated queries and keys; by default it is ``0.1 * ln(factor) + 1``.
    """

    factor: float
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        _require_positive(self, "factor", "original_max_position", "beta_slow")
        if not self.beta_fast > self.beta_slow:
            raise ValueError(
                "YarnScaling needs beta_fast > beta_slow, got "
                f"beta_fast={self.beta_fast} and beta_slow={self.beta_slow}."
            )

    def apply(self, freqs: np.ndarray, theta: float, tokens_to_index: int) -> tuple[np.ndarray, float]:
        """Returns the scaled frequencies (rad per index, float64) and the factor for cos and sin."""
        half = freqs.shape[0]
        length = self.original_max_position * tokens_to_index

        def dimension(rotations: float) -> float:
            return half * math.log(length / (rotations * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), 2 * half - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return (1 - ramp) * freqs + ramp * freqs / self.factor, factor


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of split-half pairs (i, i + H/2).

    Attributes:
      theta: base of the geometric frequency ladder; dimension pair i turns by ``theta**(-2i/H)`` rad per index.
      positions: ``"virtual"`` (the paper) rotates pseudo-head p of token n by its virtual index ``n*P + p``;
        ``"token"`` rotates all pseudo-heads of token n by n, which makes MHA exactly representable and allows
        scores from base products (`paper.md` section 7).
      scaling: optional context extension; its lengths count tokens.
    """

    theta: float = 500_000.0
    positions: Literal["virtual", "token"] = "virtual"
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if not self.theta > 1:
            raise ValueError(f"Rope needs theta > 1, got theta={self.theta}.")
        if self.positions not in ("virtual", "token"):
            raise ValueError(f'Rope.positions must be "virtual" or "token", got {self.positions!r}.')

    def tokens_to_index(self, num_pseudo_heads: int) -> int:
        """How many indices one token advances: P for virtual positions, 1 for token positions."""
        return num_pseudo_heads if self.positions == "virtual" else 1

    def frequencies(self, head_dim: int, num_pseudo_heads: int) -> tuple[np.ndarray, float]:
        """Frequencies in rad per index, float64 [H/2], and the factor that multiplies cos and sin."""
        if head_dim % 2:
            raise ValueError(f"Rope rotates pairs and needs an even head dimension, got H={head_dim}.")
        freqs = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is None:
            return freqs, 1.0
        return self.scaling.apply(freqs, self.theta, self.tokens_to_index(num_pseudo_heads))


def rope_tables(
    index: Int[Array, "*shape"],
    rope: Rope,
    head_dim: int,
    num_pseudo_heads: int = 1,
    dtype=jnp.float32,
    with_factor: bool = True,
) -> tuple[Float[Array, "*shape half"], Float[Array, "*shape half"]]:
    """Cosines and sines for integer rotary indices.

    Args:
      index: int32 rotary indices (virtual or token ones, as `rope.positions` says), any shape.
      rope: the embedding's parameters.
      head_dim: H, even.
      num_pseudo_heads: P; only scaling rules with lengths in tokens need it.
      dtype: float32 or float64, the dtype of the tables.
      with_factor: whether YaRN's attention factor is multiplied in.

    Returns:
      cos and sin, ``[*index.shape, H/2]``. Phase error at most 1e-6 rad below index 2**16, 1e-5 up to 2**24.
    """
    freqs, factor = rope.frequencies(head_dim, num_pseudo_heads)
    high, low = (jnp.asarray(x) for x in turn_limbs(freqs))
    turns = fractional_turns(index[..., None].astype(jnp.int32), high, low)
    angle = turns.astype(dtype) * jnp.asarray(2 * math.pi / 2**32, dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if with_factor and factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos, sin


def apply_rope(x: Float[Array, "... H"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]) -> Array:
    """Rotates pairs (i, i + H/2) of the last axis; computed in at least float32, returned in x's dtype.

    Args:
      x: any array with an even last axis H.
      cos: table of the same rank as x that broadcasts against ``x[..., :H/2]``.
      sin: likewise.
    """
    compute = jnp.promote_types(x.dtype, jnp.float32)
    first, second = jnp.split(x.astype(compute), 2, axis=-1)
    cos, sin = cos.astype(compute), sin.astype(compute)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def turn_limbs(freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies (rad per index, float64 [n]) as 64-bit fixed-point turns: upper and lower words, uint32 [n]."""
    # The float64 frequency is good to 2**-53 of a turn, so 64 fractional bits hold all of it.
    fixed = [round(math.ldexp(f / (2 * math.pi), 64)) % 2**64 for f in freqs.tolist()]
    return np.array([f >> 32 for f in fixed], np.uint32), np.array([f & 0xFFFFFFFF for f in fixed], np.uint32)


def fractional_turns(index: Array, high: Array, low: Array) -> Array:
    """``index * freq`` modulo one turn as signed 32-bit fixed point (2**32 is one turn).

    Args:
      index: int32.
      high: upper words of the frequencies (`turn_limbs`), uint32, broadcast against the index.
      low: lower words.

    Returns:
      int32 of the common shape.
    """
    shape = jnp.broadcast_shapes(index.shape, high.shape)
    i = jnp.broadcast_to(jax.lax.bitcast_convert_type(index, jnp.uint32), shape)
    high, low = jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)
    # Unsigned products wrap modulo 2**32, which is modulo one turn. A negative index reads as index + 2**32,
    # which adds `low` once to the upper word of index * low; take it away again.
    borrow = jnp.where(jnp.broadcast_to(index < 0, shape), low, jnp.zeros_like(low))
    turns = i * high + _multiply_high(i, low) - borrow
    return jax.lax.bitcast_convert_type(turns, jnp.int32)


def _multiply_high(a: Array, b: Array) -> Array:
    """Upper 32 bits of the 64-bit product of two uint32 arrays, from 16-bit limbs."""
    mask = jnp.uint32(0xFFFF)
    sixteen = jnp.uint32(16)
    a0, a1, b0, b1 = a & mask, a >> sixteen, b & mask, b >> sixteen
    low_high, high_low = a0 * b1, a1 * b0
    carry = ((a0 * b0) >> sixteen) + (low_high & mask) + (high_low & mask)
    return a1 * b1 + (low_high >> sixteen) + (high_low >> sixteen) + (carry >> sixteen)


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{type(config).__name__} needs {name} > 0, got {name}={value}.")
