"""Tiles of the decoding kernel, and the account of its on-chip memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from iha_jax.ops.arguments import Arguments
from iha_jax.ops.pallas_tpu_memory import VMEM_BYTES
from iha_jax.ops.pallas_tpu_plan import DoesNotFit
from iha_jax.ops.pallas_tpu_spec import LANES, ROWS, round_up

MAX_TILE = 512
"""Most tokens of a cache tile: enough for transfers to run at full speed; more only cost on-chip memory."""

MAX_GROUP = 16
"""Most tokens mixed by one product: their base rows are put in place one token after the other, without a loop."""


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """Everything static about a call of the decoding kernel.

    A *tile* of cached tokens is one step of the grid. Its tokens are mixed in *groups*, whose base rows (token,
    source) fill the matrix unit; the pseudo-keys (token, pseudo-head) of ``span`` groups, about a register's lanes,
    are a *piece*, the width of an array of scores.

    Attributes:
      batch: B.
      tiles: of the cache.
      tile: tokens of a tile.
      group: tokens of a group.
      span: groups of a piece.
      pseudo: P.
      key_sources: L, cached key/value heads.
      kv_heads: K, key/value heads made of them.
      rows: pseudo-queries (query head, token, pseudo-head) of a key/value head, padded.
      head_dim: H.
      value_dim: that of the values.
      base_scores: pseudo-queries meet base keys, and the scores are mixed: where no rotation lies between.
      index_step: rotary indices that a token advances, 0 without a rotary embedding.
      rope_factor: of the rotated keys (YaRN).
      distance: half-open range of allowed (query index - key index), None for no limit.
      logits_soft_cap: cap, or None.
      precision: of contractions of float32.
      dtype: of the cache and of pseudo-heads: float32 or bfloat16.
    """

    batch: int
    tiles: int
    tile: int
    group: int
    span: int
    pseudo: int
    key_sources: int
    kv_heads: int
    rows: int
    head_dim: int
    value_dim: int
    base_scores: bool
    index_step: int
    rope_factor: float
    distance: tuple[int | None, int | None]
    logits_soft_cap: float | None
    precision: jax.lax.PrecisionLike
    dtype: str

    @property
    def groups(self) -> int:
        """Groups of a tile."""
        return self.tile // self.group

    @property
    def pieces(self) -> int:
        """Pieces of a tile."""
        return self.groups // self.span

    @property
    def piece(self) -> int:
        """Pseudo-keys of a piece."""
        return self.span * self.group * self.pseudo

    @property
    def base(self) -> int:
        """Base rows (token, source) of a group, padded to whole registers' lanes: they are columns of scores too."""
        return round_up(self.group * self.key_sources, LANES)

    @property
    def vmem_bytes(self) -> int:
        """On-chip memory: operands in two buffers, scratch memory, and the arrays in hand."""
        size, f32 = jnp.dtype(self.dtype).itemsize, 4
        h, v = round_up(self.head_dim, LANES), round_up(self.value_dim, LANES)
        piece, source_rows = round_up(self.piece, LANES), round_up(self.key_sources, 8)
        all_rows = self.kv_heads * self.rows
        total = 2 * self.tile * source_rows * (h + v) * size
        total += 2 * 8 * (self.tile + self.pieces * piece) * f32
        matrix = self.kv_heads * self.span * self.base * piece * size
        key_matrix = matrix if self.base_scores else self.kv_heads * self.group * self.pseudo * self.base * size
        total += matrix + key_matrix + 2 * all_rows * (h * size + v * f32)
        total += self.groups * self.base * (h + v) * f32 + 2 * self.base * h * f32 + self.tile * (2 * h + LANES) * f32
        if self.base_scores:
            total += self.groups * all_rows * self.base * f32
        else:
            total += self.kv_heads * self.tile * self.pseudo * h * size
        total += self.groups * all_rows * self.base * size
        total += 2 * self.pieces * self.rows * piece * f32
        total += all_rows * (v + 3 * LANES) * f32
        return total + 4 * self.rows * max(piece, self.base) * f32 + self.kv_heads * self.group * self.pseudo * h * f32


def decode_plan(args: Arguments) -> DecodeSpec:
    """The call of the decoding kernel that serves the arguments.

    Raises:
      DoesNotFit: if on-chip memory is too small for even the smallest tile.
    """
    pseudo, mixing = args.num_pseudo_heads, args.mixing
    key_len, sources = args.key.shape[1:3]
    shared = mixing.num_heads // mixing.num_kv_heads
    group = 1
    while group * pseudo % ROWS or (group < MAX_GROUP and group * 2 * sources <= LANES):
        group *= 2
    span = max(1, LANES // (group * pseudo))
    span = 1 << int(math.log2(span))
    step = group * span

    virtual = args.causal == "virtual"
    limit = None if args.window is None else min(args.window * (pseudo if virtual else 1), 2**31 - 1)
    lower = 0 if args.causal is not None else (None if limit is None else 1 - limit)
    rope = args.rope
    tile = step * max(1, min(MAX_TILE, round_up(key_len, step)) // step)
    while True:
        spec = DecodeSpec(
            batch=args.query.shape[0],
            tiles=-(-key_len // tile),
            tile=tile,
            group=group,
            span=span,
            pseudo=pseudo,
            key_sources=sources,
            kv_heads=mixing.num_kv_heads,
            rows=round_up(shared * args.query.shape[1] * pseudo, ROWS),
            head_dim=args.head_dim,
            value_dim=args.value.shape[3],
            base_scores=rope is None or rope.positions == "token" or pseudo == 1,
            index_step=0 if rope is None else rope.tokens_to_index(pseudo),
            rope_factor=1.0 if rope is None else rope.frequencies(args.head_dim, pseudo)[1],
            distance=(lower, limit),
            logits_soft_cap=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
            precision=args.precision,
            dtype=str(args.query.dtype),
        )
        if spec.vmem_bytes <= VMEM_BYTES:
            return spec
        if tile == step:
            break
        tile = step * max(1, tile // step // 2)
    raise DoesNotFit(
        f"decoding T={args.query.shape[1]} tokens of N={mixing.num_heads} heads with P={pseudo} against {tile} cached "
        f"tokens at a time needs {spec.vmem_bytes / 2**20:.0f} MiB of on-chip memory, more than "
        f"{VMEM_BYTES / 2**20:.0f} MiB"
    )
