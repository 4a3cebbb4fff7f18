"""Times attention on the machine at hand: IHA blockwise, plain MHA of the same base heads, and naive IHA.

    python benchmarks/attention.py                      # the standard shapes, forward + backward
    python benchmarks/attention.py --scaling            # T 1024 -> 4096 at a fixed window: time and memory
    python benchmarks/attention.py --shape 1 1024 20 20 128 10 --rope token
    python benchmarks/attention.py --bound              # beside what the tiles' products and exponentials alone take

Machines are shared and noisy: the variants of a shape run in turn, and what counts is the ratio in one run. Memory is
what the compiler reports as temporaries, beside the bytes of q, k, v and the output. The bound is the time of the
tiles' products at the rate of one large product, and of their exponentials (forward, again in the backward pass, and
the gradient through them) at the rate of a block that fits in the cache, both measured in the same run.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from iha_jax.nn.dot_product import dot_product_attention
from iha_jax.ops import forms

SHAPES = [
    # B, T, N, P, H, W (0: global)
    (2, 128, 8, 8, 32, 0),
    (1, 512, 8, 4, 32, 16),
    (1, 1024, 8, 4, 32, 32),
]


def iha(implementation, window, rope):
    def attend(query, key, value, mixing):
        return interleaved_head_attention(
            query, key, value, mixing, window=window, rope=rope, implementation=implementation
        )

    return attend


def mha(window):
    def attend(query, key, value, mixing):
        del mixing
        return dot_product_attention(query, key, value, causal=True, window=window)

    return attend


def compile_step(attend, arrays, mixing):
    """Forward and backward pass with respect to everything, compiled; and its temporaries in bytes."""

    def step(query, key, value, mixing, cotangent):
        out, vjp = jax.vjp(attend, query, key, value, mixing)
        return out, vjp(cotangent)

    compiled = jax.jit(step).lower(*arrays[:3], mixing, arrays[3]).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return (lambda: compiled(*arrays[:3], mixing, arrays[3])), memory.temp_size_in_bytes


def make_inputs(batch, tokens, heads, pseudo, dim, dtype):
    keys = jax.random.split(jax.random.key(0), 8)
    arrays = [jax.random.normal(k, (batch, tokens, heads, dim), dtype) for k in keys[:4]]
    query, key, value = (jax.random.normal(k, (heads, heads, pseudo)) * heads**-0.5 for k in keys[4:7])
    collapse = jax.random.normal(keys[7], (heads, pseudo)) / pseudo
    return arrays, HeadMixing(query=query, key=key, value=value, collapse=collapse)


def timed_in_turn(runs, repeats):
    """Median seconds of each run, the runs interleaved so that the machine's mood is shared."""
    for run in runs.values():
        jax.block_until_ready(run())
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def products_of(shape, rope):
    """Every product of the forward pass that the tiles execute, and the form that was chosen."""
    batch, tokens, heads, pseudo, dim, window = shape
    problem = forms.Problem(
        batch=batch,
        query_len=tokens,
        key_len=tokens,
        heads=heads,
        kv_heads=heads,
        sources=heads,
        kv_sources=heads,
        head_dim=dim,
        value_dim=dim,
        pseudo=pseudo,
        causal="virtual",
        window=window or None,
        rotates_pseudo_heads=rope == "virtual",
        across_heads=False,
        aligned=True,
    )
    plan, form = forms.choose(problem)
    return forms.products(problem, plan, form), form


def executed_over_ideal(shape, products):
    """Executed FLOPs of the forward pass over Algorithm 1's for the exact window."""
    batch, tokens, heads, pseudo, dim, window = shape
    keys = min(window or tokens, tokens) * pseudo
    pairs = tokens * pseudo * keys - keys * (keys - 1) // 2
    ideal = batch * (3 * 2 * tokens * heads**2 * pseudo * dim + 2 * 2 * pairs * heads * dim)
    return sum(product.flops for product in products) / ideal


def softmax_and_gradient(scores, cotangent):
    """A block's exponentials twice and the gradient through them: the least that forward and backward pass do."""
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    again = jnp.exp(scores - 1.0)
    return weights.sum(axis=-1), weights, again * (cotangent - 0.5)


def unit_runs(dtype):
    """A large product and a block of softmax, compiled, with the FLOPs and elements of each."""
    size, rows, keys = 1024, 512, 512
    left, right = (jax.random.normal(k, (size, size), dtype) for k in jax.random.split(jax.random.key(1)))
    scores, cotangent = (jax.random.normal(k, (rows, keys)) for k in jax.random.split(jax.random.key(2)))
    multiply = jax.jit(jnp.matmul).lower(left, right).compile()
    soften = jax.jit(softmax_and_gradient).lower(scores, cotangent).compile()
    runs = {"product": lambda: multiply(left, right), "softmax": lambda: soften(scores, cotangent)}
    return runs, {"product": 2 * size**3, "softmax": rows * keys}


def bound(products, seconds, amounts):
    """Seconds of the products and of the exponentials, forward and backward, at the rates measured."""
    flops = sum(product.flops * (1 + product.recomputed + product.gradients) for product in products)
    (scores,) = (product.outputs for product in products if product.name in ("scores", "mix scores by key"))
    return (
        flops * seconds["product"] / amounts["product"],
        scores * seconds["softmax"] / amounts["softmax"],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=6, metavar=("B", "T", "N", "P", "H", "W"), help="W 0 is global")
    parser.add_argument("--rope", choices=("virtual", "token", "both"), default="both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--scaling", action="store_true", help="N 8, P 4, H 64, W 64 at T 1024 and 4096")
    parser.add_argument("--naive", action="store_true", help="also time the materialising reference")
    parser.add_argument("--bound", action="store_true", help="measure the products and exponentials alone, too")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    shapes = [tuple(options.shape)] if options.shape else SHAPES
    if options.scaling:
        shapes = [(1, 1024, 8, 4, 64, 64), (1, 4096, 8, 4, 64, 64)]
    ropes = ("virtual", "token") if options.rope == "both" else (options.rope,)

    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, forward + backward, {options.dtype}")
    print(
        f"{'B T N P H W':>24}  {'variant':<16} {'ms':>8} {'/ MHA':>6} {'temp MiB':>9} {'/ qkvo':>6} {'FLOPs/ideal':>11}"
    )
    for shape in shapes:
        batch, tokens, heads, pseudo, dim, window = shape
        arrays, mixing = make_inputs(batch, tokens, heads, pseudo, dim, jnp.dtype(options.dtype))
        variants = {"mha": mha(window or None)}
        for positions in ropes:
            variants[f"iha {positions}"] = iha("blockwise", window or None, Rope(positions=positions))
        if options.naive:
            variants["iha naive"] = iha("reference", window or None, Rope())
        compiled = {name: compile_step(attend, arrays, mixing) for name, attend in variants.items()}
        units, amounts = unit_runs(jnp.dtype(options.dtype)) if options.bound else ({}, {})
        seconds = timed_in_turn({name: run for name, (run, _) in compiled.items()} | units, options.repeats)
        base_bytes = sum(x.nbytes for x in arrays)
        for name, (_, temporaries) in compiled.items():
            ratio = ""
            if name in ("iha virtual", "iha token"):
                products, form = products_of(shape, name.split()[1])
                share = executed_over_ideal(shape, products)
                ratio = f"{share:11.2f}  scores {form.scores}, values {form.values}"
                if options.bound:
                    multiply, soften = (1e3 * x for x in bound(products, seconds, amounts))
                    ratio += f"; products {multiply:.1f} ms + softmax {soften:.1f} ms"
            print(
                f"{' '.join(map(str, shape)):>24}  {name:<16} {1e3 * seconds[name]:8.1f} "
                f"{seconds[name] / seconds['mha']:6.1f} {temporaries / 2**20:9.1f} "
                f"{temporaries / base_bytes:6.2f} {ratio}"
            )


if __name__ == "__main__":
    main()
