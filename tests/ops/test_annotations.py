"""The public annotations are true: every call here runs with jaxtyping and beartype checking all of `iha_jax.ops`.

In a process of its own, because the checks are woven in while the package is imported.
"""

import os
import pathlib
import subprocess
import sys

PROGRAM = """
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook("iha_jax.ops", "beartype.beartype"):
    import iha_jax
import chex
import jax
import jax.numpy as jnp
from iha_jax import HeadMixing, Llama3Scaling, Rope, YarnScaling, interleaved_head_attention

B, T, S, N, K, H, Hv, P = 2, 5, 7, 4, 2, 6, 3, 3
query, key, value = jnp.ones((B, T, N, H)), jnp.ones((B, T, K, H)), jnp.ones((B, T, K, Hv))
long_key, long_value = jnp.ones((B, S, K, H)), jnp.ones((B, S, K, Hv))
ids, positions = jnp.ones((B, T), jnp.int32), jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
long_positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
per_head, across = HeadMixing.copy(N, P, K), HeadMixing.copy(N, P, K, "across_heads", "mean")


def call(*arrays, implementation="blockwise", **options):
    # The annotations are checked while tracing; compiling and running would add nothing but time.
    def operation(*arrays):
        return interleaved_head_attention(*arrays, **options, implementation=implementation)

    return jax.eval_shape(operation, *arrays)


right = [
    ((query, key, value, per_head), {}),
    ((query, key, value, across), dict(causal="token", window=2, rope=Rope(scaling=Llama3Scaling()))),
    ((query, long_key, long_value, across), dict(causal=None, logits_soft_cap=5.0, scale=0.5, precision="highest")),
    ((query, long_key, long_value, per_head), dict(query_positions=positions, key_positions=long_positions)),
    ((query, key, value, per_head), dict(query_segment_ids=ids, rope=Rope(1e4, "token", YarnScaling(2.0)))),
    (tuple(x.astype(jnp.bfloat16) for x in (query, key, value)) + (per_head,), dict(window=2)),
]
for arrays, options in right:
    for implementation in ("reference", "blockwise"):
        out = call(*arrays, **options, implementation=implementation)
        assert (out.shape, out.dtype) == ((B, T, N, Hv), arrays[0].dtype), out
gradient = jax.grad(lambda m: interleaved_head_attention(query, key, value, m, window=2, rope=Rope()).sum())
chex.assert_trees_all_equal_shapes_and_dtypes(jax.jit(gradient)(across), across)

wrong = {
    "heads of value": lambda: call(query, key, jnp.ones((B, T, N, Hv)), per_head),
    "axes": lambda: call(query[0], key, value, per_head),
    "integer query": lambda: call(query.astype(jnp.int32), key, value, per_head),
    "float positions": lambda: call(query, key, value, per_head, query_positions=positions.astype(jnp.float32)),
    "causal": lambda: call(query, key, value, per_head, causal="tokens"),
    "window": lambda: call(query, key, value, per_head, window="auto"),
    "mixing axes": lambda: HeadMixing(query[0], per_head.key, per_head.value, per_head.collapse[0]),
}
for name, function in wrong.items():
    try:
        function()
    except TypeCheckError:
        continue
    raise AssertionError(f"not caught by the annotations: {name}")
print("checked")
"""


def test_annotations_hold_under_a_type_checker():
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "checked"
