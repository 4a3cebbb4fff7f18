"""What a layer must return, from its parameters, in float64 NumPy: projections by hand, attention by the oracle."""

import numpy as np

from iha_jax import InterleavedHeadAttention
from tests import oracle


def values(layer, *names):
    return [np.asarray(getattr(layer, name)[...], np.float64) for name in names]


def attention_layer(
    layer, x, context=None, positions=None, segment_ids=None, context_positions=None, context_segment_ids=None
):
    """The output ``[B, T, Do]`` of an attention layer of either kind."""
    x = np.asarray(x, np.float64)
    source = x if context is None else np.asarray(context, np.float64)

    def project(x, kind):
        y = np.tensordot(x, values(layer, f"{kind}_kernel")[0], axes=1)
        return y if layer.query_bias is None else y + values(layer, f"{kind}_bias")[0]

    query, key, value = project(x, "query"), project(source, "key"), project(source, "value")
    if layer.query_norm is not None:
        query = rms_norm(query, values(layer.query_norm, "scale")[0])
        key = rms_norm(key, values(layer.key_norm, "scale")[0])
    n, k = query.shape[2], key.shape[2]
    if isinstance(layer, InterleavedHeadAttention):
        mixing = values(layer, "mixing_query", "mixing_key", "mixing_value", "collapse")
        causal = layer.causal
    else:
        mixing = [np.eye(n)[:, :, None], np.eye(k)[:, :, None], np.eye(k)[:, :, None], np.ones((n, 1))]
        causal = "token" if layer.causal else None
    heads = oracle.attention(
        query,
        key,
        value,
        *mixing,
        causal=causal,
        window=layer.window,
        rope=layer.rope,
        query_positions=positions,
        key_positions=context_positions,
        query_segment_ids=segment_ids,
        key_segment_ids=context_segment_ids,
        logits_soft_cap=layer.logits_soft_cap,
    )
    y = np.tensordot(heads, values(layer, "out_kernel")[0], axes=2)
    return y if layer.out_bias is None else y + values(layer, "out_bias")[0]


def rms_norm(x, scale, epsilon=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale
