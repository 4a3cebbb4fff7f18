"""Patterns of attention against softmax by hand; numbers about mixing tensors where they are known."""

import dataclasses
import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax import InterleavedHeadAttention, MultiHeadAttention, Rope
from iha_jax.data import DataConfig
from iha_jax.models import IHAConfig, ModelConfig, Transformer
from iha_jax.models.stacking import stack_parameters
from iha_jax.nn import SimplicialAttention
from iha_jax.training.checkpoint import Checkpoints, load_params
from iha_jax.training.config import CheckpointConfig, TrainConfig
from iha_jax.training.serialization import to_json
from iha_jax.training.state import ModelFunctions, initial_state
from iha_jax.viz import attention_patterns, collapse_summary, layer_inputs, look, look_at_model, mixing_summary
from iha_jax.viz.__main__ import main
from tests.experiments import browser

T, N, H, P = 5, 3, 4, 2


def looked_at(make):
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state)
    x = jnp.asarray(rng.normal(size=(1, T, N * H)), jnp.float32)
    patterns = jax.jit(lambda state, x: attention_patterns(nnx.merge(graph, state), x))(state, x)
    return nnx.merge(graph, state), np.asarray(x[0], np.float64), {k: np.asarray(v) for k, v in patterns.items()}


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def heads(x, weight):
    return np.einsum("td,dnh->tnh", x, np.asarray(weight[...], np.float64))


def test_patterns_of_plain_attention():
    layer, x, patterns = looked_at(lambda: MultiHeadAttention(N, N * H, causal=True, rope=None, rngs=nnx.Rngs(0)))
    logits = np.einsum("tnh,snh->nts", heads(x, layer.query_kernel), heads(x, layer.key_kernel)) / H**0.5
    expected = softmax(np.where(np.tri(T, dtype=bool), logits, -np.inf))
    assert set(patterns) == {"effective"}
    np.testing.assert_allclose(patterns["effective"], expected, atol=1e-6)


def test_patterns_of_simplicial_attention():
    layer, x, patterns = looked_at(lambda: SimplicialAttention(N, N * H, causal=False, rngs=nnx.Rngs(0)))
    keys = (heads(x, layer.key_kernel), heads(x, layer.second_key_kernel))
    logits = np.einsum("tnh,inh,jnh->ntij", heads(x, layer.query_kernel), *keys) / H**0.5
    weights = softmax(logits.reshape(N, T, T * T)).reshape(N, T, T, T)
    np.testing.assert_allclose(patterns["effective"], weights.sum(axis=3), atol=1e-6)


@pytest.mark.parametrize("collapse", ["per_head", "across_heads"])
def test_patterns_of_pseudo_heads(collapse):
    layer, x, patterns = looked_at(
        lambda: InterleavedHeadAttention(N, N * H, num_pseudo_heads=P, rope=None, collapse=collapse, rngs=nnx.Rngs(0))
    )
    tensors = {k: np.asarray(getattr(layer.mixing, k), np.float64) for k in ("query", "key", "value", "collapse")}
    query = np.einsum("tmh,mnp->ntph", heads(x, layer.query_kernel), tensors["query"]).reshape(N, T * P, H)
    key = np.einsum("tmh,mnp->ntph", heads(x, layer.key_kernel), tensors["key"]).reshape(N, T * P, H)
    logits = query @ np.swapaxes(key, 1, 2) / H**0.5
    weights = softmax(np.where(np.tri(T * P, dtype=bool), logits, -np.inf))
    np.testing.assert_allclose(patterns["pseudo"], weights, atol=1e-6)
    split = weights.reshape(N, T, P, T, P)
    if collapse == "per_head":
        effective = np.einsum("np,ntpsr,mnr->nts", tensors["collapse"], split, tensors["value"])
    else:
        effective = np.einsum("ngp,gtpsr,mgr->nts", tensors["collapse"], split, tensors["value"])
    np.testing.assert_allclose(patterns["effective"], effective, atol=1e-5)


def test_windows_and_rotations_are_the_layers_own():
    _, _, patterns = looked_at(
        lambda: InterleavedHeadAttention(N, N * H, num_pseudo_heads=P, window=2, rope=Rope(), rngs=nnx.Rngs(0))
    )
    distance = np.arange(T * P)[:, None] - np.arange(T * P)
    seen = (distance >= 0) & (distance < 2 * P)
    assert (patterns["pseudo"][:, ~seen] == 0).all()
    assert (patterns["pseudo"][:, seen] > 0).all()
    np.testing.assert_allclose(patterns["pseudo"].sum(axis=2), 1, atol=1e-6)


def test_one_input_at_a_time():
    layer = nnx.eval_shape(lambda: MultiHeadAttention(N, N * H, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"one input, \[1, tokens, features\], got shape \(2, 5, 12\)"):
        attention_patterns(layer, jnp.zeros((2, T, N * H)))


def test_summaries_of_known_tensors():
    copies = np.broadcast_to(np.eye(4)[:, :, None], (4, 4, 3))
    assert mixing_summary(copies) == pytest.approx((0, 0, 4))
    # All pseudo-heads are multiples of one mixture: 1, 2, 3 times the sum of the heads.
    one = np.ones((4, 4, 1)) * np.array([1.0, 2.0, 3.0])
    found = mixing_summary(one)
    assert found.effective_rank == pytest.approx(1)
    assert found.spread == pytest.approx(np.sqrt(2 / 3))
    assert found.from_copy == pytest.approx(np.sqrt(np.mean((one - copies) ** 2)))


def test_effective_rank_of_any_tensor():
    tensor = np.random.default_rng(3).normal(size=(5, 4, 3))
    # Squared singular values are the eigenvalues of the sources' Gram matrix.
    share = np.linalg.eigvalsh(np.einsum("mhp,khp->mk", tensor, tensor))
    share /= share.sum()
    found = mixing_summary(tensor)
    assert found.effective_rank == pytest.approx(np.prod(share**-share))
    by_head = [[np.mean((tensor[m, h] - tensor[m, h].mean()) ** 2) for h in range(4)] for m in range(5)]
    assert found.spread == pytest.approx(np.sqrt(np.mean(by_head)))
    assert found.from_copy == pytest.approx(np.sqrt(((tensor - np.eye(5, 4)[..., None]) ** 2).mean()))


def test_which_pseudo_heads_a_collapse_uses():
    found = collapse_summary(np.array([[0.5, -0.5, 0, 0], [0, 0, 3, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    np.testing.assert_allclose(found.share, [[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4, [0] * 4])
    np.testing.assert_allclose(found.used, [2, 1, 4, 1])
    across = np.zeros((2, 2, 3))
    across[0, :, 1] = [1, -1]  # one pseudo-head of both source heads
    across[1, 0] = [2, 1, 1]
    found = collapse_summary(across)
    np.testing.assert_allclose(found.share, [[0, 1, 0], [0.5, 0.25, 0.25]])
    np.testing.assert_allclose(found.used, [1, 2**1.5])


MODEL = ModelConfig(
    vocab_size=258,
    max_length=32,
    num_layers=3,
    model_dim=12,
    num_heads=3,
    mlp_dim=16,
    pattern=("iha", "mha"),
    iha=IHAConfig(num_pseudo_heads=2, window=4, implementation="reference"),
)


@pytest.mark.slow
def test_what_every_layer_reads():
    small = MODEL
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 258, (1, 9)), jnp.int32)
    graph, state = nnx.split(Transformer(small, rngs=jax.random.key(0)))

    @jax.jit
    def unrolled(state):
        model = nnx.merge(graph, state)
        layers = layer_inputs(model, tokens)
        # Of the last layer's input and output follow the logits: so what it read was right, and all before it.
        layer, read = layers["layer 2, iha"]
        return {name: x for name, (_, x) in layers.items()}, layer(read), model.layers[2].attention(read)

    reads, output, expected = unrolled(state)
    np.testing.assert_array_equal(output, expected)
    embedded = np.asarray(nnx.merge(graph, state).embedding(tokens), np.float64)
    scaled = embedded / np.sqrt((embedded**2).mean(axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(reads["layer 0, iha"], scaled, rtol=1e-4, atol=1e-5)

    # The same parameters, stacked: every layer reads the same.
    scanned = dataclasses.replace(small, scan_layers=True)
    stacked_graph, stacked = nnx.split(nnx.eval_shape(lambda: Transformer(scanned, rngs=jax.random.key(0))))
    nnx.replace_by_pure_dict(stacked, stack_parameters(nnx.to_pure_dict(state), small))
    again = jax.jit(lambda s: {n: x for n, (_, x) in layer_inputs(nnx.merge(stacked_graph, s), tokens).items()})(
        stacked
    )
    assert set(reads) == set(again) == {"layer 0, iha", "layer 1, mha", "layer 2, iha"}
    for name, x in reads.items():
        np.testing.assert_allclose(again[name], x, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one checkpoint, of an untrained model."""
    folder = str(tmp_path_factory.mktemp("runs"))
    config = TrainConfig(
        name="small <1>", directory=folder, model=MODEL, steps=2000, data=DataConfig(sequence_length=32)
    )
    config.run_directory.mkdir()
    (config.run_directory / "config.json").write_text(to_json(config))

    class Nowhere:
        def get_state(self):
            return b"{}"

    functions = ModelFunctions(Transformer(MODEL, rngs=jax.random.key(1)))
    state = dataclasses.replace(initial_state(functions, _NoOptimizer, 0), step=jnp.int32(3))
    checkpoints = Checkpoints(config.run_directory / "checkpoints", CheckpointConfig(asynchronous=False))
    checkpoints.save(state, Nowhere(), {}, None)
    checkpoints.close()
    return config.run_directory


class _NoOptimizer:
    @staticmethod
    def init(params):
        return {"count": jnp.int32(0)}


def test_parameters_alone_are_read(run):
    functions = ModelFunctions(Transformer(MODEL, rngs=jax.random.key(1)))
    step, params = load_params(run, functions.params)
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, params, functions.params)
    with pytest.raises(FileNotFoundError, match=r"wanted 4, there are \[3\]"):
        load_params(run, functions.params, 4)
    with pytest.raises(ValueError, match=r"another model: final_norm\.scale has shape"):
        load_params(run, {**functions.params, "final_norm.scale": jnp.zeros(5)})


class Checker(html.parser.HTMLParser):
    """Tags must close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert main([str(run / "checkpoints" / "3"), "--prompt", "def f<x>:", "--out", str(out)]) == 0
    return out


def test_the_page_shows_all_layers(page):
    text = page.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert all(address.startswith("data:") for address in checker.addresses)
    assert "Inside small &lt;1&gt;, step 3" in text
    assert [f"layer {i}, {('iha', 'mha')[i % 2]}" in text for i in range(3)] == [True] * 3
    assert text.count("its 4 patterns over 10 tokens") == 2 * 3 * 2  # alt and caption, heads, layers of IHA
    # Start and nine letters, and the numbers of three tensors in two layers.
    assert len(re.findall("<code>", text)) == 10
    assert text.count("<tr>") == 1 + 6


def test_views_show_themselves():
    layer = InterleavedHeadAttention(N, N * H, num_pseudo_heads=P, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, N * H)), jnp.float32)
    view = look(layer, x, "one & only")
    shown = view._repr_html_()
    Checker().feed(shown)
    assert "one &amp; only" in shown
    assert view.mixing["key"] == mixing_summary(layer.mixing.key)
    np.testing.assert_array_equal(view.collapse.share, collapse_summary(layer.mixing.collapse).share)
    plain = look(MultiHeadAttention(N, N * H, causal=True, rngs=nnx.Rngs(0)), x)
    assert plain.mixing == {}
    assert plain.collapse is None
    model = Transformer(dataclasses.replace(MODEL, num_layers=2), rngs=jax.random.key(0))
    whole = look_at_model(model, jnp.zeros((1, 4), jnp.int32))
    assert [layer.name for layer in whole.layers] == ["layer 0, iha", "layer 1, mha"]
    assert "layer 1, mha" in whole._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "a"], "no config at 'nowhere'"),
        (["{run}/checkpoints/7", "--prompt", "a"], "wanted 7, there are"),
        (["{run}", "--prompt", "a" * 40], "41 tokens, but the model is made for 32"),
    ],
)
def test_wrong_commands(run, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        main([a.format(run=run) for a in arguments] + ["--out", str(tmp_path / "page.html")])


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 375])
def test_the_page_in_a_browser(page, width):
    with browser.Browser(width, 900, phone=width < 500) as chromium:
        chromium.open(page.as_uri())
        assert chromium.evaluate("document.title") == "Inside small <1>, step 3"
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        assert chromium.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        assert chromium.complaints() == []
