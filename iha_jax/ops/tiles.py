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
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike

from iha_jax.ops.mixing import HeadMixing

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


def tile_attention(
    query: Array, key: Array, value: Array, mixing: HeadMixing, seen: Array | None, spec: TileSpec
) -> Array:
    """Attention of one tile, or of several side by side on axis g.

    Args:
      query: pseudo-queries ``[z,g,n,p,t,h]``, or base queries ``[z,g,t,m,h]`` for base scores.
      key: pseudo-keys ``[z,g,k,r,s,h]``, or base keys ``[z,g,s,m,h]`` for base scores.
      value: pseudo-values ``[z,g,k,r,s,d]``, or base values ``[z,g,s,m,d]`` for base values.
      mixing: its heads may be a group of all heads: query ``[m,n,p]``, key and value ``[m,k,r]``, collapse
        ``[n,p]`` or ``[o,n,p]``.
      seen: bool ``[z|1, g|1, p, t, r, s]``, or None if every key is visible.
      spec: static description.

    Returns:
      ``[z,g,t,n,d]`` in the compute dtype; with the across-heads collapse ``[z,g,t,o,d]``, the contribution of
      these n heads to every output head.
    """
    pseudo = mixing.num_pseudo_heads
    if spec.form.scores == "pseudo":
        logits = _scores_from_pseudo(query, key, spec)  # [z,g,n,p,t,(r s)]
        keys_axis = (-1,)
        if seen is not None:
            seen = seen.reshape(*seen.shape[:4], -1)
    else:
        logits = _scores_from_base(query, key, mixing, spec)  # [z,g,n,p,r,t,s]
        keys_axis = (4, 6)
        if seen is not None:
            seen = jnp.swapaxes(seen, 3, 4)
    logits = logits * spec.scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    if seen is not None:
        logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
    log_sum = _log_sum_exp(jax.lax.stop_gradient(logits), keys_axis)
    log_sum = checkpoint_name(log_sum, LOG_SUM_EXP)

    if mixing.collapse.ndim == 2:
        weights = _collapsed_probabilities(logits, log_sum, mixing.collapse.astype(spec.compute_dtype), keys_axis)
        return _values_per_head(_split_keys(weights, pseudo, spec), value, mixing, spec)
    weights = _probabilities(logits, log_sum, keys_axis)
    return _values_across_heads(_split_keys(weights, pseudo, spec), value, mixing, spec)


def _scores_from_pseudo(query: Array, key: Array, spec: TileSpec) -> Array:
    z, g, n, p, t, h = query.shape
    kv_heads, r, s = key.shape[2:5]
    query = query.reshape(z, g, kv_heads, (n // kv_heads) * p * t, h)
    key = key.reshape(*key.shape[:3], r * s, h)
    return spec.dot("zgkqh,zgkjh->zgkqj", query, key).reshape(z, g, n, p, t, r * s)


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
    """Gives the key axis of pseudo scores its two parts: ``[..., t, (r s)]`` -> ``[..., t, r, s]``."""
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
    """Probabilities ``[z,g,n,p,t,r,s]`` (base scores: ``[z,g,n,p,r,t,s]``) times values -> ``[z,g,t,o,d]``."""
    order = "trs" if spec.form.scores == "pseudo" else "rts"
    z, g, n = weights.shape[:3]
    kv_heads = mixing.num_kv_heads
    weights = weights.reshape(z, g, kv_heads, n // kv_heads, *weights.shape[3:])
    out_heads, _, pseudo = mixing.collapse.shape
    collapse = mixing.collapse.astype(spec.compute_dtype).reshape(out_heads, kv_heads, n // kv_heads, pseudo)
    if spec.form.values == "mixed":
        pseudo_out = spec.dot(f"zgkxp{order},zgkrsd->zgkxptd", weights.astype(value.dtype), value)
        return spec.dot("okxp,zgkxptd->zgtod", collapse, pseudo_out)
    # Heads that share a key/value head share its value mixing: sum over them before the next contraction.
    collapsed = spec.dot(f"okxp,zgkxp{order}->zgok{order}", collapse, weights)
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
    """``Σ_p R[n,p] softmax(logits)[…,n,p,…]``: the pseudo axis (3) is gone from the result."""
    del axis
    weights = jnp.exp(logits - log_sum)
    # A sum over a non-minor axis written as P fused additions: XLA's CPU reduction took five times as long.
    scaled = weights * _over_rows(collapse, logits.ndim)
    return functools.reduce(jnp.add, (scaled[:, :, :, p] for p in range(collapse.shape[-1])))


@_collapsed_probabilities.defjvp
def _collapsed_probabilities_jvp(axis, primals, tangents):
    logits, log_sum, collapse = primals
    d_logits, _, d_collapse = tangents
    weights = _probabilities(logits, log_sum, axis)  # by its own rule, for second derivatives
    rows = _over_rows(collapse, logits.ndim)
    # Everything but d_logits itself enters through one number per pseudo-query, so that the transposed rule
    # needs a single reduction over the scores, shared by the gradients of logits and collapse.
    mean = jnp.sum(weights * d_logits, axis=axis, keepdims=True)
    per_row = _over_rows(d_collapse, logits.ndim) - rows * mean
    out = _collapsed_probabilities(logits, log_sum, collapse, axis)
    return out, jnp.sum(weights * (rows * d_logits + per_row), axis=3)


def _over_rows(collapse: Array, ndim: int) -> Array:
    """``[n,p]`` placed on axes 2 and 3 of an array of ``ndim`` axes."""
    return collapse.reshape(1, 1, *collapse.shape, *([1] * (ndim - 4)))
