"""The public operation: validate, choose an implementation, dispatch."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from iha_jax import sharding
from iha_jax.ops.arguments import Arguments, validate
from iha_jax.ops.block_sizes import FEW_QUERIES
from iha_jax.ops.blockwise import blockwise
from iha_jax.ops.mixing import HeadMixing
from iha_jax.ops.pallas_gpu import pallas_gpu
from iha_jax.ops.pallas_gpu import why_not as why_not_gpu
from iha_jax.ops.pallas_tpu import pallas_tpu, why_not
from iha_jax.ops.pallas_tpu_decode import is_decoding, pallas_tpu_decode, why_not_decode
from iha_jax.ops.reference import reference
from iha_jax.ops.rope import Rope
from iha_jax.ops.sharded import attend_sharded, layout_of
from iha_jax.ops.types import Causal, Implementation

_IMPLEMENTATIONS = {"reference": reference, "blockwise": blockwise, "pallas": pallas_tpu}


def interleaved_head_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mixing: HeadMixing,
    *,
    causal: Causal = "virtual",
    window: int | None = None,
    rope: Rope | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    key_positions: Int[Array, "B S"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "B T N Hv"]:
    """Interleaved Head Attention (arXiv 2602.21371, Algorithm 1 and Definition 3).

    Every head attends over P pseudo-queries and pseudo-keys per token, each a learned mixture of all heads, and
    combines its P outputs into one. Letters: B batch, T query tokens, S key tokens, N query heads, K key/value
    heads, H head dimension, P pseudo-heads, W window in tokens.

    Args:
      query: base queries ``[B, T, N, H]``, not yet rotated.
      key: base keys ``[B, S, K, H]``; K divides N, and key/value head g serves query heads
        ``g*N/K … (g+1)*N/K - 1``.
      value: base values ``[B, S, K, Hv]``; Hv may differ from H.
      mixing: the layer's mixing tensors.
      causal: ``"virtual"`` (the paper): a key is visible iff its virtual index ``n*P + p`` is at most the
        query's. ``"token"``: iff its position is at most the query's. None: always.
      window: W in tokens. With virtual causality exactly the last ``W*P`` virtual keys, the query's own included;
        with token causality the last W tokens; without causality token distances below W.
      rope: rotary embedding applied to pseudo-queries and -keys, or None.
      query_positions: int32 ``[B, T]``, strictly increasing within a segment; default ``0 … T-1``.
      key_positions: int32 ``[B, S]``; default the query's where given (then S = T), else ``0 … S-1``.
      query_segment_ids: int32 ``[B, T]``; 0 is padding. Default all 1.
      key_segment_ids: int32 ``[B, S]``; a key is visible only to queries of its own segment, and never if its
        id is 0. Default the query's where given (then S = T), else all 1.
      scale: factor of the logits, default ``H**-0.5``.
      logits_soft_cap: c in ``c * tanh(logits / c)``, applied after the scale and before the mask.
      precision: of every contraction.
      implementation: ``"reference"`` (materialises everything), ``"blockwise"`` (XLA, pseudo-heads exist only for
        the block in hand), ``"pallas"`` (fused kernels; no forward-mode derivatives; on TPUs fewer than 64 queries
        over more keys take a kernel made for decoding, whose gradients are blockwise's), or None for the best that can
        serve the arguments: the kernels where the mesh in force, or without one the default backend, is of TPUs;
        blockwise elsewhere, and for fewer than 64 tokens that attend to each other. Where it is of NVIDIA GPUs,
        "pallas" means the GPU kernels (no measurement on hardware yet, hence only by name), else those for TPUs; a CPU
        interprets either.

    Returns:
      ``[B, T, N, Hv]`` in the query's dtype. A query with nothing to see gives exactly 0, with zero gradients.

    Raises:
      ValueError: for arguments that contradict each other; both values are named.
      NotImplementedError: when a named implementation cannot serve these arguments.
    """
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(f'implementation must be "reference", "blockwise", "pallas" or None, got {implementation!r}.')
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "rope": rope,
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "precision": precision,
        "clear_padding": False,
    }
    integers: dict[str, Any] = {
        "query_positions": query_positions,
        "key_positions": key_positions,
        "query_segment_ids": query_segment_ids,
        "key_segment_ids": key_segment_ids,
    }
    if not sharding.mesh_sizes():
        return _attend(implementation, validate(query, key, value, mixing, **options, **integers))

    # On a mesh: once for its errors only, on the whole shapes; then for each device's part.
    def check(*operands, **integers) -> None:
        validate(*operands, **options, **integers)

    jax.eval_shape(check, query, key, value, mixing, **integers)
    layout = layout_of(query, key)
    if layout is None:
        return _attend(implementation, validate(query, key, value, mixing, **options, **integers))

    def attend(*operands, **integers):
        defaults = dict.fromkeys(("query_positions", "key_positions", "query_segment_ids", "key_segment_ids"))
        return _attend(implementation, validate(*operands, part_of_heads=True, **{**options, **defaults, **integers}))

    return attend_sharded(attend, layout, query, key, value, mixing, causal=causal, window=window, **integers)


def _attend(implementation: Implementation, args: Arguments) -> Array:
    decodes = is_decoding(args) and why_not_decode(args) is None
    if implementation is None:
        few = args.query.shape[1] < FEW_QUERIES
        fused = sharding.on_tpu() and (decodes if few else why_not(args) is None)
        implementation = "pallas" if fused else "blockwise"
    elif implementation == "pallas" and sharding.on_gpu():
        if (reason := why_not_gpu(args)) is not None:
            raise NotImplementedError(f'implementation="pallas": {reason}; use "blockwise", or None for the best.')
        return pallas_gpu(args)
    if implementation == "pallas" and decodes:
        return pallas_tpu_decode(args)
    if implementation == "pallas" and (reason := why_not(args)) is not None:
        raise NotImplementedError(f'implementation="pallas": {reason}; use "blockwise", or None for the best.')
    return _IMPLEMENTATIONS[implementation](args)
