"""The arithmetic of one tile: some query tokens against some key tokens, probabilities final in one pass.

Two exact rearrangements of Algorithm 1 (`paper.md` section 7) are chosen between, for scores and for values:

* scores ``"pseudo"``: pseudo-queries times pseudo-keys; ``"base"``: products of base heads, mixed afterwards
  (where the rotary embedding does not depend on the pseudo-head, so that mixing and products commute);
* values ``"mixed"``: collapsed probabilities times pseudo-values; ``"base"``: the value mixing is applied to
  the probabilities and base values are multiplied, so that no pseudo-value ever exists.

With a per-head collapse the probabilities are collapsed before they meet a value, which is P times cheaper.

Letters of the einsums: z batch, g tile, t query token, s key token, n query head, k key/value head,
x query head within its key/value head (n = k*x), p and r pseudo-head of query and key, m source head,
h head dimension of queries and keys, d that of values, o output head.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike

from iha_jax.ops import masks
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.types import Causal

SOFTMAX_ROWS = "iha_softmax_rows"
"""Name of the two residuals a checkpointed tile keeps, a row's largest score and the sum of its exponentials: two
floats per pseudo-query, 2/H of its pseudo-heads."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Which rearrangement computes scores and values (see the module's docstring)."""

    scores: Literal["pseudo", "base"]
    values: Literal["mixed", "base"]


@dataclasses.dataclass(frozen=True)
class TileSpec:
    """What is static about a tile."""

    form: Form
    scale: float
    logits_soft_cap: float | None
    precision: jax.lax.PrecisionLike
    compute_dtype: DTypeLike
    causal: Causal
    window: int | None

    def dot(self, spec: str, a: Array, b: Array) -> Array:
        """An einsum accumulated and returned in the compute dtype."""
        return jnp.einsum(spec, a, b, precision=self.precision, preferred_element_type=self.compute_dtype)


def mix_queries(x: Array, weights: Array, rotation: tuple[Array, Array] | None, spec: TileSpec) -> Array:
    """Pseudo-queries of a tile in natural order: ``[z,g,t,m,h]``, ``[m,n,p]`` -> ``[z,g,n,t,p,h]`` in x's dtype.

    Natural order of rows, (t, p): the collapse is then a product with P adjacent rows, which XLA's CPU runs ten
    times as fast as a sum over P distant ones.

    Args:
      x: base heads, already rotated by their token's index.
      weights: mixing tensor.
      rotation: cos and sin ``[P, H/2]`` of the remaining rotation by the pseudo-head's number (mixing commutes
        with rotations, `paper.md` section 7), or None.
      spec: static description.
    """
    mixed = spec.dot("zgtmh,zgmnp->zgnpth", x.astype(spec.compute_dtype), _per_tile(weights, x, spec))
    mixed = mixed.astype(x.dtype)
    if rotation is not None:
        mixed = _rotate(mixed, *(table[None, None, None, :, None, :] for table in rotation), axis=5, spec=spec)
    return jnp.swapaxes(mixed, 3, 4)


def mix_keys(x: Array, weights: Array, rotation: tuple[Array, Array] | None, spec: TileSpec) -> Array:
    """Pseudo-keys or -values of a tile as columns: ``[z,g,s,m,h]``, ``[m,k,r]`` -> ``[z,g,k,h,r,s]``, like x.

    Columns, because a product's gradient with respect to them has no long transposed operand then (three times as
    fast on CPU); arguments as those of `mix_queries`.
    """
    x = jnp.moveaxis(x, 2, 4)  # of base heads, so that no pseudo-head is moved a number at a time
    mixed = spec.dot("zgmhs,zgmkr->zgkrhs", x.astype(spec.compute_dtype), _per_tile(weights, x, spec))
    mixed = mixed.astype(x.dtype)
    if rotation is not None:
        mixed = _rotate(mixed, *(table[None, None, None, :, :, None] for table in rotation), axis=4, spec=spec)
    return jnp.swapaxes(mixed, 3, 4)


def _rotate(x: Array, cos: Array, sin: Array, axis: int, spec: TileSpec) -> Array:
    """Rotates pairs (h, h + H/2) on ``axis``."""
    first, second = jnp.split(x.astype(spec.compute_dtype), 2, axis=axis)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=axis).astype(x.dtype)


def _per_tile(weights: Array, x: Array, spec: TileSpec) -> Array:
    """Mixing weights repeated for every tile, ``[z,g,m,n,p]``, so that mixing is a batched product.

    Its result then needs no transposition (on CPU two to four times faster), and checkpoint policies that save
    products without batch dimensions do not save pseudo-heads.
    """
    return jnp.broadcast_to(weights.astype(spec.compute_dtype)[None, None], (*x.shape[:2], *weights.shape))


class Visibility(NamedTuple):
    """What the mask of a tile is made of: small arrays, so that no index arithmetic is left for every score.

    Attributes:
      query_index: `masks.mask_index` of pseudo-queries, ``[z|1, g, t, p]``.
      key_index: likewise of pseudo-keys, ``[z|1, g, r, s]``; `NEVER_SEEN` for padding.
      query_segment: ``[z, g, t]``, or None without segments.
      key_segment: ``[z, g, s]``, or None.
    """

    query_index: Array
    key_index: Array
    query_segment: Array | None
    key_segment: Array | None


NEVER_SEEN = 2**31 - 1
"""Index of a padded key: later than every query and beyond every window."""


def tile_attention(
    query: Array, key: Array, value: Array, mixing: HeadMixing, visibility: Visibility, spec: TileSpec
) -> Array:
    """Attention of one tile, or of several side by side on axis g.

    Args:
      query: pseudo-queries ``[z,g,n,t,p,h]``, or base queries ``[z,g,t,m,h]`` for base scores.
      key: pseudo-keys ``[z,g,k,h,r,s]``, or base keys ``[z,g,s,m,h]`` for base scores.
      value: pseudo-values ``[z,g,k,d,r,s]``, or base values ``[z,g,s,m,d]`` for base values.
      mixing: its heads may be a group of all heads: query ``[m,n,p]``, key and value ``[m,k,r]``, collapse
        ``[n,p]`` or ``[o,n,p]``.
      visibility: which keys are seen.
      spec: static description.

    Returns:
      ``[z,g,t,n,d]`` in the compute dtype; with the across-heads collapse ``[z,g,t,o,d]``, the contribution of
      these n heads to every output head.
    """
    pseudo = mixing.num_pseudo_heads
    if spec.form.scores == "pseudo":
        logits, keys_axis = _scores_from_pseudo(query, key, spec), (5,)  # [z,g,n,t,p,(r s)]
    else:
        logits, keys_axis = _scores_from_base(query, key, mixing, spec), (4, 6)  # [z,g,n,p,r,t,s]
    logits = logits * spec.scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    seen = _seen(visibility, pseudo, spec)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.max(jax.lax.stop_gradient(logits), axis=keys_axis, keepdims=True)
    top = checkpoint_name(jnp.where(top > -jnp.inf, top, 0.0), SOFTMAX_ROWS)
    powers = jnp.exp(logits - top)
    total = checkpoint_name(_row_sums(powers, keys_axis), SOFTMAX_ROWS)
    total = jnp.where(total > 0, total, 1.0)  # of a row that sees nothing: its probabilities are zeros

    if mixing.collapse.ndim == 2:
        rows = _over_rows(mixing.collapse.astype(spec.compute_dtype), keys_axis) / total
        weights = _sum_of_rows(rows, powers, keys_axis)
        return _values_per_head(_split_keys(weights, pseudo, spec), value, mixing, spec)
    return _values_across_heads(_split_keys(powers / total, pseudo, spec), value, mixing, spec)


def _seen(visibility: Visibility, pseudo: int, spec: TileSpec) -> Array | None:
    """Visibility in the layout of the scores, 1 on the head axis; None if every key is visible."""
    by_row, by_key, row_ids, key_ids = visibility
    if spec.form.scores == "pseudo":
        rows = by_row[:, :, None, :, :, None]
        keys = by_key.reshape(*by_key.shape[:2], 1, 1, 1, -1)
    else:
        rows = jnp.swapaxes(by_row, 2, 3)[:, :, None, :, None, :, None]
        keys = by_key[:, :, None, None, :, None, :]
    seen = masks.visible_by_index(rows, keys, num_pseudo_heads=pseudo, causal=spec.causal, window=spec.window)
    if row_ids is None or key_ids is None:
        return seen
    if spec.form.scores == "pseudo":
        z, g, s = key_ids.shape
        key_ids = jnp.broadcast_to(key_ids[:, :, None], (z, g, pseudo, s)).reshape(z, g, 1, 1, 1, -1)
        same = masks.same_segment(row_ids[:, :, None, :, None, None], key_ids)
    else:
        same = masks.same_segment(row_ids[:, :, None, None, None, :, None], key_ids[:, :, None, None, None, None])
    return same if seen is None else seen & same


def _scores_from_pseudo(query: Array, key: Array, spec: TileSpec) -> Array:
    z, g, n, t, p, h = query.shape
    kv_heads, _, r, s = key.shape[2:]
    # One batch axis: with more of them XLA does not turn the gradient of the keys around.
    query = query.reshape(z * g * kv_heads, (n // kv_heads) * t * p, h)
    key = key.reshape(z * g * kv_heads, h, r * s)
    return spec.dot("bqh,bhj->bqj", query, key).reshape(z, g, n, t, p, r * s)


def _scores_from_base(query: Array, key: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """``Σ mix_q[m,n,p] mix_k[l,k,r] (q[t,m]·k[s,l])``, contracted over the query's source heads first."""
    base = spec.dot("zgtmh,zgslh->zgmlts", query, key)
    half = spec.dot("zgmnp,zgmlts->zgnplts", _per_tile(mixing.query, base, spec), base)
    z, g, n, p, sources, t, s = half.shape
    kv_heads = mixing.num_kv_heads
    half = half.reshape(z, g, kv_heads, (n // kv_heads) * p, sources, t, s)
    logits = spec.dot("lkr,zgkqlts->zgkqrts", mixing.key.astype(spec.compute_dtype), half)
    return logits.reshape(z, g, n, p, mixing.num_pseudo_heads, t, s)


def _split_keys(weights: Array, pseudo: int, spec: TileSpec) -> Array:
    """Gives the key axis of pseudo scores its two parts: ``[..., (r s)]`` -> ``[..., r, s]``."""
    if spec.form.scores == "base":
        return weights
    return weights.reshape(*weights.shape[:-1], pseudo, weights.shape[-1] // pseudo)


def _values_per_head(weights: Array, value: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """Collapsed probabilities ``[z,g,n,t,r,s]`` (base scores: ``[z,g,n,r,t,s]``) times values -> ``[z,g,t,n,d]``."""
    order = "trs" if spec.form.scores == "pseudo" else "rts"
    z, g, n = weights.shape[:3]
    kv_heads = mixing.num_kv_heads
    weights = weights.reshape(z, g, kv_heads, n // kv_heads, *weights.shape[3:])
    if spec.form.values == "mixed":
        out = spec.dot(f"zgkx{order},zgkdrs->zgtkxd", weights.astype(value.dtype), value)
    else:
        by_source = spec.dot(f"zgkx{order},mkr->zgkxtms", weights, mixing.value.astype(spec.compute_dtype))
        out = spec.dot("zgkxtms,zgsmd->zgtkxd", by_source.astype(value.dtype), value)
    return out.reshape(z, g, out.shape[2], n, out.shape[-1])


def _values_across_heads(weights: Array, value: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """Probabilities ``[z,g,n,t,p,r,s]`` (base scores: ``[z,g,n,p,r,t,s]``) times values -> ``[z,g,t,o,d]``."""
    rows, order = ("tprs", "trs") if spec.form.scores == "pseudo" else ("prts", "rts")
    z, g, n = weights.shape[:3]
    kv_heads = mixing.num_kv_heads
    weights = weights.reshape(z, g, kv_heads, n // kv_heads, *weights.shape[3:])
    out_heads, _, pseudo = mixing.collapse.shape
    collapse = mixing.collapse.astype(spec.compute_dtype).reshape(out_heads, kv_heads, n // kv_heads, pseudo)
    if spec.form.values == "mixed":
        pseudo_out = spec.dot(f"zgkx{rows},zgkdrs->zgkxptd", weights.astype(value.dtype), value)
        return spec.dot("okxp,zgkxptd->zgtod", collapse, pseudo_out)
    # Heads that share a key/value head share its value mixing: sum over them before the next contraction.
    collapsed = spec.dot(f"okxp,zgkx{rows}->zgok{order}", collapse, weights)
    by_source = spec.dot(f"zgok{order},mkr->zgotms", collapsed, mixing.value.astype(spec.compute_dtype))
    return spec.dot("zgotms,zgsmd->zgtod", by_source.astype(value.dtype), value)


# Sums of exponentials, once along keys and once along pseudo-queries, are products: what XLA's CPU adds up by a
# reduction it computes again there. Their derivatives are written as sums, so that transposing them gives factors
# to be fused with the rest of the softmax's gradient, not products with sums of one term.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _row_sums(x: Array, axis: tuple[int, ...]) -> Array:
    """Sums over the keys, which are kept as axes of length 1."""
    if len(axis) == 1:
        return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision="highest")
    return jnp.sum(x, axis=axis, keepdims=True)


@_row_sums.defjvp
def _row_sums_jvp(axis, primals, tangents):
    return _row_sums(primals[0], axis), jnp.sum(tangents[0], axis=axis, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _sum_of_rows(rows: Array, x: Array, axis: tuple[int, ...]) -> Array:
    """The collapse: the sum over pseudo-queries of x times one factor a row.

    ``[z,g,n,t,p,1]``, ``[z,g,n,t,p,j] -> [z,g,n,t,j]`` or ``[z,g,n,p,1,t,1]``, ``[z,g,n,p,r,t,s] -> [z,g,n,r,t,s]``.
    """
    if len(axis) == 1:
        # The collapse is float32 by contract, also where the default precision of products is lower.
        return jnp.matmul(jnp.swapaxes(rows, -1, -2), x, precision="highest")[..., 0, :]
    # A sum over a non-minor axis written as P fused additions: XLA's CPU reduction took five times as long.
    scaled = x * rows
    return functools.reduce(jnp.add, (scaled[:, :, :, p] for p in range(x.shape[3])))


@_sum_of_rows.defjvp
def _sum_of_rows_jvp(axis, primals, tangents):
    rows, x = primals
    d_rows, d_x = tangents
    tangent = jnp.sum(rows * d_x, axis=4 if len(axis) == 1 else 3) + _sum_of_rows(d_rows, x, axis)
    return _sum_of_rows(rows, x, axis), tangent


def _over_rows(collapse: Array, axis: tuple[int, ...]) -> Array:
    """``[n,p]`` broadcast against scores ``[z,g,n,t,p,j]`` (one key axis) or ``[z,g,n,p,r,t,s]`` (two)."""
    n, p = collapse.shape
    return collapse.reshape((1, 1, n, 1, p, 1) if len(axis) == 1 else (1, 1, n, p, 1, 1, 1))
