"""Random calls of the attention operation, as the functional contract allows them.

A `Spec` is everything a compiled program depends on; arrays for it are drawn separately, so that several draws share
one compilation. Options are dealt from shuffled decks rather than drawn independently: any run of consecutive specs
as long as an option has values contains every one of them.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax import HeadMixing, LinearScaling, Llama3Scaling, Rope, YarnScaling, interleaved_head_attention
from tests import oracle

# Every implementation that runs on a CPU; each must have all the properties tested.
IMPLEMENTATIONS = ("reference", "blockwise")
# Most programs here run once, for milliseconds: optimising them takes twice as long as it saves.
QUICK = {"xla_backend_optimization_level": 0}
INPUTS = ("query", "key", "value", "mix_query", "mix_key", "mix_value", "collapse")
POSITIONS = ("query_positions", "key_positions")
IDS = ("query_segment_ids", "key_segment_ids")
INTEGERS = POSITIONS + IDS

# Which of the integer arrays each layout gives; what they hold is in `draw_integers`.
SELF_LAYOUTS = {
    "plain": (),
    "offset": ("query_positions",),
    "offset_twice": POSITIONS,
    "gaps": ("query_positions",),
    "packed": ("query_segment_ids",),
    "packed_restart": ("query_positions", "query_segment_ids"),
    "packed_twice": INTEGERS,
    "right_padding": ("query_segment_ids",),
    "left_padding": ("query_positions", "query_segment_ids"),
    "holes": IDS,
    "key_padding": ("key_segment_ids",),
}
CROSS_LAYOUTS = {
    "context": (),  # without causality only
    "context_padding": ("key_segment_ids",),  # likewise
    "prefix": POSITIONS,
    "prefix_padding": (*POSITIONS, "key_segment_ids"),
    "sparse": POSITIONS,
    "packed_cross": INTEGERS,
}

# Cells of the score matrices of all rows and heads: keeps a case to milliseconds in NumPy.
MAX_SCORES = 400_000


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a case."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    P: int
    layout: str
    causal: Any
    window: int | None
    rope: Rope | None
    scale: float | None
    logits_soft_cap: float | None
    across_heads: bool
    dtype: str

    @property
    def integers(self) -> tuple[str, ...]:
        return {**SELF_LAYOUTS, **CROSS_LAYOUTS}[self.layout]

    @property
    def options(self) -> dict[str, Any]:
        names = ("causal", "window", "rope", "scale", "logits_soft_cap")
        return {name: getattr(self, name) for name in names}


def _decks(seed):
    """A function that deals from a shuffled copy of its list, and shuffles anew when it is used up."""
    rng, decks = np.random.default_rng(seed), {}

    def deal(name, values):
        if not decks.get(name):
            decks[name] = [values[i] for i in rng.permutation(len(values))]
        return decks[name].pop()

    return deal


@functools.cache
def specs(count: int, seed: int = 0) -> tuple[Spec, ...]:
    """The first ``count`` specs; a longer list begins with the shorter one."""
    deal = _decks(seed)
    sizes = (1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 19, 23, 29, 31, 32, 37, 40)
    ropes = {
        "none": None,
        "virtual": Rope(),
        "token": Rope(theta=10_000.0, positions="token"),
        "linear": Rope(scaling=LinearScaling(4.0)),
        "llama3": Rope(scaling=Llama3Scaling(8.0, 1.0, 4.0, original_max_position=64)),
        "llama3_token": Rope(theta=1e4, positions="token", scaling=Llama3Scaling(2.0, 1.5, 3.0, 256)),
        "yarn": Rope(theta=10_000.0, scaling=YarnScaling(4.0, original_max_position=128)),
        "yarn_token": Rope(positions="token", scaling=YarnScaling(8.0, 512, 16.0, 2.0, attention_factor=1.1)),
    }
    result = []
    for _ in range(count):
        layout = deal("layout", list(SELF_LAYOUTS) + list(CROSS_LAYOUTS))
        causal = None if layout.startswith("context") else deal("causal", ["virtual", "token", "virtual", None])
        B, (N, K) = (
            deal("B", [1, 2, 3]),
            deal("heads", [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (5, 5), (6, 2), (6, 3)]),
        )
        P = deal("P", [1, 2, 3, 4, 8, 20])
        rope = ropes[deal("rope", ["none", *ropes])]
        H = deal("H", [16, 16, 16, 64, 80, 96, 128]) if rope else deal("odd H", [7, 16])
        T = S = deal("size", sizes)
        if layout in CROSS_LAYOUTS:
            S = deal("key size", [s for s in sizes if s > 2])
            if layout.startswith("prefix"):
                T, S = min(T, S), max(T, S)
        while B * N * T * S * P * P > MAX_SCORES:
            T, S, B = (T, S, B - 1) if B > 1 else (max(1, T // 2), max(1, S // 2), 1)
        S += layout in CROSS_LAYOUTS and S == T
        window = deal("window", [None, None, 1, 2, 3, 5, "T", "T+3"])
        result.append(
            Spec(
                *(B, T, S, N, K, H),
                Hv=deal("Hv", [H, H, 5, 24]),
                P=P,
                layout=layout,
                causal=causal,
                window={"T": T, "T+3": T + 3}.get(window, window),
                rope=rope,
                scale=deal("scale", [None, None, 0.3]),
                logits_soft_cap=deal("cap", [None, None, 1.5, 20.0]),
                across_heads=deal("across", [False, True]),
                dtype=deal("dtype", ["float32"] * 7 + ["bfloat16"]),
            )
        )
    return tuple(result)


def draw(spec: Spec, seed: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The seven floating inputs (in the order of `INPUTS`) and the layout's integer arrays."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv, P = (getattr(spec, n) for n in ("B", "T", "S", "N", "K", "H", "Hv", "P"))
    heads = [(B, T, N, H), (B, S, K, H), (B, S, K, Hv)]
    tokens = [rng.normal(size=shape).astype(np.float32).astype(spec.dtype) for shape in heads]
    mixing = []
    for shape in ((N, N, P), (K, K, P), (K, K, P), (N, N, P) if spec.across_heads else (N, P)):
        mixing.append((rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32))
    return tokens + mixing, draw_integers(spec, rng)


def draw_integers(spec: Spec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Positions and segment ids of a layout, int32, only those it gives."""
    B, T, S = spec.B, spec.T, spec.S
    offset = rng.choice([0, 1, 1000, 65_521, 999_900], size=(B, 1))
    index = np.arange(max(T, S))[None]
    found: dict[str, np.ndarray] = {}
    match spec.layout:
        case "offset" | "offset_twice":
            found["query_positions"] = offset + index
        case "gaps":
            found["query_positions"] = offset + np.cumsum(rng.integers(1, 4, (B, T)), 1)
        case "packed" | "packed_restart" | "packed_twice":
            found["query_segment_ids"], restarting = _packed(rng, B, T)
            found["query_positions"] = offset + restarting
        case "right_padding":
            found["query_segment_ids"] = (index < rng.integers(0, T + 1, (B, 1))) * 3
        case "left_padding":
            start = rng.integers(0, T + 1, (B, 1))
            found["query_segment_ids"] = (index >= start) * 1
            found["query_positions"] = np.maximum(index - start, 0) + offset
        case "holes":  # any rows are padding, differently for queries and keys
            found["query_segment_ids"] = rng.integers(0, 3, (B, T)) > 0
            found["key_segment_ids"] = rng.integers(0, 3, (B, S)) > 0
        case "key_padding" | "context_padding":
            found["key_segment_ids"] = index[:, :S] < rng.integers(0, S + 1, (B, 1))
        case "prefix" | "prefix_padding":  # queries are the last T of S tokens, as with a cache
            found["key_positions"] = offset + index
            found["query_positions"] = offset + index[:, S - T :]
            found["key_segment_ids"] = index >= rng.integers(0, S, (B, 1))
        case "sparse":
            for name, length in (("query_positions", T), ("key_positions", S)):
                found[name] = offset + np.sort(np.stack([rng.permutation(T + S)[:length] for _ in range(B)]), 1)
        case "packed_cross":  # documents of different lengths on the two sides; some have no counterpart
            for side, length in (("query", T), ("key", S)):
                ids, restarting = _packed(rng, B, length, names=np.arange(1, 99))
                found[f"{side}_segment_ids"], found[f"{side}_positions"] = ids, restarting + offset
    # Arrays of a pair that hold the same thing are given twice where the layout gives both.
    for given, other in (("query_positions", "key_positions"), ("query_segment_ids", "key_segment_ids")):
        if other in spec.integers and other not in found:
            found[other] = found[given].copy()
    lengths = {"query": T, "key": S}
    return {n: np.broadcast_to(found[n], (B, lengths[n.split("_")[0]])).astype(np.int32) for n in spec.integers}


def _packed(rng, batch, length, names=None):
    """Rows of documents: ids in contiguous runs (some runs are padding) and positions that restart in each."""
    ids, positions = np.zeros((batch, length), np.int64), np.zeros((batch, length), np.int64)
    for b in range(batch):
        cuts = np.sort(rng.integers(0, length + 1, size=min(length, 4)))
        labels = rng.permutation(98) + 1 if names is None else names
        for i, (start, stop) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            ids[b, start:stop] = 0 if rng.random() < 0.15 else labels[i]
            positions[b, start:stop] = np.arange(stop - start) + rng.choice([0, 0, 17])
    return ids, positions


def call(spec: Spec, implementation, arrays, integers, precision: Any = "highest"):
    """The operation on a case; traceable."""
    query, key, value, *mixing = arrays
    return interleaved_head_attention(
        query,
        key,
        value,
        HeadMixing(*mixing),
        **spec.options,
        **integers,
        precision=precision,
        implementation=implementation,
    )


def expected(spec: Spec, arrays, integers) -> np.ndarray:
    """The oracle on a case, float64."""
    return oracle.attention(*arrays, **spec.options, **integers)


def compiled(spec: Spec, implementation: str):
    """One program for output and all gradients: ``f(arrays, integers, cotangent) -> (output, gradients)``."""

    def loss(arrays, integers, cotangent):
        out = call(spec, implementation, arrays, integers)
        return (out.astype(jnp.float32) * cotangent).sum(), out

    program = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)

    def run(arrays, integers, cotangent):
        (_, out), gradients = program(arrays, integers, cotangent)
        return np.asarray(out, np.float64), [np.asarray(g, np.float64) for g in gradients]

    return run


def naming(*essentials: str) -> str:
    """A pattern for `pytest.raises(match=…)`: the message holds all of these, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(e)})" for e in essentials)
