"""Times a configuration's train step against the machine's own matrix products, and says where the time goes.

    python benchmarks/step.py configs/tiny.py
    python benchmarks/step.py configs/tiny.py --against configs/tiny_mha.py      # and the ratio of the two steps
    python benchmarks/step.py configs/small_124m.py --batch-size 2 --repeats 5

The step is the trainer's own, with optimizer, on made-up tokens of the configured shape (two documents a row), so no
data is needed. The matmul rate is measured in the same process on the six products of the feed-forward network, the
model's largest: tokens x D @ D x F and back, and the products of their gradients. Programs run in turn, and the
fastest run of each counts: other work on the machine only ever adds time. Absolute times are the machine's; the shares
are what to compare.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from iha_jax.models import Transformer
from iha_jax.models.block import make_attention
from iha_jax.training.cli import load
from iha_jax.training.config import TrainConfig
from iha_jax.training.flops import account
from iha_jax.training.optimizer import make_optimizer
from iha_jax.training.state import ModelFunctions, initial_state
from iha_jax.training.step import (
    make_train_step,
    split_micro_batches,
    summed_gradient,
    token_losses,
    weighted_sums,
)

Program = Callable[[], Any]


def make_batch(config: TrainConfig) -> dict[str, np.ndarray]:
    """A batch [A · B, T] as the pipeline makes them: full rows, two documents in each."""
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.data.sequence_length)
    places = np.arange(shape[1], dtype=np.int32)
    cut = shape[1] // 2
    return {
        "inputs": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "targets": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "positions": np.broadcast_to(np.where(places < cut, places, places - cut), shape),
        "segment_ids": np.broadcast_to(np.where(places < cut, 1, 2).astype(np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }


def products(config: TrainConfig) -> tuple[dict[str, Program], float]:
    """The feed-forward network's two products and their four gradient products; and the FLOPs of one."""
    model = config.model
    tokens = config.micro_batch_size * config.data.sequence_length
    dims = {"t": tokens, "d": model.model_dim, "f": model.hidden_dim}
    dtype = model.compute_dtype

    def product(equation: str) -> Program:
        left, right = equation.split("->")[0].split(",")
        keys = jax.random.split(jax.random.key(0))
        operands = [
            jax.random.normal(key, [dims[letter] for letter in letters], dtype)
            for key, letters in zip(keys, (left, right), strict=True)
        ]
        return functools.partial(jax.jit(functools.partial(jnp.einsum, equation)), *operands)

    equations = ("td,df->tf", "tf,fd->td", "tf,df->td", "td,fd->tf", "td,tf->df", "tf,td->fd")
    return {f"product {e}": product(e) for e in equations}, 2.0 * tokens * model.model_dim * model.hidden_dim


def core(config: TrainConfig, kind: Any, batch: dict[str, Any]) -> Program:
    """Forward and backward pass of one layer's attention between the projections, for one micro-batch."""
    model = config.model
    layer = ModelFunctions(make_attention(model, kind, jax.random.key(0)))
    learned = {k: v for k, v in layer.params.items() if k.startswith(("mixing_", "collapse"))}
    dtype = model.compute_dtype
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = [(*batch["inputs"].shape, n, model.dim_per_head) for n in (model.num_heads, *[model.kv_heads] * 2)]
    heads = tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=False))
    cotangent = jax.random.normal(keys[3], shapes[0], dtype)

    def attend(learned, heads):
        attention = layer.merge({**layer.params, **learned})
        return attention._attend(
            *heads,
            query_positions=batch["positions"],
            key_positions=None,
            query_segment_ids=batch["segment_ids"],
            key_segment_ids=None,
        )

    def both(learned, heads, cotangent):
        out, vjp = jax.vjp(attend, learned, heads)
        return out, vjp(cotangent)

    return functools.partial(jax.jit(both), learned, heads, cotangent)


def head(functions: ModelFunctions, params: dict[str, Any], batch: dict[str, Any], dim: int, dtype: Any) -> Program:
    """Forward and backward pass of final norm, logits and loss, for one micro-batch."""
    mine = {k: v for k, v in params.items() if k.startswith(("embedding.", "final_norm."))}
    x = jax.random.normal(jax.random.key(2), (*batch["inputs"].shape, dim), dtype)

    def loss(mine, x, targets):
        model = functions.merge({**params, **mine})
        losses, _ = token_losses(model.embedding.logits(model.final_norm(x)), targets)
        return jnp.sum(losses)

    return functools.partial(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), mine, x, batch["targets"])


class Step:
    """A configuration's programs, by name, and what they cost."""

    def __init__(self, config: TrainConfig, parts: bool):
        self.config = config = dataclasses.replace(config, model=config.model.resolve())
        functions = ModelFunctions(Transformer(config.model, rngs=nnx.Rngs(config.seed)))
        optimizer = make_optimizer(config, functions.params, functions.axes)
        # The step gives its state away; the other programs need parameters of their own.
        params = jax.tree.map(jnp.copy, functions.params)
        self._state = initial_state(functions, optimizer, config.seed)
        batch = jax.device_put(split_micro_batches(make_batch(config), config.micro_batches))
        key = self._state.key
        self._step = jax.jit(make_train_step(config, functions, optimizer), donate_argnums=0)
        self._batch = batch
        self.account = account(config.model, config.micro_batch_size, config.data.sequence_length)
        self.programs: dict[str, Program] = {f"step {config.name}": self._run}
        if not parts:
            return

        def forward(params, batch, key):
            def loss(micro):
                return weighted_sums(functions.merge(params), micro, config.z_loss, key)[0]

            return jax.lax.map(loss, batch)

        def gradient(params, batch, key):
            return summed_gradient(functions, params, batch, key, config.z_loss)

        micro = {name: column[0] for name, column in batch.items()}
        dtype = config.model.compute_dtype
        self.programs |= {
            "forward": functools.partial(jax.jit(forward), params, batch, key),
            "gradient": functools.partial(jax.jit(gradient), params, batch, key),
            "head": head(functions, params, micro, config.model.model_dim, dtype),
        }
        for kind in dict.fromkeys(config.model.layer_kinds):
            self.programs[f"core {kind}"] = core(config, kind, micro)

    def _run(self) -> Any:
        self._state, metrics = self._step(self._state, self._batch)
        return metrics


def timed_in_turn(programs: dict[str, Program], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run of each program; the programs take turns."""
    for program in programs.values():
        jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(time.perf_counter() - start)
    return times


def report(step: Step, best: dict[str, float], flops_of_a_product: float) -> None:
    """Prints rates, their shares of the matmul rate, and the breakdown of the step."""
    config = step.config
    shapes = [name for name in best if name.startswith("product ")]
    rate = len(shapes) * flops_of_a_product / sum(best[name] for name in shapes)
    print(f"\nmatmul rate {rate / 1e9:,.1f} GFLOP/s over the six products of the feed-forward network")
    for name in shapes:
        print(f"  {name.removeprefix('product '):<12} {flops_of_a_product / best[name] / 1e9:8,.1f} GFLOP/s")
    seconds = best[f"step {config.name}"]
    tokens = config.tokens_per_step
    print(f"\nstep of {config.name}: {1e3 * seconds:,.1f} ms, {tokens / seconds:,.0f} tokens/s")
    for name, per_token in (
        ("model FLOPs", step.account.model_training_per_token),
        ("executed FLOPs", step.account.executed_training_per_token),
    ):
        achieved = per_token * tokens / seconds
        print(
            f"  {name:<15} {per_token / 1e6:8.1f} M per token, {achieved / 1e9:8,.1f} GFLOP/s, "
            f"{achieved / rate:6.1%} of the matmul rate"
        )
    backward, optimizer = best["gradient"] - best["forward"], seconds - best["gradient"]
    lines = [("forward", best["forward"]), ("backward", backward), ("optimizer and metrics", optimizer)]
    for kind in dict.fromkeys(config.model.layer_kinds):
        count = config.model.layer_kinds.count(kind)
        lines.append((f"of these, {count} x {kind} core", config.micro_batches * count * best[f"core {kind}"]))
    lines.append(("of these, logits and loss", config.micro_batches * best["head"]))
    print("  share of the step's time (backward and optimizer are differences; cores and logits run alone):")
    for name, part in lines:
        print(f"    {name:<28} {1e3 * part:9.1f} ms {part / seconds:7.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a configuration's Python or JSON file, or a run's directory")
    parser.add_argument("--against", metavar="CONFIG", help="another configuration, whose step is timed in turn")
    parser.add_argument("--batch-size", type=int, help="rows of a step instead of the configured number")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of all programs (default 15)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")

    def loaded(path: str) -> TrainConfig:
        try:
            config = load(path)
            return dataclasses.replace(config, batch_size=options.batch_size or config.batch_size)
        except (ValueError, FileNotFoundError) as error:
            parser.error(str(error))

    step = Step(loaded(options.config), parts=True)
    twin = Step(loaded(options.against), parts=False) if options.against else None
    if twin is not None and twin.config.name == step.config.name:
        parser.error(f"--against is the configuration itself: both are named {step.config.name!r}")
    model = step.config.model
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}: {step.config.micro_batch_size} x "
        f"{step.config.data.sequence_length} tokens, D {model.model_dim}, F {model.hidden_dim}, "
        f"{model.num_layers} layers, vocabulary {model.vocab_size}"
    )
    largest, flops_of_a_product = products(step.config)
    programs = {**step.programs, **largest, **({} if twin is None else twin.programs)}
    times = timed_in_turn(programs, options.repeats)
    report(step, {name: min(values) for name, values in times.items()}, flops_of_a_product)
    if twin is not None:
        ours, theirs = times[f"step {step.config.name}"], times[f"step {twin.config.name}"]
        rounds = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"\n{step.config.name} / {twin.config.name}: step time {min(ours) / min(theirs):.3f} "
            f"(median over rounds {rounds:.3f}), model FLOPs "
            f"{step.account.model_training_per_token / twin.account.model_training_per_token:.3f}"
        )


if __name__ == "__main__":
    main()
