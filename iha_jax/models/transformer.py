"""The decoder-only language model."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from iha_jax import sharding
from iha_jax.models.block import Block, dropout, make_norm
from iha_jax.models.config import ModelConfig, RematPolicy
from iha_jax.models.stacking import stack_parameters, stacked_module, unstack_parameters
from iha_jax.nn.cache import AttentionCache, check_room
from iha_jax.nn.embedding import Embedding
from iha_jax.nn.parameters import split_keys

__all__ = ["Transformer", "TransformerCache", "stack_parameters", "unstack_parameters"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("cycle", "layers"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class TransformerCache:
    """The caches of all layers, a pytree.

    Attributes:
      cycle: one per layer of the scanned cycle, every array with a leading axis of repeats; empty if unrolled.
      layers: one per unrolled layer.
    """

    cycle: tuple[AttentionCache, ...]
    layers: tuple[AttentionCache, ...]

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Tokens written so far in each row."""
        return self.cycle[0].lengths[0] if self.cycle else self.layers[0].lengths

    @property
    def max_length(self) -> int:
        """The most tokens a row may take."""
        return (*self.cycle, *self.layers)[0].max_length

    def take_rows(self, rows: Int[Array, "b"]) -> "TransformerCache":
        """The caches of these rows, in this order; a row may come several times, as for several samples of a prompt."""
        return TransformerCache(
            cycle=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.cycle),
            layers=jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self.layers),
        )


class Transformer(nnx.Module):
    """A pre-norm decoder: embedding, blocks whose attention follows ``config.pattern``, norm, float32 logits.

        model = Transformer(ModelConfig(num_layers=10), rngs=nnx.Rngs(0))
        logits = model(tokens)                          # [B, T] -> [B, T, V]
        cache = model.init_cache(batch_size, 512)
        logits, cache = model.decode(tokens, cache)

    With ``scan_layers`` the whole cycles of the pattern are one stacked ``cycle`` of blocks, compiled once and
    scanned; what remains is unrolled in ``layers``. Otherwise all blocks are in ``layers``. `stack_parameters` and
    `unstack_parameters` turn one form's parameters into the other's, and both start equal for equal keys.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | Array):
        """Makes the parameters.

        Args:
          config: of the model; resolved first, so that ``model.config`` has a number for ``window="auto"``.
          rngs: a ``params`` stream, or a key.
        """
        config = config.resolve()
        self.config = config
        keys = split_keys(rngs, "embedding", "layers")
        self.embedding = Embedding(
            config.vocab_size,
            config.model_dim,
            tied=config.tied_embeddings,
            dtype=config.compute_dtype,
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=keys["embedding"],
        )
        layer_keys = jax.random.split(keys["layers"], config.num_layers)
        kinds, period = config.layer_kinds, len(config.pattern)
        cycled = config.num_cycled_layers if config.scan_layers else 0
        cycle = []
        for i in range(period if cycled else 0):
            make = functools.partial(_make_block, config, kinds[i])
            cycle.append(stacked_module(make, layer_keys[i:cycled:period], jnp.arange(i, cycled, period)))
        self.cycle = nnx.data(cycle)
        self.layers = nnx.data(
            [Block(config, kinds[i], depth=i, rngs=layer_keys[i]) for i in range(cycled, config.num_layers)]
        )
        self.final_norm = make_norm(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits for the next token at every place.

        Args:
          tokens: integers ``[B, T]`` in ``0 … V-1``.
          positions: int32 ``[B, T]``, strictly increasing within a segment; default ``0 … T-1``.
          segment_ids: int32 ``[B, T]``: tokens attend within their own segment; 0 is padding. Default all 1.
          dropout_key: turns the configured dropout on; without it the call is deterministic.

        Returns:
          ``[B, T, V]`` in float32.
        """
        _check_tokens(tokens)
        config = self.config
        keys = None
        if dropout_key is not None and config.dropout:
            keys = jax.random.split(dropout_key, config.num_layers + 1)
        x = dropout(self.embedding(tokens), config.dropout, None if keys is None else keys[-1])

        def run(block: Block, x: Array, key: Array | None) -> Array:
            return block(x, positions, segment_ids, key)

        cycled = config.num_layers - len(self.layers)
        if cycled:
            graphs, states = _split_all(self.cycle)
            cycle_keys = None if keys is None else keys[:cycled].reshape(config.num_repeats, len(graphs))

            def body(x: Array, sliced: tuple) -> tuple[Array, None]:
                slices, slice_keys = sliced
                for i, (graph, state) in enumerate(zip(graphs, slices, strict=True)):
                    x = _apply(run, graph, config.remat)(state, x, None if slice_keys is None else slice_keys[i])
                return x, None

            x, _ = jax.lax.scan(body, x, (states, cycle_keys), length=config.num_repeats)
        for i, block in enumerate(self.layers):
            graph, state = nnx.split(block)
            x = _apply(run, graph, config.remat)(state, x, None if keys is None else keys[cycled + i])
        return self.embedding.logits(self.final_norm(x))

    def init_cache(self, batch_size: int, max_length: int, dtype: DTypeLike | None = None) -> TransformerCache:
        """Empty caches for all layers.

        Args:
          batch_size: B.
          max_length: the most tokens a row will take.
          dtype: of keys and values, default the model's.
        """
        repeats = self.config.num_repeats

        def stacked(block: Block) -> AttentionCache:
            cache = block.attention.init_cache(batch_size, max_length, dtype)
            return jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), cache)

        return TransformerCache(
            cycle=tuple(stacked(block) for block in self.cycle),
            layers=tuple(block.attention.init_cache(batch_size, max_length, dtype) for block in self.layers),
        )

    def decode(
        self,
        tokens: Int[Array, "B t"],
        cache: TransformerCache,
        positions: Int[Array, "B t"] | None = None,
        segment_ids: Int[Array, "B t"] | None = None,
        logits_at: Int[Array, "B n"] | None = None,
    ) -> tuple[Float[Array, "B n V"], TransformerCache]:
        """Continues each row by a chunk of any length.

        Args:
          tokens: integers ``[B, t]``.
          cache: from `init_cache` or the previous call.
          positions: int32 ``[B, t]``; default continue each row.
          segment_ids: int32 ``[B, t]``; 0 is padding (right padding for ragged prompts). Default each row's last.
          logits_at: int32 ``[B, n]``, places of the chunk whose logits are wanted: of a long prompt and a large
            vocabulary, all would be most of the memory. Default all, ``n = t``.

        Returns:
          Logits ``[B, n, V]`` in float32 and the new cache. A row that would pass ``max_length`` is NaN and
          leaves the cache as it was, where lengths are traced.

        Raises:
          ValueError: if a row would pass ``max_length`` and lengths are concrete.
        """
        _check_tokens(tokens)
        # Inside a scan lengths are always traced; look here, where they may be concrete.
        added = tokens.shape[1] if segment_ids is None else jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)
        check_room(cache.lengths, cache.lengths + added, cache.max_length)
        with sharding.tokens_whole_if_uneven(tokens.shape[1]):
            x = self.embedding(tokens)

        new_cycle = cache.cycle
        if len(self.cycle):
            graphs, states = _split_all(self.cycle)

            def body(x: Array, sliced: tuple) -> tuple[Array, tuple]:
                slices, caches = sliced
                new = []
                for graph, state, layer_cache in zip(graphs, slices, caches, strict=True):
                    x, layer_cache = nnx.merge(graph, state).decode(x, layer_cache, positions, segment_ids)
                    new.append(layer_cache)
                return x, tuple(new)

            x, new_cycle = jax.lax.scan(body, x, (states, cache.cycle), length=self.config.num_repeats)
        new_layers = []
        for block, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, layer_cache = block.decode(x, layer_cache, positions, segment_ids)
            new_layers.append(layer_cache)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        with sharding.tokens_whole_if_uneven(x.shape[1]):
            logits = self.embedding.logits(self.final_norm(x))
        return logits, TransformerCache(cycle=new_cycle, layers=tuple(new_layers))


def _make_block(config: ModelConfig, kind: str, key: Array, depth: Array) -> Block:
    return Block(config, kind, depth=depth, rngs=key)  # pyright: ignore[reportArgumentType]


def _split_all(blocks) -> tuple[list, tuple]:
    """Graph definitions and states of the stacked blocks; the states' arrays have the repeats in front."""
    parts = [nnx.split(block) for block in blocks]
    return [graph for graph, _ in parts], tuple(state for _, state in parts)


def _apply(run: Callable, graph, remat: RematPolicy) -> Callable:
    """``run`` as a pure function of a block's state, rematerialised as the policy says."""

    def pure(state, x: Array, key: Array | None) -> Array:
        return run(nnx.merge(graph, state), x, key)

    if remat == "none":
        return pure
    policy = None
    if remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(pure, policy=policy)  # pyright: ignore[reportPrivateImportUsage]


def _check_tokens(tokens: Array) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [batch, tokens], got shape {tokens.shape}.")
