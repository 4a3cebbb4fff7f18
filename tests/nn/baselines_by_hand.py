"""The baselines' outputs from their parameters, in float64 NumPy: one row, one head, one query at a time."""

import numpy as np

from tests import oracle
from tests.nn.by_hand import rms_norm, values


def heads_of(layer, x, kind):
    y = np.tensordot(x, values(layer, f"{kind}_kernel")[0], axes=1)
    bias = getattr(layer, f"{kind}_bias")
    return y if bias is None else y + np.asarray(bias[...], np.float64)


def rotated(layer, x, positions):
    """Every vector ``[..., d]`` of x ``[B, T, M, d]`` by its token's position."""
    if layer.rope is None:
        return x
    rows = [
        oracle.rotate(row, row_positions, TokenRope(layer.rope))
        for row, row_positions in zip(x, positions, strict=True)
    ]
    return np.stack(rows)


class TokenRope:
    """The oracle counts positions of axis 1 as pseudo-heads unless they are tokens'."""

    def __init__(self, rope):
        self.theta, self.scaling, self.positions = rope.theta, rope.scaling, "token"


def seen_by(layer, batch, tokens, positions, ids):
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens)) if positions is None else np.asarray(positions)
    ids = np.ones((batch, tokens), int) if ids is None else np.asarray(ids)
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] != 0)
    distance = positions[:, :, None] - positions[:, None, :]
    if layer.causal:
        seen &= distance >= 0
    if layer.window is not None:
        seen &= abs(distance) < layer.window
    return positions, seen


def soft(layer, logits, seen):
    """Softmax over what is seen of the last axis; 0 if nothing is."""
    if layer.logits_soft_cap is not None:
        logits = layer.logits_soft_cap * np.tanh(logits / layer.logits_soft_cap)
    if not seen.any():
        return np.zeros_like(logits)
    weights = np.where(seen, np.exp(logits - logits[seen].max()), 0)
    return weights / weights.sum()


def finished(layer, heads):
    y = np.tensordot(heads, values(layer, "out_kernel")[0], axes=2)
    return y if layer.out_bias is None else y + np.asarray(layer.out_bias[...], np.float64)


def talking_heads(layer, x, positions=None, segment_ids=None):
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    positions, seen = seen_by(layer, batch, tokens, positions, segment_ids)
    query, key, value = (heads_of(layer, x, kind) for kind in ("query", "key", "value"))
    if layer.query_norm is not None:
        query = rms_norm(query, values(layer.query_norm, "scale")[0])
        key = rms_norm(key, values(layer.key_norm, "scale")[0])
    query, key = rotated(layer, query, positions), rotated(layer, key, positions)
    n, k, h = query.shape[2], key.shape[2], query.shape[3]
    before, after = values(layer, "talking_logits", "talking_weights")
    out = np.zeros((batch, tokens, n, h))
    for b in range(batch):
        for t in range(tokens):
            logits = np.array([key[b, :, m // (n // k)] @ query[b, t, m] / np.sqrt(h) for m in range(n)])
            mixed = before.T @ logits
            weights = after.T @ np.array([soft(layer, row, seen[b, t]) for row in mixed])
            for m in range(n):
                out[b, t, m] = weights[m] @ value[b, :, m // (n // k)]
    return finished(layer, out)


def differential(layer, x, positions=None, segment_ids=None):
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    positions, seen = seen_by(layer, batch, tokens, positions, segment_ids)
    query, key, value = (heads_of(layer, x, kind) for kind in ("query", "key", "value"))
    n, k, d = query.shape[2], key.shape[2], query.shape[3] // 2
    maps = []
    for i in range(2):
        q, c = query[..., i * d : (i + 1) * d], key[..., i * d : (i + 1) * d]
        if layer.query_norm is not None:
            q = rms_norm(q, values(layer.query_norm, "scale")[0])
            c = rms_norm(c, values(layer.key_norm, "scale")[0])
        maps.append((rotated(layer, q, positions), rotated(layer, c, positions)))
    q1, k1, q2, k2, start = values(
        layer, "lambda_query_1", "lambda_key_1", "lambda_query_2", "lambda_key_2", "lambda_init"
    )
    factor = np.exp(q1 @ k1) - np.exp(q2 @ k2) + start
    out = np.zeros((batch, tokens, n, 2 * d))
    for b in range(batch):
        for t in range(tokens):
            for m in range(n):
                g = m // (n // k)
                first, second = (soft(layer, c[b, :, g] @ q[b, t, m] / np.sqrt(d), seen[b, t]) for q, c in maps)
                out[b, t, m] = (first - factor * second) @ value[b, :, g]
    out = rms_norm(out, values(layer.head_norm, "scale")[0], epsilon=1e-5) * (1 - start)
    return finished(layer, out)


def simplicial(layer, x, positions=None, segment_ids=None):
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    positions, seen = seen_by(layer, batch, tokens, positions, segment_ids)
    query, key, value = (heads_of(layer, x, kind) for kind in ("query", "key", "value"))
    second_key, second_value = heads_of(layer, x, "second_key"), heads_of(layer, x, "second_value")
    if layer.query_norm is not None:
        scale = values(layer.key_norm, "scale")[0]
        query = rms_norm(query, values(layer.query_norm, "scale")[0])
        key, second_key = rms_norm(key, scale), rms_norm(second_key, scale)
    n, k, h = query.shape[2], key.shape[2], query.shape[3]
    out = np.zeros((batch, tokens, n, h))
    for b in range(batch):
        for t in range(tokens):
            pairs = np.outer(seen[b, t], seen[b, t]).reshape(-1)
            for m in range(n):
                g = m // (n // k)
                logits = np.einsum("d,id,jd->ij", query[b, t, m], key[b, :, g], second_key[b, :, g]) / np.sqrt(h)
                weights = soft(layer, logits.reshape(-1), pairs).reshape(tokens, tokens)
                out[b, t, m] = np.einsum("ij,id,jd->d", weights, value[b, :, g], second_value[b, :, g])
    return finished(layer, out)
