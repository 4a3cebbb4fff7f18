"""What the fused TPU kernels take of a core's vector memory."""

import jax.numpy as jnp

from iha_jax.ops.pallas_tpu_spec import LANES, SUBLANES, Spec, round_up

VMEM_BYTES = 56 * 2**20
"""What a kernel may plan to use: v5p and v7x have 64 MiB of vector memory a core, v5e and v6e 128, and the compiler
needs some of it for itself."""

VMEM_LIMIT = 62 * 2**20
"""What the compiler is allowed; its own default of 16 MiB is only a convention."""


def vmem_bytes(spec: Spec, backward: bool) -> int:
    """On-chip memory of a kernel: what it declares, and the scores it has in hand."""
    mixes_values = spec.mixes_values or not backward
    size, f32 = jnp.dtype(spec.dtype).itemsize, 4
    h, v, local = spec.head_dim, spec.value_dim, spec.kind == "local"
    heads = spec.sources * h + spec.key_sources * (h + v) + spec.out_heads * v  # a token's operands and outputs

    def matrix(rows: int, columns: int) -> int:
        return rows * round_up(columns, LANES)

    query_rows, key_rows = spec.query_group * spec.pseudo, spec.key_group * spec.pseudo
    value_rows = key_rows if mixes_values else spec.piece_lanes
    mixing = spec.heads * matrix(query_rows, spec.query_base)
    mixing += spec.kv_heads * matrix(key_rows + value_rows, spec.key_base)
    if spec.across_heads:
        collapse = spec.heads * matrix(spec.out_base, query_rows) * f32
    else:
        collapse = spec.heads * spec.span * spec.pseudo * LANES * f32
    base = spec.query_groups * spec.query_base * h + spec.key_groups * spec.key_base * (h + v)
    scores, weights = spec.rows * spec.chunk, spec.weight_rows * spec.chunk
    # Operands of the tile and tables of rotations come in two buffers, indices in whole registers.
    total = 2 * spec.tile * (heads * size + 4 * h * f32) + mixing * size + collapse
    total += SUBLANES * (2 * spec.rows + spec.chunk * (2 if local else spec.chunks)) * f32
    kept = spec.kv_heads * spec.buffer * v if mixes_values else spec.kept_groups * spec.key_base * v
    pieces = 0 if mixes_values else len(spec.pieces) * spec.tile
    collapsed = spec.heads * matrix(pieces, spec.key_base)
    total += spec.kv_heads * spec.buffer * h * size + kept * size + spec.heads * spec.rows * h * size
    total += (base + spec.tile * max(h, v)) * f32
    if spec.across_heads:
        total += spec.query_groups * spec.out_base * v * f32
    elif mixes_values:
        total += spec.heads * spec.spans * spec.unit * v * f32
    else:
        total += (collapsed + 2 * matrix(pieces, spec.piece_lanes)) * f32
    if local:
        total += (3 * scores + 2 * spec.rows * LANES) * f32
        total += 2 * weights * size if mixes_values else 0
    total += (6 if backward else 3) * scores * f32
    if not backward:
        return total
    total += 2 * spec.tile * (heads * jnp.dtype(spec.gradient_dtype).itemsize + spec.key_sources * (h + v) * size)
    turned = spec.query_base * round_up(spec.heads * query_rows, LANES)
    turned += (2 if mixes_values else 1) * spec.key_base * round_up(spec.kv_heads * key_rows, LANES)
    if not mixes_values:
        total += 2 * spec.kv_heads * matrix(value_rows, spec.key_base) * f32
    total += turned * (size + 2 * f32) + collapse * (3 if spec.across_heads else 1)
    total += spec.kv_heads * spec.buffer * h * f32 + kept * f32 + base * f32
    unmixed = h // spec.sharing(spec.key_groups).count
    unmixed += v // spec.sharing(spec.key_groups, values=True).count if mixes_values else 0
    total += spec.kv_heads * spec.rows * unmixed * size
    if not mixes_values:
        total += (collapsed + spec.heads * spec.tile * v) * f32
    if local:
        total += (
            2 * (weights + spec.rows * LANES) * f32
            + 2 * scores * size
            + (0 if spec.logits_soft_cap is None else 2 * scores * f32)
        )
    return total
