"""The account against independent witnesses: brute-force pairs, the traced program, the model's own parameters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer
from iha_jax.nn import dot_product, simplicial
from iha_jax.training.flops import account, full_pairs, model_flops, visible_pairs, visible_triples
from tests.jaxpr_flops import matmul_flops

SMALL = ModelConfig(
    vocab_size=31,
    max_length=50,
    num_layers=3,
    model_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    pattern=("iha", "local", "mha"),
    iha=IHAConfig(num_pseudo_heads=3, window=5),
    local=MHAConfig(window=20),
)
VARIANTS = {
    "grouped, window": SMALL,
    "global iha": dataclasses.replace(SMALL, iha=IHAConfig(num_pseudo_heads=2, window=None)),
    "token": dataclasses.replace(SMALL, iha=IHAConfig(num_pseudo_heads=3, window=5, rope_positions="token")),
    "across": dataclasses.replace(SMALL, iha=IHAConfig(num_pseudo_heads=3, window=5, collapse="across_heads")),
    "across global": dataclasses.replace(
        SMALL, iha=IHAConfig(num_pseudo_heads=2, window=None, collapse="across_heads")
    ),
    "gated, biases, layer norm, untied": dataclasses.replace(
        SMALL, mlp="swiglu", use_bias=True, norm="layer", tied_embeddings=False, normalize_qk=True
    ),
    "remat full": dataclasses.replace(SMALL, remat="full"),
    "remat dots": dataclasses.replace(SMALL, remat="dots"),
    "scanned": dataclasses.replace(SMALL, scan_layers=True, num_layers=7),
    "wide window": dataclasses.replace(SMALL, max_length=700, iha=IHAConfig(num_pseudo_heads=2, window=300)),
    "baselines": dataclasses.replace(SMALL, pattern=("talking_heads", "differential", "simplicial"), max_length=40),
    "baselines, more": dataclasses.replace(
        SMALL,
        pattern=("talking_heads", "differential", "simplicial"),
        max_length=40,
        num_kv_heads=4,
        talking_heads=MHAConfig(window=9),
        differential=MHAConfig(window=9),
        use_bias=True,
        normalize_qk=True,
        scan_layers=True,
        remat="full",
    ),
    "reference": dataclasses.replace(SMALL, iha=IHAConfig(num_pseudo_heads=3, window=5, implementation="reference")),
}


@pytest.mark.parametrize(
    ("causal", "window", "pseudo"), list(itertools.product(("virtual", "token", None), (None, 1, 3, 30), (1, 3)))
)
def test_visible_pairs_by_brute_force(causal, window, pseudo):
    tokens, count = 11, 0
    virtual = list(itertools.product(range(tokens), range(pseudo)))
    for (t, p), (s, r) in itertools.product(virtual, virtual):
        distance = (t * pseudo + p) - (s * pseudo + r) if causal == "virtual" else t - s
        limit = float("inf") if window is None else window * (pseudo if causal == "virtual" else 1)
        count += abs(distance) < limit if causal is None else 0 <= distance < limit
    assert visible_pairs(tokens, causal, window, pseudo) == count


@pytest.mark.parametrize("window", [None, 1, 3, 30])
def test_triples_and_full_pairs_by_brute_force(window):
    tokens, limit = 11, 10**9 if window is None else window
    seen = [[0 <= t - s < limit for s in range(tokens)] for t in range(tokens)]
    assert visible_triples(tokens, window) == sum(sum(row) ** 2 for row in seen)
    # Every query as the last one: no edge at the start of the sequence.
    assert full_pairs(tokens, window, 3) == 9 * tokens * sum(seen[-1])


def test_work_in_pieces_is_accounted_for(monkeypatch):
    """Above a size the baselines work in pieces and recompute; the account follows."""
    for module in (dot_product, simplicial):
        monkeypatch.setattr(module, "_MAX_LOGITS", 2**13)
    for kind in ("mha", "talking_heads", "differential", "simplicial"):
        config = dataclasses.replace(SMALL, num_layers=1, pattern=(kind,), max_length=40)
        function, state, tokens = _traced(config, 2)
        accounted, places = account(config, 2), 2 * config.max_length
        assert matmul_flops(function, state, tokens) == accounted.executed_forward_per_token * places
        loss = jax.grad(lambda state, tokens, function=function: function(state, tokens).sum())
        assert matmul_flops(loss, state, tokens) == accounted.executed_training_per_token * places


def _traced(config: ModelConfig, batch: int):
    graph, state = nnx.split(jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((batch, config.max_length), jnp.int32)
    return (lambda state, tokens: nnx.merge(graph, state)(tokens)), state, tokens


@pytest.mark.parametrize("name", VARIANTS)
def test_executed_flops_equal_those_of_the_traced_program(name):
    config, batch = VARIANTS[name], 2
    function, state, tokens = _traced(config, batch)
    accounted = account(config, batch)
    forward = matmul_flops(function, state, tokens)
    assert forward == pytest.approx(accounted.executed_forward_per_token * batch * config.max_length, rel=1e-12)
    loss = jax.grad(lambda state, tokens: function(state, tokens).sum())
    training = matmul_flops(loss, state, tokens)
    # A sum's constant cotangent reaches the logits like any other; nothing is cut off.
    assert training == pytest.approx(accounted.executed_training_per_token * batch * config.max_length, rel=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_equal_the_models_own(name):
    config = VARIANTS[name]
    _, state, _ = _traced(config, 1)
    assert account(config).parameters == sum(leaf.size for leaf in jax.tree.leaves(state))


def test_the_papers_numbers():
    paper = ModelConfig(
        vocab_size=128_256,
        max_length=8192,
        num_layers=26,
        model_dim=2560,
        num_heads=20,
        mlp_dim=10_240,
    )
    iha = account(paper)
    mha = account(dataclasses.replace(paper, pattern=("mha",)))
    assert round(iha.parameters / 1e9, 2) == 2.37
    # `paper.md` section 2: 1.02 of global MHA's training FLOPs by visible pairs, mixing and collapse included.
    assert iha.model_training_per_token / mha.model_training_per_token == pytest.approx(1.02, abs=0.005)
    # There, with whole squares: 0.89.
    assert iha.full_training_per_token / mha.full_training_per_token == pytest.approx(0.89, abs=0.005)
    # Section 7: Algorithm 1 at this layer, three mixings, scores and values: 47 MFLOP a token.
    layer = model_flops(paper, "iha", 8192)
    assert (layer.attention - layer.collapse) / 8192 / 1e6 == pytest.approx(47, abs=0.2)
    # The paper's own count charges global layers the full square: the five average 3/5 of a global layer.
    window = paper.iha_window
    assert window == 10
    square = 8192 * window * 20**2
    assert (4 * square + 8192**2) / 5 / 8192**2 == pytest.approx(3 / 5, abs=0.02)
