"""The fused kernels compiled ahead of time for TPUs by their own compiler. Needs libtpu, no TPU; minutes in all."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from iha_jax import HeadMixing, Rope, interleaved_head_attention

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu")
if jax.__version_info__ < (0, 8):
    pytest.skip(
        "jax 0.7 with its libtpu 0.0.21 dies of a segmentation fault when any program is compiled without a TPU: "
        "the client asks for default layouts that this libtpu does not know",
        allow_module_level=True,
    )

PAPER = {"N": 20, "P": 20, "H": 128, "T": 8192, "window": 10}


@pytest.fixture(autouse=True)
def no_tpu_here(monkeypatch):
    """libtpu asks neither a metadata server nor other processes."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def compile_for(
    topology, *, N, P, H, T, K=None, Hv=None, B=1, dtype="bfloat16", across=False, segments=False, **options
):
    """Forward and backward with respect to everything, on heads side by side as projections leave them."""
    K, Hv = K or N, Hv or H
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)

    def struct(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    collapse = "across_heads" if across else "per_head"
    mixing = jax.eval_shape(lambda: HeadMixing.copy(N, P, K, collapse=collapse))
    mixing = jax.tree.map(lambda x: struct(x.shape, x.dtype), mixing)
    ids = struct((B, T), jnp.int32) if segments else None
    options = {"rope": Rope(), **options}

    def attend(query, key, value, mixing, ids):
        out = interleaved_head_attention(
            query.reshape(B, T, N, H),
            key.reshape(B, T, K, H),
            value.reshape(B, T, K, Hv),
            mixing,
            query_segment_ids=ids,
            implementation="pallas",
            **options,
        )
        return out.reshape(B, T, N * Hv)

    def step(query, key, value, mixing, ids, cotangent):
        out, vjp = jax.vjp(lambda *x: attend(*x, ids), query, key, value, mixing)
        return out, vjp(cotangent)

    arrays = struct((B, T, N * H)), struct((B, T, K * H)), struct((B, T, K * Hv)), mixing, ids
    return jax.jit(step).lower(*arrays, struct((B, T, N * Hv))).compile()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_paper_layer(topology):
    compiled = compile_for(topology, **PAPER)
    assert compiled.as_text().count("tpu_custom_call") == 2
    # Plain MHA of this size through jax's TPU flash attention takes 210, 294 and 210 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 50e6


@pytest.mark.parametrize(
    "case",
    [
        {"N": 16, "P": 8, "H": 128, "T": 8192, "window": 64},
        {"N": 8, "P": 4, "H": 64, "T": 8192, "window": 256},
        {"N": 8, "P": 4, "H": 128, "T": 8192},
        {"N": 20, "P": 20, "H": 128, "T": 1024, "window": 10, "across": True},
        {"N": 6, "K": 2, "P": 3, "H": 80, "T": 1000, "window": 7, "segments": True, "logits_soft_cap": 20.0},
        {"N": 4, "P": 1, "H": 64, "T": 512, "window": 1, "causal": "token"},
        {"N": 4, "P": 2, "H": 128, "T": 8192, "window": 4096},
        {"N": 20, "P": 4, "H": 128, "T": 8192, "window": 512},
        {"N": 20, "K": 4, "P": 4, "H": 128, "T": 1024, "causal": None, "dtype": "float32", "precision": "highest"},
        {"N": 6, "P": 20, "H": 64, "Hv": 128, "T": 512, "causal": None, "window": 5, "B": 2},
        {"N": 4, "P": 3, "H": 80, "T": 512, "dtype": "float32", "across": True, "segments": True},
    ],
    ids=lambda case: "-".join(f"{name}{value}" for name, value in case.items()),
)
def test_shapes_and_options(case):
    compiled = compile_for("v5p:2x2x1", **case)  # the one with the least memory on chip
    assert compiled.as_text().count("tpu_custom_call") >= 2


# Every head dimension, P, N, sharing and window of the kernels' promise at least once, mostly together with others.
MATRIX = [
    {"N": 4, "P": 1, "H": 128, "T": 1024, "window": 64},
    {"N": 4, "P": 2, "H": 64, "T": 1024, "window": 1},
    {"N": 4, "P": 4, "H": 80, "T": 1024, "window": 1024},
    {"N": 4, "P": 20, "H": 128, "T": 512, "window": 1, "causal": "token"},
    {"N": 6, "P": 4, "H": 64, "T": 1024, "window": 16},
    {"N": 6, "P": 8, "H": 128, "T": 1024},
    {"N": 6, "K": 3, "P": 2, "H": 80, "T": 1024, "window": 512},
    {"N": 6, "P": 20, "H": 80, "T": 512, "window": 5},
    {"N": 20, "P": 1, "H": 80, "T": 1024, "window": 128},
    {"N": 20, "P": 3, "H": 128, "T": 1024, "window": 32},
    {"N": 20, "K": 5, "P": 8, "H": 64, "T": 1024, "window": 8},
    {"N": 20, "P": 2, "H": 64, "T": 8192, "window": 4096},
    {"N": 20, "P": 4, "H": 128, "T": 4096},
]


def test_the_matrix_covers_what_is_promised():
    def seen(name):
        return {case.get(name) for case in MATRIX}

    assert seen("H") == {64, 80, 128}
    assert seen("P") == {1, 2, 3, 4, 8, 20}
    assert seen("N") == {4, 6, 20}
    assert {1, 4096, None} <= seen("window")
    assert {3, 5} <= seen("K")


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: "-".join(f"{name}{value}" for name, value in case.items()))
def test_matrix(case):
    compiled = compile_for("v5p:2x2x1", **case)
    assert compiled.as_text().count("tpu_custom_call") >= 2


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 0.06),
        ({"rope": Rope(positions="token")}, 0.06),
        ({"K": 4, "P": 8}, 0.15),
        ({"T": 8, "K": 8, "logits_soft_cap": 30.0}, 0.15),
        ({"dtype": "float32", "window": 64}, 0.06),
    ],
    ids=str,
)
def test_decoding_makes_nothing_of_the_caches_size(topology, options, share):
    """A layer's step: the new tokens written into a donated cache, then attention over it; temporaries by the cache."""
    options = {"N": 16, "K": 16, "H": 128, "P": 4, "T": 1, "S": 8192, "B": 2, "dtype": "bfloat16", **options}
    (N, K, H, P, T, S, B, dtype) = (options.pop(x) for x in ("N", "K", "H", "P", "T", "S", "B", "dtype"))
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)

    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    mixing = jax.eval_shape(lambda: HeadMixing.copy(N, P, K))
    mixing = jax.tree.map(lambda x: struct(*x.shape, dtype=x.dtype), mixing)
    integers = {
        "query_positions": struct(B, T, dtype=jnp.int32),
        "key_positions": struct(B, S, dtype=jnp.int32),
        "query_segment_ids": struct(B, T, dtype=jnp.int32),
        "key_segment_ids": struct(B, S, dtype=jnp.int32),
    }

    def step(caches, query, new, mixing, integers):
        at = jnp.arange(B, dtype=jnp.int32)[:, None], integers["query_positions"]
        key, value = (cache.at[at].set(new, mode="drop") for cache in caches)
        out = interleaved_head_attention(
            query, key, value, mixing, implementation="pallas", **{"rope": Rope(), **options}, **integers
        )
        return out, (key, value)

    cache = struct(B, S, K, H)
    program = jax.jit(step, donate_argnums=0)
    compiled = program.lower((cache, cache), struct(B, T, N, H), struct(B, T, K, H), mixing, integers).compile()
    assert compiled.as_text().count("tpu_custom_call") == 1
    cache_bytes = 2 * B * S * K * H * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes <= share * cache_bytes


def test_lowered_for_a_gpu_it_says_what_is_missing():
    args = [jnp.ones((1, 16, 2, 16))] * 3
    call = jax.jit(lambda *x: interleaved_head_attention(*x, HeadMixing.copy(2, 2), implementation="pallas"))
    with pytest.raises(NotImplementedError, match="platform"):
        call.trace(*args).lower(lowering_platforms=("cuda",))
