"""Interleaved Head Attention in float64 NumPy: what every implementation is measured against.

Written from the specification alone (the layer's six steps and the functional contract) and sharing no code with
the package, so that a mistake would have to be made twice to go unnoticed. It is meant to be read, not to be fast:
one loop over the batch, one over the heads, and inside them the definition, word for word.

Letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dimension, Hv value head
dimension, P pseudo-heads, W window in tokens.
"""

import decimal
import math

import numpy as np

# Angles are formed in the widest float at hand before they are reduced: at index 2e7 (position 10^6, P = 20) even
# float64 is right to 4e-9 rad.
WIDE = np.longdouble
TURN = 2 * WIDE("3.14159265358979323846264338327950288")


def attention(
    query,
    key,
    value,
    mix_query,
    mix_key,
    mix_value,
    collapse,
    *,
    causal="virtual",
    window=None,
    rope=None,
    query_positions=None,
    key_positions=None,
    query_segment_ids=None,
    key_segment_ids=None,
    scale=None,
    logits_soft_cap=None,
):
    """Returns the layer's output, float64 ``[B, T, N, Hv]``.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, Hv]``.
      mix_query: ``[N, N, P]`` (source head, head, pseudo-head).
      mix_key: ``[K, K, P]``.
      mix_value: ``[K, K, P]``.
      collapse: ``[N, P]``, or ``[N, N, P]`` (out head, source head, pseudo-head).
      causal: "virtual", "token" or None.
      window: W in tokens, or None.
      rope: anything with ``theta``, ``positions`` and ``scaling``, or None.
      query_positions: ``[B, T]``.
      key_positions: ``[B, S]``.
      query_segment_ids: ``[B, T]``; 0 sees nothing.
      key_segment_ids: ``[B, S]``; 0 is seen by nothing.
      scale: factor of the logits, default ``H**-0.5``.
      logits_soft_cap: c in ``c * tanh(logits / c)``, or None.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    mix_query, mix_key, mix_value, collapse = (
        np.asarray(x, np.float64) for x in (mix_query, mix_key, mix_value, collapse)
    )
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    P = mix_query.shape[2]
    scale = H**-0.5 if scale is None else scale
    query_positions, key_positions = _pair(query_positions, key_positions, B, T, S, np.arange)
    query_segment_ids, key_segment_ids = _pair(query_segment_ids, key_segment_ids, B, T, S, np.ones)

    out = np.zeros((B, T, N, value.shape[3]))
    for b in range(B):
        # Padding is never read: whatever it holds is replaced by zeros.
        q = np.where((query_segment_ids[b] == 0)[:, None, None], 0.0, query[b])
        k = np.where((key_segment_ids[b] == 0)[:, None, None], 0.0, key[b])
        v = np.where((key_segment_ids[b] == 0)[:, None, None], 0.0, value[b])
        seen = visible(
            query_positions[b], key_positions[b], query_segment_ids[b], key_segment_ids[b], P, causal, window
        )
        pseudo_out = np.zeros((N, T, P, value.shape[3]))
        for h in range(N):
            g = h // (N // K)  # the key/value head that serves query head h
            # Step 2, mix: [T, N, H] with [N, P] to [T, P, H]; step 3, interleave: virtual token t*P + p.
            pseudo_q = np.einsum("tmd,mp->tpd", q, mix_query[:, h, :])
            pseudo_k = np.einsum("smd,mp->spd", k, mix_key[:, g, :])
            pseudo_v = np.einsum("smd,mp->spd", v, mix_value[:, g, :])
            if rope is not None:
                pseudo_q = rotate(pseudo_q, query_positions[b], rope)
                pseudo_k = rotate(pseudo_k, key_positions[b], rope)
            # Step 4, attend on the virtual sequence.
            logits = pseudo_q.reshape(T * P, H) @ pseudo_k.reshape(S * P, H).T * scale
            if logits_soft_cap is not None:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            pseudo_out[h] = (masked_softmax(logits, seen) @ pseudo_v.reshape(S * P, -1)).reshape(T, P, -1)
        # Step 5, collapse.
        for h in range(N):
            if collapse.ndim == 2:
                out[b, :, h] = np.einsum("p,tpd->td", collapse[h], pseudo_out[h])
            else:
                out[b, :, h] = np.einsum("gp,gtpd->td", collapse[h], pseudo_out)
    return out


def visible(query_positions, key_positions, query_ids, key_ids, P, causal, window):
    """Which virtual keys each virtual query sees: bool ``[T*P, S*P]``, one batch row."""
    query_positions, key_positions = np.asarray(query_positions, np.int64), np.asarray(key_positions, np.int64)
    token_distance = np.repeat(query_positions, P)[:, None] - np.repeat(key_positions, P)[None, :]
    query_index = (query_positions[:, None] * P + np.arange(P)).reshape(-1)
    key_index = (key_positions[:, None] * P + np.arange(P)).reshape(-1)
    virtual_distance = query_index[:, None] - key_index[None, :]
    same = np.repeat(query_ids, P)[:, None] == np.repeat(key_ids, P)[None, :]
    seen = same & (np.repeat(key_ids, P) != 0)[None, :]
    if causal == "virtual":
        seen &= virtual_distance >= 0
        if window is not None:
            seen &= virtual_distance < window * P
    elif causal == "token":
        seen &= token_distance >= 0
        if window is not None:
            seen &= token_distance < window
    elif causal is None:
        if window is not None:
            seen &= np.abs(token_distance) < window
    else:
        raise ValueError(causal)
    return seen


def masked_softmax(logits, seen):
    """Softmax of each row over its visible entries; a row without any is all zeros."""
    highest = np.max(np.where(seen, logits, -np.inf), axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    weights = np.where(seen, np.exp(np.where(seen, logits - highest, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def rotate(x, positions, rope):
    """Rotary embedding of pseudo-heads ``[tokens, P, H]`` at integer positions ``[tokens]``."""
    P, H = x.shape[1:]
    frequencies, factor = rope_frequencies(rope, H, P)
    positions = np.asarray(positions, np.int64)[:, None]
    index = positions * P + np.arange(P) if rope.positions == "virtual" else np.repeat(positions, P, axis=1)
    angle = (index.astype(WIDE)[..., None] * frequencies % TURN).astype(np.float64)
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    first, second = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope_frequencies(rope, H, P):
    """Radians per rotary index, ``[H/2]`` in extended precision, and the factor of cosine and sine.

    The scaling rules are defined by how many turns a pair makes over the context the model was trained on. That
    context is a number of tokens, and over it a virtual-position embedding runs through P indices for each token.
    """
    pair = np.arange(H // 2).astype(WIDE)
    base = WIDE(rope.theta) ** (-2 * pair / WIDE(H))
    if rope.scaling is None:
        return base, 1.0
    kind, s = type(rope.scaling).__name__, rope.scaling
    if kind == "LinearScaling":
        return base / WIDE(s.factor), 1.0
    trained = s.original_max_position * (P if rope.positions == "virtual" else 1)  # in rotary indices
    if kind == "Llama3Scaling":
        scaled = []
        for f in base:
            turns = trained * f / TURN
            if turns > s.high_freq_factor:  # short wavelength: left alone
                scaled.append(f)
            elif turns < s.low_freq_factor:  # long wavelength: interpolated
                scaled.append(f / s.factor)
            else:
                kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                scaled.append((1 - kept) * f / s.factor + kept * f)
        return np.array(scaled, WIDE), 1.0
    if kind == "YarnScaling":

        def pair_with(turns):
            """The (fractional) pair that makes this many turns over the trained context."""
            return H * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        first = max(math.floor(pair_with(s.beta_fast)), 0)  # up to here: left alone
        last = min(math.ceil(pair_with(s.beta_slow)), H - 1)  # from here: interpolated
        width = max(last - first, 0.001)
        interpolated = np.clip((np.arange(H // 2) - first) / width, 0.0, 1.0)
        frequencies = base / s.factor * interpolated + base * (1 - interpolated)
        default = 0.1 * math.log(s.factor) + 1 if s.factor > 1 else 1.0
        return frequencies, default if s.attention_factor is None else s.attention_factor
    raise ValueError(kind)


def exact_phase(index, theta, pair, H):
    """``index * theta**(-2*pair/H)`` modulo one turn, in radians, from 60-digit decimal arithmetic."""
    with decimal.localcontext(prec=60):
        two_pi = 2 * decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        frequency = decimal.Decimal(theta) ** (decimal.Decimal(-2 * int(pair)) / decimal.Decimal(H))
        turns = int(index) * frequency / two_pi
        return float((turns - turns.to_integral_value(decimal.ROUND_FLOOR)) * two_pi)


def directional_derivative(function, arguments, which, direction, step=1e-6):
    """Central difference of a scalar ``function(*arguments)`` along ``direction`` of argument number ``which``."""
    size = step * max(1.0, float(np.abs(arguments[which]).max())) / max(1e-30, float(np.abs(direction).max()))

    def moved(by):
        return [a if i != which else a + by * direction for i, a in enumerate(arguments)]

    return (function(*moved(size)) - function(*moved(-size))) / (2 * size)


def _pair(for_query, for_key, B, T, S, default):
    """Defaults of (query, key) positions or ids: the key's are the query's where only those are given."""
    if for_key is None:
        for_key = for_query if for_query is not None else np.broadcast_to(default(S), (B, S))
    if for_query is None:
        for_query = np.broadcast_to(default(T), (B, T))
    return np.asarray(for_query).astype(np.int64), np.asarray(for_key).astype(np.int64)
