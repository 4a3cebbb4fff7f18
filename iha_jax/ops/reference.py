"""Algorithm 1 of the paper, written as plainly as it reads. The specification of every other implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from iha_jax.ops import masks
from iha_jax.ops import mixing as mixing_ops
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.rope import apply_rope, rope_tables


def reference(args: Arguments) -> Array:
    """Materialises every pseudo-head and the whole score matrix. Takes validated arguments, any order of tokens."""
    args = args.cleared()
    m, p, f32 = args.mixing, args.num_pseudo_heads, args.compute_dtype
    groups = m.num_heads // m.num_kv_heads

    query = mixing_ops.interleave(mixing_ops.mix(args.query, m.query, args.precision))  # [B, T*P, N, H]
    key = mixing_ops.interleave(mixing_ops.mix(args.key, m.key, args.precision))  # [B, S*P, K, H]
    value = mixing_ops.interleave(mixing_ops.mix(args.value, m.value, args.precision))  # [B, S*P, K, Hv]

    def virtual(x: Array) -> tuple[Array, Array]:
        """Token property and pseudo index of every virtual token: [B, T*P] each."""
        pseudo = jnp.tile(jnp.arange(p, dtype=jnp.int32), x.shape[1])
        return jnp.repeat(x, p, axis=1), jnp.broadcast_to(pseudo[None], (x.shape[0], x.shape[1] * p))

    query_position, query_pseudo = virtual(args.query_positions)
    key_position, key_pseudo = virtual(args.key_positions)
    rope = args.rope
    if rope is not None:
        by_virtual = rope.positions == "virtual"
        for_query = query_position * p + query_pseudo if by_virtual else query_position
        for_key = key_position * p + key_pseudo if by_virtual else key_position
        tables = lambda index: rope_tables(index[:, :, None], rope, args.head_dim, p, f32)  # noqa: E731
        query = apply_rope(query, *tables(for_query))
        key = apply_rope(key, *tables(for_key))

    seen = masks.same_segment(
        jnp.repeat(args.query_segment_ids, p, axis=1)[:, :, None],
        jnp.repeat(args.key_segment_ids, p, axis=1)[:, None, :],
    )
    by_position = masks.visible(
        query_position[:, :, None],
        query_pseudo[:, :, None],
        key_position[:, None, :],
        key_pseudo[:, None, :],
        num_pseudo_heads=p,
        causal=args.causal,
        window=args.window,
    )
    seen = (seen if by_position is None else seen & by_position)[:, None]  # [B, 1, T*P, S*P]

    key, value = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", query.astype(f32), key.astype(f32), precision=args.precision)
    logits = logits * args.scale
    if args.logits_soft_cap is not None:
        logits = args.logits_soft_cap * jnp.tanh(logits / args.logits_soft_cap)
    # A query that sees nothing gets weights 0, not a uniform average; the inner where keeps its gradient 0 too.
    any_seen = seen.any(axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(seen, logits, jnp.where(any_seen, -jnp.inf, 0.0)), axis=-1)
    weights = jnp.where(seen, weights, 0.0)
    pseudo_output = jnp.einsum("bnts,bsnh->btnh", weights, value.astype(f32), precision=args.precision)
    return mixing_ops.collapse(pseudo_output, m.collapse, args.precision).astype(args.query.dtype)
