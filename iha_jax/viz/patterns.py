"""The patterns of attention that layers make of an input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from iha_jax.models.transformer import Transformer
from iha_jax.nn.attention import InterleavedHeadAttention
from iha_jax.nn.projections import AttentionProjections
from iha_jax.nn.simplicial import SimplicialAttention
from iha_jax.ops.api import interleaved_head_attention
from iha_jax.ops.mixing import HeadMixing

_SHOWN_TOKENS = 16


def attention_patterns(layer: AttentionProjections, x: Float[Array, "1 T D"]) -> dict[str, Float[Array, "count R C"]]:
    """The maps of attention of one input.

    The operation itself is asked, with one-hot values: the output is then the weight of every key. So positions,
    windows and causality are the layer's own.

    Args:
      layer: any attention layer whose heads weigh values; self-attention is looked at.
      x: one input.

    Returns:
      "effective" ``[N, T, T]``: what a head's output has of each token's values, all source heads together, after
      mixing and collapse (rows need not sum to 1); of 2-simplicial attention, the weight of the first of a pair.
      For IHA also "pseudo" ``[N, T P, T P]``: the softmax weights of pseudo-query (t, p), row ``t * P + p``, on
      pseudo-key (s, r), column ``s * P + r``.

    Raises:
      ValueError: more than one input.
    """
    if x.ndim != 3 or x.shape[0] != 1:
        raise ValueError(f"attention_patterns looks at one input, [1, tokens, features], got shape {x.shape}.")
    query, key, value = layer._project(x, x)
    tokens = x.shape[1]
    one_hot = jnp.broadcast_to(jnp.eye(tokens, dtype=value.dtype)[None, :, None], (1, tokens, value.shape[2], tokens))
    values = one_hot
    if isinstance(layer, SimplicialAttention):
        # Values are products of a pair's two: ones for the second leave the weight of the first, over all pairs.
        values = jnp.concatenate([one_hot, jnp.ones_like(one_hot)], axis=-1)
    # One segment, said aloud: plain attention's shortest path takes values of the keys' size only.
    ids = jnp.ones((1, tokens), jnp.int32)
    effective = layer._attend(
        query, key, values, query_positions=None, key_positions=None, query_segment_ids=ids, key_segment_ids=ids
    )
    patterns = {"effective": jnp.moveaxis(effective[0], 1, 0)}
    if isinstance(layer, InterleavedHeadAttention):
        patterns["pseudo"] = _pseudo_patterns(layer, query, key, one_hot)
    return patterns


def layer_inputs(
    model: Transformer, tokens: Int[Array, "B T"]
) -> dict[str, tuple[AttentionProjections, Float[Array, "B T D"]]]:
    """Every attention layer of a decoder with what it reads, by name ("layer 0, iha", first to last).

    Args:
      model: scanned or not.
      tokens: integers ``[B, T]``.
    """
    blocks = []
    if len(model.cycle):
        parts = [nnx.split(block) for block in model.cycle]
        for repeat in range(model.config.num_repeats):
            blocks += [nnx.merge(graph, jax.tree.map(lambda x, r=repeat: x[r], state)) for graph, state in parts]
    blocks += list(model.layers)
    found, x = {}, model.embedding(tokens)
    for index, (block, kind) in enumerate(zip(blocks, model.config.layer_kinds, strict=True)):
        found[f"layer {index}, {kind}"] = block.attention, block.attention_norm(x)
        x = block(x)
    return found


def layer_number(name: str) -> int:
    """Which layer a name of `layer_inputs` stands for."""
    return int(name.split(",")[0].removeprefix("layer "))


def pictures_of(layer: AttentionProjections, x: Float[Array, "1 T D"]) -> dict[str, Array]:
    """What there is to draw of a layer: its mixing tensors, and patterns of attention as in `attention_patterns`.

    Args:
      layer: any attention layer whose heads weigh values.
      x: one input.

    Returns:
      "patterns/effective"; of IHA also "mixing/query", "mixing/key", "mixing/value", "mixing/collapse", and
      "patterns/pseudo" of the input's first 16 tokens only, where a causal mask makes them independent of the rest:
      pictures of more can't be read.
    """
    arrays = {}
    if isinstance(layer, InterleavedHeadAttention):
        arrays = {f"mixing/{name}": getattr(layer.mixing, name) for name in ("query", "key", "value", "collapse")}
        start = attention_patterns(layer, x[:, :_SHOWN_TOKENS]) if layer.causal else attention_patterns(layer, x)
        arrays["patterns/pseudo"] = start["pseudo"]
    return arrays | {"patterns/effective": attention_patterns(layer, x)["effective"]}


def _pseudo_patterns(layer: InterleavedHeadAttention, query: Array, key: Array, one_hot: Array) -> Array:
    """``[N, T P, T P]``: one call for every pseudo-query, one for every pseudo-key, as a batch of mixing tensors."""
    mixing, tokens = layer.mixing, query.shape[1]
    n, k, p = layer.num_heads, layer.num_kv_heads, layer.num_pseudo_heads
    one_of = jnp.eye(p, dtype=one_hot.dtype)

    def weights(asked: Array, read: Array) -> Array:
        """Of one pseudo-query and -key, ``[T, N, S]``: only their output and their values count."""
        chosen = HeadMixing(
            query=mixing.query,
            key=mixing.key,
            value=jnp.eye(k, dtype=one_hot.dtype)[:, :, None] * read[None, None],
            collapse=jnp.broadcast_to(asked[None], (n, p)),
        )
        return interleaved_head_attention(
            query,
            key,
            one_hot,
            chosen,
            causal=layer.causal,  # pyright: ignore[reportArgumentType]
            window=layer.window,
            rope=layer.rope,
            logits_soft_cap=layer.logits_soft_cap,
            precision=layer.precision,
            implementation="reference",
        )[0]

    pairs = jax.lax.map(lambda asked: jax.lax.map(lambda read: weights(asked, read), one_of), one_of)  # [P,P,T,N,S]
    return jnp.transpose(pairs, (3, 2, 0, 4, 1)).reshape(n, tokens * p, tokens * p)
