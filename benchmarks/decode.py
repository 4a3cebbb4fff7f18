"""Decoding speed of IHA against MHA: tokens per second and bytes of cache, as ratios within one run.

    python benchmarks/decode.py

Three models of one size: the paper's schedule (four window layers of IHA, one global layer), its twin of global MHA,
and the same layers without pseudo-heads. Each reads the same prompts and writes on; the three take turns, and what
counts is the median of the rounds' ratios.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from iha_jax.evaluation.engine import Engine, Row
from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer
from iha_jax.training.state import ModelFunctions


def models(options: argparse.Namespace) -> dict[str, ModelConfig]:
    """Name → model; the first is IHA's, the second the one it is compared with."""
    iha = ModelConfig(
        vocab_size=options.vocabulary,
        max_length=options.context + options.tokens,
        num_layers=options.layers,
        model_dim=options.width,
        num_heads=options.heads,
        iha=IHAConfig(num_pseudo_heads=options.pseudo_heads, window=options.context // (2 * options.pseudo_heads**2)),
        dtype=options.dtype,
        param_dtype=options.dtype,
    )
    window = MHAConfig(window=iha.iha_window)
    return {
        f"IHA, P = {options.pseudo_heads}": iha,
        "MHA": dataclasses.replace(iha, pattern=("mha",)),
        "MHA, same windows": dataclasses.replace(iha, pattern=("local",) * 4 + ("mha",), local=window),
    }


class Decoder:
    """One model that has read its prompts."""

    def __init__(self, config: ModelConfig, options: argparse.Namespace):
        functions = ModelFunctions(Transformer(config, rngs=nnx.Rngs(0)))
        self.engine = Engine(functions, functions.params, end_id=None, block=options.tokens)
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (options.batch, options.context), np.int32)
        self._cache, self._logits = self.engine.read(list(prompts), config.max_length)
        self._everything = np.arange(options.batch)
        self.cache_bytes = sum(
            x.nbytes for layer in (*self._cache.cycle, *self._cache.layers) for x in (layer.key, layer.value)
        )
        self._tokens, self._batch = options.tokens, options.batch

    def seconds(self) -> float:
        """Of writing the tokens once, after the same prompts."""
        cache = self.engine.take_rows(self._cache, self._everything)  # a copy: writing uses its cache up
        zeros = jnp.zeros((self._batch,), jnp.int32)
        keys = jax.random.split(jax.random.key(0), self._batch)
        rows = Row(self._logits, keys, zeros, zeros + self._tokens, zeros > 0)
        jax.block_until_ready((cache, rows.logits))
        begun = time.perf_counter()
        jax.block_until_ready(self.engine.write(cache, rows, 0.0, None, 1.0)[2])
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"context": 1024, "tokens": 64, "batch": 8, "pseudo-heads": 4, "layers": 5, "width": 512, "heads": 8}
    for name, default in {**defaults, "vocabulary": 8192, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    decoders = {name: Decoder(config, options) for name, config in models(options).items()}
    for decoder in decoders.values():
        decoder.seconds()  # compiles
    rounds = [{name: decoder.seconds() for name, decoder in decoders.items()} for _ in range(options.rounds)]
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}; {vars(options)}")
    print(f"{'':20} {'tokens/s':>10} {'against MHA':>12} {'cache':>12}")
    for name, decoder in decoders.items():
        speed = options.batch * options.tokens / statistics.median(taken[name] for taken in rounds)
        ratio = statistics.median(taken["MHA"] / taken[name] for taken in rounds)
        print(f"{name:20} {speed:10.0f} {ratio:12.2f} {decoder.cache_bytes / 1e6:9.2f} MB")


if __name__ == "__main__":
    main()
