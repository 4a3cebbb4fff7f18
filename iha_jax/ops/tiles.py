"""The arithmetic of one tile: some query tokens against some key tokens, probabilities final in one pass.

Two exact rearrangements of Algorithm 1 (`paper.md` section 7) are chosen between, for scores and for values:

* scores ``"pseudo"``: pseudo-queries times pseudo-keys; ``"base"``: products of base heads, mixed afterwards
  (where the rotary embedding does not depend on the pseudo-head, so that mixing and products commute);
* values ``"mixed"``: collapsed probabilities times pseudo-values; ``"base"``: the value mixing is applied to
  the probabilities and base values are multiplied, so that no pseudo-value ever exists.

With a per-head collapse the probabilities are collapsed before they meet a value, which is P times cheaper.

Letters of the einsums: z batch, g tile, t query token, s key token, n query head, k key/value head,
x query head within its key/value head (n = k*x), p and r pseudo-head of query and key, m and l source heads of
queries and of keys, h head dimension of queries and keys, d that of values, o output head, j pseudo-keys in the
form's order: (r s) where they are mixed, so that mixing leaves whole rows of tokens in place; (s r) where scores are.
"""

import dataclasses
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

    @property
    def pseudo_keys(self) -> str:
        """The order of pseudo-keys along a row of scores, in the letters of the einsums."""
        return "rs" if self.scores == "pseudo" else "sr"


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


Rotation = tuple[Array, Array] | None
"""cos and sin ``[P, H/2]`` of what is left of the rotation once tokens are rotated: the pseudo-head's number (mixing
commutes with rotations, `paper.md` section 7)."""


def mix_queries(x: Array, weights: Array, rotation: Rotation, spec: TileSpec) -> Array:
    """Pseudo-queries of a tile in natural order: ``[z,g,m,t,h]``, ``[m,n,p]`` -> ``[z,g,n,t,p,h]`` in x's dtype.

    Natural order of rows, (t, p): the collapse is then a product with P adjacent rows, which XLA's CPU runs ten
    times as fast as a sum over P distant ones.

    Args:
      x: base heads, already rotated by their token's index.
      weights: mixing tensor.
      rotation: the remaining one, or None.
      spec: static description.
    """
    mixed = _mix_heads(x, weights, spec)  # [z,g,n,p,t,h]
    if rotation is not None:
        cos, sin = (table[None, None, None, :, None, :] for table in rotation)
        mixed = _rotate(mixed, cos, sin, axis=-1)
    return jnp.swapaxes(mixed.astype(x.dtype), 3, 4)


def mix_keys(x: Array, weights: Array, rotation: Rotation, spec: TileSpec) -> Array:
    """Pseudo-keys or -values of a tile as columns: ``[z,g,m,h,s]``, ``[m,k,r]`` -> ``[z,g,k,h,r,s]``, like x.

    Columns, because a product's gradient with respect to them has no long transposed operand then (three times as
    fast on CPU); arguments as those of `mix_queries`.
    """
    mixed = _mix_heads(x, weights, spec)  # [z,g,k,r,h,s]
    if rotation is not None:
        cos, sin = (table[None, None, None, :, :, None] for table in rotation)
        mixed = _rotate(mixed, cos, sin, axis=-2)
    return jnp.swapaxes(mixed.astype(x.dtype), 3, 4)


def _mix_heads(x: Array, weights: Array, spec: TileSpec) -> Array:
    """``[z,g,m,a,b]``, ``[m,n,p]`` -> ``[z,g,n,p,a,b]``.

    The source heads are outermost, so that every operand of this product and of its gradients is where it is wanted
    (on CPU, turning them around took as long as the scores).
    """
    z, g, m, a, b = x.shape
    _, n, p = weights.shape
    weights = jnp.swapaxes(weights.reshape(m, n * p).astype(spec.compute_dtype), 0, 1)
    # Weights repeated for every tile make mixing a batched product: checkpoint policies that save products without
    # batch dimensions do not save pseudo-heads.
    weights = jnp.broadcast_to(weights[None], (z * g, n * p, m))
    mixed = spec.dot("cqm,cmi->cqi", weights, x.astype(spec.compute_dtype).reshape(z * g, m, a * b))
    return mixed.reshape(z, g, n, p, a, b)


def _rotate(x: Array, cos: Array, sin: Array, axis: int) -> Array:
    first, second = jnp.split(x, 2, axis=axis)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=axis)


def _per_tile(weights: Array, batch: tuple[int, ...], spec: TileSpec) -> Array:
    """Mixing weights repeated for every tile (or token): a batched product, see `_mix_heads`."""
    weights = weights.astype(spec.compute_dtype)
    return jnp.broadcast_to(weights[(None,) * len(batch)], (*batch, *weights.shape))


class Visibility(NamedTuple):
    """What the mask of a tile is made of: small arrays, so that no index arithmetic is left for every score.

    Attributes:
      query_index: `masks.mask_index` of pseudo-queries, ``[z|1, g, t, p]``.
      key_index: likewise of pseudo-keys, ``[z|1, g, j]``; `NEVER_SEEN` for padding.
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
        logits = _scores_from_pseudo(query, key, spec)
    else:
        logits = _scores_from_base(query, key, mixing, spec)
    logits = logits * spec.scale  # [z,g,n,t,p,j]
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    seen = _seen(visibility, pseudo, spec)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)

    top = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
    top = checkpoint_name(jnp.where(top > -jnp.inf, top, 0.0), SOFTMAX_ROWS)
    powers = jnp.exp(logits - top)
    total = checkpoint_name(_row_sums(powers), SOFTMAX_ROWS)
    total = jnp.where(total > 0, total, 1.0)  # of a row that sees nothing: its probabilities are zeros

    def split_keys(weights: Array) -> Array:
        tokens = weights.shape[-1] // pseudo
        order = (pseudo, tokens) if spec.form.pseudo_keys == "rs" else (tokens, pseudo)
        return weights.reshape(*weights.shape[:-1], *order)

    if mixing.collapse.ndim == 2:
        rows = mixing.collapse.astype(spec.compute_dtype)[None, None, :, None, :, None] / total
        return _values_per_head(split_keys(_sum_of_rows(rows, powers)), value, mixing, spec)
    return _values_across_heads(split_keys(powers / total), value, mixing, spec)


def _seen(visibility: Visibility, pseudo: int, spec: TileSpec) -> Array | None:
    """Visibility in the layout of the scores, 1 on the head axis; None if every key is visible."""
    by_row, by_key, row_ids, key_ids = visibility
    rows = by_row[:, :, None, :, :, None]
    keys = by_key[:, :, None, None, None]
    seen = masks.visible_by_index(rows, keys, num_pseudo_heads=pseudo, causal=spec.causal, window=spec.window)
    if row_ids is None or key_ids is None:
        return seen
    z, g, s = key_ids.shape
    if spec.form.pseudo_keys == "rs":
        key_ids = jnp.broadcast_to(key_ids[:, :, None], (z, g, pseudo, s))
    else:
        key_ids = jnp.broadcast_to(key_ids[..., None], (z, g, s, pseudo))
    key_ids = key_ids.reshape(z, g, 1, 1, 1, -1)
    same = masks.same_segment(row_ids[:, :, None, :, None, None], key_ids)
    return same if seen is None else seen & same


def _scores_from_pseudo(query: Array, key: Array, spec: TileSpec) -> Array:
    z, g, n, t, p, h = query.shape
    kv_heads, _, r, s = key.shape[2:]
    # One batch axis: with more of them XLA does not turn the gradient of the keys around.
    query = query.reshape(z * g * kv_heads, (n // kv_heads) * t * p, h)
    key = key.reshape(z * g * kv_heads, h, r * s)
    return spec.dot("bqh,bhj->bqj", query, key).reshape(z, g, n, t, p, r * s)


def _scores_from_base(query: Array, key: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """``Σ mix_q[m,n,p] mix_k[l,k,r] (q[t,m]·k[s,l])``, contracted over the query's source heads first.

    In an order that leaves every operand and result where the next product wants it.
    """
    z, g, t, m, _ = query.shape
    s, sources = key.shape[2:4]
    _, n, p = mixing.query.shape
    _, kv_heads, r = mixing.key.shape
    base = spec.dot("zgtmh,zgslh->zgtmsl", query, key).reshape(z, g, t, m, s * sources)
    by_query = spec.dot("zgtmq,zgtmi->zgtqi", _per_tile(mixing.query.reshape(m, n * p), (z, g, t), spec), base)
    by_query = by_query.reshape(z, g, t, kv_heads, (n // kv_heads) * p * s, sources)
    by_key = _per_tile(jnp.swapaxes(mixing.key, 0, 1), (z, g, t), spec)
    logits = spec.dot("zgtkil,zgtklr->zgtkir", by_query, by_key)
    return jnp.swapaxes(logits.reshape(z, g, t, n, p, s * r), 2, 3)


def _values_per_head(weights: Array, value: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """Collapsed probabilities ``[z,g,n,t,*j]`` times values -> ``[z,g,t,n,d]``."""
    z, g, n = weights.shape[:3]
    kv_heads = mixing.num_kv_heads
    weights = weights.reshape(z, g, kv_heads, n // kv_heads, *weights.shape[3:])
    keys, sources = spec.form.pseudo_keys, spec.form.pseudo_keys.replace("r", "m")
    if spec.form.values == "mixed":
        out = spec.dot(f"zgkxt{keys},zgkdrs->zgtkxd", weights.astype(value.dtype), value)
    else:
        by_source = spec.dot(f"zgkxt{keys},zgmkr->zgkxt{sources}", weights, _per_tile(mixing.value, (z, g), spec))
        out = spec.dot(f"zgkxt{sources},zgsmd->zgtkxd", by_source.astype(value.dtype), value)
    return out.reshape(z, g, out.shape[2], n, out.shape[-1])


def _values_across_heads(weights: Array, value: Array, mixing: HeadMixing, spec: TileSpec) -> Array:
    """Probabilities ``[z,g,n,t,p,*j]`` times values -> ``[z,g,t,o,d]``."""
    z, g, n = weights.shape[:3]
    kv_heads = mixing.num_kv_heads
    weights = weights.reshape(z, g, kv_heads, n // kv_heads, *weights.shape[3:])
    out_heads, _, pseudo = mixing.collapse.shape
    collapse = mixing.collapse.astype(spec.compute_dtype).reshape(out_heads, kv_heads, n // kv_heads, pseudo)
    keys, sources = spec.form.pseudo_keys, spec.form.pseudo_keys.replace("r", "m")
    if spec.form.values == "mixed":
        pseudo_out = spec.dot(f"zgkxtp{keys},zgkdrs->zgkxptd", weights.astype(value.dtype), value)
        return spec.dot("okxp,zgkxptd->zgtod", collapse, pseudo_out)
    # Heads that share a key/value head share its value mixing: sum over them before the next contraction.
    collapsed = spec.dot(f"okxp,zgkxtp{keys}->zgokt{keys}", collapse, weights)
    by_source = spec.dot(f"zgokt{keys},mkr->zgot{sources}", collapsed, mixing.value.astype(spec.compute_dtype))
    return spec.dot(f"zgot{sources},zgsmd->zgtod", by_source.astype(value.dtype), value)


# Sums of exponentials, once along keys and once along pseudo-queries, are products: what XLA's CPU adds up by a
# reduction it computes again there. Their derivatives are written as sums, so that transposing them gives factors
# to be fused with the rest of the softmax's gradient, not products with sums of one term.


@jax.custom_jvp
def _row_sums(x: Array) -> Array:
    """Sums over the keys, which are kept as an axis of length 1."""
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision="highest")


@_row_sums.defjvp
def _row_sums_jvp(primals, tangents):
    return _row_sums(primals[0]), jnp.sum(tangents[0], axis=-1, keepdims=True)


@jax.custom_jvp
def _sum_of_rows(rows: Array, x: Array) -> Array:
    """The collapse, a sum over pseudo-queries with one factor a row: ``[...,p,1]``, ``[...,p,j] -> [...,j]``."""
    # It is float32 by contract, also where the default precision of products is lower.
    return jnp.matmul(jnp.swapaxes(rows, -1, -2), x, precision="highest")[..., 0, :]


@_sum_of_rows.defjvp
def _sum_of_rows_jvp(primals, tangents):
    rows, x = primals
    d_rows, d_x = tangents
    return _sum_of_rows(rows, x), jnp.sum(rows * d_x, axis=-2) + _sum_of_rows(d_rows, x)
