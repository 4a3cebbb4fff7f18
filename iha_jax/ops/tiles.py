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

LOG_SUM_EXP = "iha_log_sum_exp"
"""Name of the one residual a checkpointed tile keeps: a float per pseudo-query, 1/H of its pseudo-heads."""


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


def mix_heads(x: Array, weights: Array, rotation: tuple[Array, Array] | None, spec: TileSpec) -> Array:
    """Pseudo-heads of a tile, pseudo-major: ``[z,g,t,m,h]``, ``[m,n,p]`` -> ``[z,g,n,p,t,h]`` in x's dtype.

    Args:
      x: base heads, already rotated by their token's index.
      weights: mixing tensor.
      rotation: cos and sin ``[P, H/2]`` of the remaining rotation by the pseudo-head's number (mixing commutes
        with rotations, `paper.md` section 7), or None.
      spec: static description.
    """
    mixed = spec.dot("zgtmh,zgmnp->zgnpth", x.astype(spec.compute_dtype), _per_tile(weights, x, spec))
    if rotation is None:
        return mixed.astype(x.dtype)
    cos, sin = (table[None, None, None, :, None, :] for table in rotation)
    first, second = jnp.split(mixed.astype(x.dtype).astype(spec.compute_dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


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
      query: pseudo-queries ``[z,g,n,p,t,h]``, or base queries ``[z,g,t,m,h]`` for base scores.
      key: pseudo-keys ``[z,g,k,r,s,h]``, or base keys ``[z,g,s,m,h]`` for base scores.
      value: pseudo-values ``[z,g,k,r,s,d]``, or base values ``[z,g,s,m,d]`` for base values.
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
    log_sum = _log_sum_exp(jax.lax.stop_gradient(logits), keys_axis)
    log_sum = checkpoint_name(log_sum, LOG_SUM_EXP)

    if mixing.collapse.ndim == 2:
        weights = _collapsed_probabilities(logits, log_sum, mixing.collapse.astype(spec.compute_dtype), keys_axis)
        return _values_per_head(_split_keys(weights, pseudo, spec), value, mixing, spec)
    weights = _probabilities(logits, log_sum, keys_axis)
    return _values_across_heads(_split_keys(weights, pseudo, spec), value, mixing, spec)


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
    z, g, n, p, t, h = query.shape
    kv_heads, r, s = key.shape[2:5]
    # Natural order of rows, (t, p): the collapse is then a product with P adjacent rows, which XLA's CPU runs ten
    # times as fast as a sum over P distant ones.
    query = jnp.swapaxes(query, 3, 4).reshape(z, g, kv_heads, (n // kv_heads) * t * p, h)
    key = key.reshape(*key.shape[:3], r * s, h)
    return spec.dot("zgkqh,zgkjh->zgkqj", query, key).reshape(z, g, n, t, p, r * s)


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
        out = spec.dot(f"zgkx{order},zgkrsd->zgtkxd", weights.astype(value.dtype), value)
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
        pseudo_out = spec.dot(f"zgkx{rows},zgkrsd->zgkxptd", weights.astype(value.dtype), value)
        return spec.dot("okxp,zgkxptd->zgtod", collapse, pseudo_out)
    # Heads that share a key/value head share its value mixing: sum over them before the next contraction.
    collapsed = spec.dot(f"okxp,zgkx{rows}->zgok{order}", collapse, weights)
    by_source = spec.dot(f"zgok{order},mkr->zgotms", collapsed, mixing.value.astype(spec.compute_dtype))
    return spec.dot("zgotms,zgsmd->zgtod", by_source.astype(value.dtype), value)


def _log_sum_exp(logits: Array, axis: tuple[int, ...]) -> Array:
    """Log of the sum of exponentials, 0 where every logit is -inf; keeps the reduced axes."""
    top = jnp.max(logits, axis=axis, keepdims=True)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    total = jnp.sum(jnp.exp(logits - top), axis=axis, keepdims=True)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _probabilities(logits: Array, log_sum: Array, axis: tuple[int, ...]) -> Array:
    """Softmax from its log-sum-exp, whose dependence on the logits the derivative rule accounts for."""
    del axis
    return jnp.exp(logits - log_sum)


@_probabilities.defjvp
def _probabilities_jvp(axis, primals, tangents):
    logits, log_sum = primals
    # Not exp(logits - log_sum): the rule must hold for its own derivatives too.
    weights = _probabilities(logits, log_sum, axis)
    d_logits = tangents[0]
    return weights, weights * (d_logits - jnp.sum(weights * d_logits, axis=axis, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _collapsed_probabilities(logits: Array, log_sum: Array, collapse: Array, axis: tuple[int, ...]) -> Array:
    """``Σ_p R[n,p] softmax(logits)``: ``[z,g,n,t,p,j] -> [z,g,n,t,j]`` or ``[z,g,n,p,r,t,s] -> [z,g,n,r,t,s]``."""
    weights = jnp.exp(logits - log_sum)
    if len(axis) == 1:
        z, g, n, t, p, _ = weights.shape
        rows = jnp.broadcast_to(collapse[None, None, :, None, None], (z, g, n, t, 1, p))
        # The collapse is float32 by contract, also where the default precision of products is lower.
        return jnp.matmul(rows, weights, precision="highest")[:, :, :, :, 0]
    # A sum over a non-minor axis written as P fused additions: XLA's CPU reduction took five times as long.
    scaled = weights * _over_rows(collapse, axis)
    return functools.reduce(jnp.add, (scaled[:, :, :, p] for p in range(collapse.shape[-1])))


@_collapsed_probabilities.defjvp
def _collapsed_probabilities_jvp(axis, primals, tangents):
    logits, log_sum, collapse = primals
    d_logits, _, d_collapse = tangents
    weights = _probabilities(logits, log_sum, axis)  # by its own rule, for second derivatives
    rows = _over_rows(collapse, axis)
    # Everything but d_logits itself enters through one number per pseudo-query, so that the transposed rule
    # needs a single reduction over the scores, shared by the gradients of logits and collapse.
    mean = jnp.sum(weights * d_logits, axis=axis, keepdims=True)
    per_row = _over_rows(d_collapse, axis) - rows * mean
    out = _collapsed_probabilities(logits, log_sum, collapse, axis)
    return out, jnp.sum(weights * (rows * d_logits + per_row), axis=4 if len(axis) == 1 else 3)


def _over_rows(collapse: Array, axis: tuple[int, ...]) -> Array:
    """``[n,p]`` broadcast against scores ``[z,g,n,t,p,j]`` (one key axis) or ``[z,g,n,p,r,t,s]`` (two)."""
    n, p = collapse.shape
    return collapse.reshape((1, 1, n, 1, p, 1) if len(axis) == 1 else (1, 1, n, p, 1, 1, 1))
