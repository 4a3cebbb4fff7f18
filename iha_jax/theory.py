"""The explicit weights of the theory (`paper.md` section 5), with an attention of its own: float64 NumPy, no training.

The theory looks at attention as algebra: no rotation, no causal mask, no interleaving, no output projection. The P
pseudo-queries, -keys and -values of a head are stacked row-wise, they attend, and the outputs are collapsed.

    layer = polynomial_filters(matrix, num_features=3, num_powers=10)       # interleaved: 4 heads
    layer(with_identity(x))[:, :30]                                         # [x, A x, …, A^9 x]

Letters beside those of the package: n tokens, d features of a token, k powers of a filter bank.
"""

import dataclasses
import math
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int

Kind = Literal["linear", "hard", "softmax"]


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The four mixing tensors of Definition 3.

    Attributes:
      query: ``[N, N, P]`` indexed (source, head, pseudo).
      key: likewise.
      value: likewise.
      collapse: ``[N, N, P]`` indexed (out head, source head, pseudo).
    """

    query: Float[np.ndarray, "N N P"]
    key: Float[np.ndarray, "N N P"]
    value: Float[np.ndarray, "N N P"]
    collapse: Float[np.ndarray, "N N P"]

    @classmethod
    def copy(cls, num_heads: int, num_pseudo_heads: int) -> "Mixing":
        """Every pseudo-head is its base head, and the collapse takes the first."""
        shape = (num_heads, num_heads, num_pseudo_heads)
        same = np.broadcast_to(np.eye(num_heads)[:, :, None], shape)
        return cls(same.copy(), same.copy(), same.copy(), same * (np.arange(num_pseudo_heads) == 0))


@dataclasses.dataclass(frozen=True)
class AlgebraicAttention:
    """Attention with given weights: multi-head without `mixing`, interleaved with it.

    Attributes:
      query: ``[N, D, H]``.
      key: ``[N, D, H]``.
      value: ``[N, D, V]``; its width is free.
      kind: what becomes of the products of queries and keys. ``"linear"``: they are the weights; ``"softmax"``;
        ``"hard"``: softmax at temperature 0, h keys that tie for the largest product have 1/h each.
      mixing: None for multi-head attention.

    Raises:
      ValueError: for shapes that do not fit, or an unknown kind.
    """

    query: Float[np.ndarray, "N D H"]
    key: Float[np.ndarray, "N D H"]
    value: Float[np.ndarray, "N D V"]
    kind: Kind = "linear"
    mixing: Mixing | None = None

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}.")
        if self.query.shape != self.key.shape or self.query.shape[:2] != self.value.shape[:2]:
            raise ValueError(
                f"query and key must be [N, D, H] and value [N, D, V], got {self.query.shape}, {self.key.shape} and "
                f"{self.value.shape}."
            )
        if self.mixing is not None:
            shapes = {name: x.shape for name, x in vars(self.mixing).items()}
            expected = (self.num_heads, self.num_heads, self.mixing.query.shape[-1])
            if set(shapes.values()) != {expected}:
                raise ValueError(f"with {self.num_heads} heads mixing must be all [N, N, P], got {shapes}.")

    @property
    def num_heads(self) -> int:
        """N."""
        return self.query.shape[0]

    @property
    def num_parameters(self) -> int:
        """Elements of all weights and mixing tensors."""
        mixing = () if self.mixing is None else vars(self.mixing).values()
        return sum(x.size for x in (self.query, self.key, self.value, *mixing))

    def __call__(self, x: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n NV"]:
        """Attends; the heads' outputs ``[n, V]`` side by side."""
        query, key, value = (np.einsum("td,mdh->mth", x, w) for w in (self.query, self.key, self.value))
        mixing = self.mixing
        if mixing is None:
            heads = self._weights(query @ key.swapaxes(1, 2)) @ value
        else:
            query, key, value = (
                _stacked(np.einsum("mth,mgp->gpth", heads, mix))
                for heads, mix in ((query, mixing.query), (key, mixing.key), (value, mixing.value))
            )
            outputs = self._weights(query @ key.swapaxes(1, 2)) @ value
            outputs = outputs.reshape(self.num_heads, -1, len(x), value.shape[-1])
            heads = np.einsum("gptv,hgp->htv", outputs, mixing.collapse)
        return heads.swapaxes(0, 1).reshape(len(x), -1)

    def _weights(self, products: np.ndarray) -> np.ndarray:
        if self.kind == "linear":
            return products
        largest = products.max(axis=-1, keepdims=True)
        weights = products == largest if self.kind == "hard" else np.exp(products - largest)
        return weights / weights.sum(axis=-1, keepdims=True)


def as_interleaved(layer: AlgebraicAttention, num_pseudo_heads: int) -> AlgebraicAttention:
    """The interleaved attention that equals a multi-head one (inclusion): copies, and a collapse of the first.

    P copies of every key share its weight, whatever the softmax's temperature. Linear attention has no denominator to
    share it, so there the collapse takes 1/P of the first.

    Args:
      layer: multi-head attention.
      num_pseudo_heads: P.

    Raises:
      ValueError: if the layer mixes already.
    """
    if layer.mixing is not None:
        raise ValueError("as_interleaved takes multi-head attention, but this layer has mixing tensors.")
    mixing = Mixing.copy(layer.num_heads, num_pseudo_heads)
    if layer.kind == "linear":
        mixing = dataclasses.replace(mixing, collapse=mixing.collapse / num_pseudo_heads)
    return dataclasses.replace(layer, mixing=mixing)


def separating(
    query: Float[np.ndarray, "D H"], key: Float[np.ndarray, "D H"], value: Float[np.ndarray, "D V"]
) -> AlgebraicAttention:
    """One interleaved head that no multi-head attention equals (strictness).

    On tokens that are all equal, attention weights of multi-head attention sum to 1 over equal values: it is linear in
    the token. This head has P = 2, the second pseudo-head negated, and gives ``tanh(q·k) v``. (The paper's appendix
    copies the value; then the two weights sum to 1, and that *is* linear.)

    Args:
      query: weights ``[D, H]``.
      key: weights ``[D, H]``.
      value: weights ``[D, V]``.
    """
    signs = np.array([[[1.0, -1.0]]])
    mixing = Mixing(signs, signs, signs, np.array([[[1.0, 0.0]]]))
    return AlgebraicAttention(query[None], key[None], value[None], "softmax", mixing)


def heads_needed(num_patterns: int, interleaved: bool = True) -> int:
    """Heads that give so many attention patterns: as many for multi-head attention, ``⌈√k⌉`` interleaved.

    Raises:
      ValueError: if num_patterns < 1.
    """
    if num_patterns < 1:
        raise ValueError(f"num_patterns must be >= 1, got {num_patterns}.")
    return math.isqrt(num_patterns - 1) + 1 if interleaved else num_patterns


def with_identity(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n D"]:
    """``[x, I]``, the input of the constructions: every token carries its features and its index."""
    return np.concatenate([x, np.eye(len(x))], axis=1)


def polynomial_filters(
    matrix: Float[np.ndarray, "n n"],
    num_features: int,
    num_powers: int,
    *,
    interleaved: bool = True,
    num_heads: int | None = None,
    kind: Kind = "linear",
) -> AlgebraicAttention:
    """Weights that turn ``[X, I]`` into ``[X, A X, …, A^(k-1) X]``.

    Multi-head attention has one power in a head: queries ``A^m``, keys ``I``. Interleaved, head g has queries
    ``A^(g h)`` and its pseudo-keys are those of all heads, ``(A^p)ᵀ``, so that it has the h powers from g·h on side by
    side in a value h times as wide.

    Args:
      matrix: A.
      num_features: d, of X.
      num_powers: k.
      interleaved: whether to mix heads.
      num_heads: h, default what is needed; with fewer the last powers are missing.
      kind: of attention; ``"hard"`` where A is a permutation, see `cyclic_gather`.

    Returns:
      A layer whose output ``[n, c·d]`` begins with the powers wanted: c is k, or h² >= k interleaved.
    """
    n, d = len(matrix), num_features
    heads = heads_needed(num_powers, interleaved) if num_heads is None else num_heads
    powers = _powers(matrix, heads * heads if interleaved else heads)

    def of_index(weights: np.ndarray) -> np.ndarray:
        """Weights that read ``[x, I]`` and leave out x."""
        return np.concatenate([np.zeros((heads, d, n)), weights], axis=1)

    if not interleaved:
        value = np.concatenate([np.eye(d), np.zeros((n, d))])
        key = np.broadcast_to(np.eye(n), (heads, n, n))
        return AlgebraicAttention(of_index(powers), of_index(key), np.broadcast_to(value, (heads, *value.shape)), kind)
    # Hard attention averages over the h pseudo-keys that tie; values h times as large make that a sum.
    factor = heads if kind == "hard" else 1
    value = np.zeros((heads, d + n, heads * d))
    for m in range(heads):
        value[m, :d, m * d : (m + 1) * d] = factor * np.eye(d)
    head, source, pseudo = np.ogrid[:heads, :heads, :heads]
    first = np.where((head == source) & (pseudo == 0), 1.0, 0.0)
    source_is_pseudo = np.eye(heads)[:, None, :].repeat(heads, axis=1)
    mixing = Mixing(query=first, key=source_is_pseudo, value=source_is_pseudo, collapse=first)
    transposed = powers[:heads].swapaxes(1, 2)
    return AlgebraicAttention(of_index(powers[::heads]), of_index(transposed), value, kind, mixing)


def polynomial_filter_parameters(
    num_tokens: int, num_features: int, num_powers: int, *, interleaved: bool = True
) -> int:
    """Parameters of `polynomial_filters`, by formula: ``Θ(√k n²)`` interleaved, ``Θ(k n²)`` multi-head.

    Args:
      num_tokens: n.
      num_features: d.
      num_powers: k.
      interleaved: whether heads are mixed.
    """
    n, d, h = num_tokens, num_features, heads_needed(num_powers, interleaved)
    if not interleaved:
        return h * (2 * n * (n + d) + d * (n + d))
    return 2 * n * (n + d) * h + d * (d + n) * h**2 + 4 * h**3


def pattern_bound(targets: Float[np.ndarray, "k n n"], num_patterns: int) -> float:
    """The least relative error with which so many attention patterns can give all targets (Eckart and Young).

    A linear-attention head whose patterns do not depend on X maps X to ``M X V`` with one n×n pattern M and any
    V. So h multi-head heads, with values and an output projection of any width, reach only targets in the span of h
    patterns; interleaved, in the span of h² (products of h queries and h keys). Targets of rank k need k patterns.

    Args:
      targets: the maps wanted, ``A^j`` for a filter bank.
      num_patterns: h, or h² interleaved.

    Returns:
      Root of the squared error of all targets together, relative to their norm.
    """
    singular = np.linalg.svd(targets.reshape(len(targets), -1), compute_uv=False)
    return float(np.sqrt((singular[num_patterns:] ** 2).sum() / (singular**2).sum()))


def cyclic_gather(num_tokens: int, *, interleaved: bool = True, num_heads: int | None = None) -> AlgebraicAttention:
    """Hard attention that writes all tokens at every position, in cyclic order from it: filters of a cyclic shift.

    Args:
      num_tokens: n.
      interleaved: whether to mix heads.
      num_heads: h, default what is needed: n, or ``⌈√n⌉`` interleaved.

    Returns:
      A layer from ``[x, I]`` (x of one feature) to ``[n, c]``, c = n, or h² >= n interleaved (the rest repeats).
    """
    shift = np.roll(np.eye(num_tokens), 1, axis=1)  # row i reads token i + 1
    return polynomial_filters(shift, 1, num_tokens, interleaved=interleaved, num_heads=num_heads, kind="hard")


@dataclasses.dataclass(frozen=True)
class CountPermutationMatch3:
    """CPM-3: at every position i the number of ordered pairs (a, b) with ``(x_i + G x_a + x_b) mod M = 0``.

    One attention layer gathers all tokens at every position; one hidden layer has a unit for each pair, whose
    activation ``ReLU(1 - z mod M)`` is 1 where the pair matches; the output adds the units up.

        CountPermutationMatch3.build(3, coefficient=10, modulus=4)(np.array([1, 2, 3]))     # [3, 1, 3]

    Attributes:
      attention: see `cyclic_gather`.
      hidden: ``[c, n²]``.
      output: ``[n²]``.
      modulus: M.
    """

    attention: AlgebraicAttention
    hidden: Float[np.ndarray, "c pairs"]
    output: Float[np.ndarray, "pairs"]
    modulus: int

    @classmethod
    def build(
        cls, num_tokens: int, coefficient: int, modulus: int, *, interleaved: bool = True, num_heads: int | None = None
    ) -> "CountPermutationMatch3":
        """The weights.

        Args:
          num_tokens: n.
          coefficient: G.
          modulus: M.
          interleaved: whether the attention mixes heads.
          num_heads: of the attention, default what is needed; with fewer, tokens remain unseen.

        Raises:
          ValueError: unless G > 2 M, as the task has it.
        """
        if modulus < 1 or coefficient <= 2 * modulus:
            raise ValueError(
                f"CPM-3 needs modulus >= 1 and coefficient > 2 modulus, got coefficient={coefficient} and "
                f"modulus={modulus}."
            )
        attention = cyclic_gather(num_tokens, interleaved=interleaved, num_heads=num_heads)
        width = attention.num_heads * attention.value.shape[2]
        # Unit (a, b) reads the position's own token, which comes first, and the a-th and b-th after it.
        hidden = np.zeros((width, num_tokens, num_tokens))
        hidden[0] += 1
        for token in range(min(width, num_tokens)):
            hidden[token, token, :] += coefficient
            hidden[token, :, token] += 1
        return cls(attention, hidden.reshape(width, -1), np.ones(num_tokens**2), modulus)

    def __call__(self, tokens: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """The counts of whole-number tokens ``[n]``, exact below 2^53."""
        gathered = self.attention(with_identity(np.asarray(tokens, np.float64)[:, None]))
        return np.maximum(0, 1 - np.mod(gathered @ self.hidden, self.modulus)) @ self.output

    @property
    def num_attention_parameters(self) -> int:
        """Those of the attention layer: ``polynomial_filter_parameters(n, 1, n)``."""
        return self.attention.num_parameters

    @property
    def num_parameters(self) -> int:
        """Those of attention and MLP."""
        return self.num_attention_parameters + self.hidden.size + self.output.size


def _stacked(heads: np.ndarray) -> np.ndarray:
    """``[N, P, n, H]`` with a head's pseudo-heads row-wise: ``[N, P n, H]``."""
    return heads.reshape(heads.shape[0], -1, heads.shape[-1])


def _powers(matrix: np.ndarray, count: int) -> np.ndarray:
    """I, A, A² and so on, ``[count, n, n]``."""
    powers = [np.eye(len(matrix))]
    for _ in range(count - 1):
        powers.append(powers[-1] @ matrix)
    return np.stack(powers)
