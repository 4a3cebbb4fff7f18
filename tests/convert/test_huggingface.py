"""Hugging Face checkpoints, made here at random, against a forward pass written from their published definition."""

import dataclasses
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax.convert import read_huggingface, with_pseudo_heads, write_huggingface
from iha_jax.convert.__main__ import main
from iha_jax.convert.configs import from_huggingface, to_huggingface
from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.sampling import Sampling
from iha_jax.models import Transformer
from iha_jax.ops.rope import Llama3Scaling, YarnScaling
from iha_jax.training.state import ModelFunctions
from iha_jax.training.trained import abstract_model, open_trained

safetensors = pytest.importorskip("safetensors.numpy")

D, N, K, H, F, V, L = 24, 6, 2, 8, 40, 61, 3
BASE = {
    "vocab_size": V,
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama 5, biases, tied": {
        **BASE,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "mistral": {**BASE, "model_type": "mistral", "rope_theta": 100.0, "sliding_window": 5},
    "qwen2": {**BASE, "model_type": "qwen2", "rope_theta": 100.0, "use_sliding_window": False, "sliding_window": 4},
    "qwen2, windows": {
        **BASE,
        "model_type": "qwen2",
        "rope_theta": 100.0,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {
        **BASE,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    },
}
TOKENS = np.random.default_rng(5).integers(0, V, (2, 23))


def shapes(config):
    """Names and shapes as Hugging Face's modules define them."""
    found = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    kind = config["model_type"]
    for i in range(L):
        layer = f"model.layers.{i}"
        for name, rows in (("q", N), ("k", K), ("v", K)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows * H, D)
            if config.get("attention_bias") or kind == "qwen2":
                found[f"{layer}.self_attn.{name}_proj.bias"] = (rows * H,)
        found[f"{layer}.self_attn.o_proj.weight"] = (D, N * H)
        if config.get("attention_bias"):
            found[f"{layer}.self_attn.o_proj.bias"] = (D,)
        if kind == "qwen3":
            found[f"{layer}.self_attn.q_norm.weight"] = found[f"{layer}.self_attn.k_norm.weight"] = (H,)
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            found[f"{layer}.mlp.{name}_proj.weight"] = shape
            if config.get("mlp_bias"):
                found[f"{layer}.mlp.{name}_proj.bias"] = shape[:1]
        found[f"{layer}.input_layernorm.weight"] = found[f"{layer}.post_attention_layernorm.weight"] = (D,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (V, D)
    return found


def checkpoint(directory, config, seed=0):
    """A directory as Hugging Face would write it; returns its tensors."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(size=shape, scale=1.0 if len(shape) == 1 or "embed" in name else 0.3).astype(np.float32)
        for name, shape in shapes(config).items()
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, directory / "model.safetensors")
    return tensors


def frequencies(config):
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta")
    inverse = theta ** -(np.arange(0, H, 2) / H)
    if parameters.get("rope_type") == "linear":
        return inverse / parameters["factor"]
    if parameters.get("rope_type") == "llama3":
        wavelength = 2 * math.pi / inverse
        low = parameters["original_max_position_embeddings"] / parameters["low_freq_factor"]
        high = parameters["original_max_position_embeddings"] / parameters["high_freq_factor"]
        smooth = (parameters["original_max_position_embeddings"] / wavelength - 1.0) / (4.0 - 1.0)
        between = (1 - smooth) * inverse / parameters["factor"] + smooth * inverse
        scaled = np.where(wavelength > low, inverse / parameters["factor"], inverse)
        return np.where((wavelength <= low) & (wavelength >= high), between, scaled)
    return inverse


def expected_logits(config, tensors, tokens):
    """The forward pass of Llama, Mistral, Qwen 2 and 3 in float64, head by head."""
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    kind, length = config["model_type"], tokens.shape[1]
    angle = np.arange(length)[:, None] * frequencies(config)
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    def rotate(x):
        a, b = x[..., : H // 2], x[..., H // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def window(layer):
        if kind == "mistral":
            return config["sliding_window"]
        if kind == "qwen2" and config["use_sliding_window"] and layer >= config["max_window_layers"]:
            return config["sliding_window"]
        return length

    logits = []
    for row in tokens:
        x = t["model.embed_tokens.weight"][row]
        for i in range(L):
            name = f"model.layers.{i}"
            y = norm(x, t[f"{name}.input_layernorm.weight"])
            q, k, v = (linear(y, f"{name}.self_attn.{p}_proj") for p in "qkv")
            distance = np.arange(length)[:, None] - np.arange(length)[None]
            seen = (distance >= 0) & (distance < window(i))
            heads = []
            for n in range(N):
                g = n // (N // K)
                qn, kg, vg = q[:, n * H : (n + 1) * H], k[:, g * H : (g + 1) * H], v[:, g * H : (g + 1) * H]
                if kind == "qwen3":
                    qn = norm(qn, t[f"{name}.self_attn.q_norm.weight"])
                    kg = norm(kg, t[f"{name}.self_attn.k_norm.weight"])
                scores = np.where(seen, rotate(qn) @ rotate(kg).T / math.sqrt(H), -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ vg)
            x = x + linear(np.concatenate(heads, -1), f"{name}.self_attn.o_proj")
            y = norm(x, t[f"{name}.post_attention_layernorm.weight"])
            gate = linear(y, f"{name}.mlp.gate_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        x = norm(x, t["model.norm.weight"])
        logits.append(x @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T)
    return np.stack(logits)


def run(config, params, tokens):
    functions = abstract_model(config)
    chex.assert_trees_all_equal_shapes_and_dtypes(dict(params), functions.params)
    return np.asarray(jax.jit(lambda p, t: functions.merge(p)(t))(params, tokens))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "qwen2, windows", "qwen3") else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_logits_with_and_without_pseudo_heads_and_back(name, tmp_path):
    config = CONFIGS[name]
    tensors = checkpoint(tmp_path / "theirs", config)
    ours, params = read_huggingface(tmp_path / "theirs")
    expected = expected_logits(config, tensors, TOKENS)
    assert np.abs(expected).max() > 1
    plain = run(ours, params, TOKENS)
    np.testing.assert_allclose(plain, expected, atol=1e-4)

    if name != "qwen2, windows":
        mixed, grown = with_pseudo_heads(ours, params, 4, collapse="across_heads" if name == "qwen3" else "per_head")
        assert mixed.layer_kinds == ("iha",) * L
    else:
        mixed, grown = with_pseudo_heads(ours, params, 4, layers=(True, False, False))
        assert mixed.layer_kinds == ("iha", "local", "local")
    np.testing.assert_allclose(run(mixed, grown, TOKENS), plain, atol=1e-4)

    # Back: the same tensors under the same names, and a config that says the same.
    write_huggingface(tmp_path / "back", ours, params)
    back = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    chex.assert_trees_all_equal(back, tensors)
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert from_huggingface(described, "float32") == ours
    # With pseudo-heads, in several files.
    write_huggingface(tmp_path / "mixed", mixed, grown, shard_bytes=10_000)
    assert len(list((tmp_path / "mixed").glob("*.safetensors"))) > 2
    again, read = read_huggingface(tmp_path / "mixed")
    assert again == mixed.resolve()
    chex.assert_trees_all_equal(read, grown)


@pytest.mark.parametrize("collapse", ["per_head", pytest.param("across_heads", marks=pytest.mark.slow)])
def test_added_pseudo_heads_come_alive(tmp_path, collapse):
    import optax

    checkpoint(tmp_path / "theirs", CONFIGS["llama"])
    config, params = with_pseudo_heads(*read_huggingface(tmp_path / "theirs"), 4, collapse=collapse)
    functions = ModelFunctions(Transformer(config, rngs=jax.random.key(0)))
    before = {path: jnp.asarray(x) for path, x in params.items()}
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = functions.merge(params)(TOKENS[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    after, state = before, optimizer.init(before)
    losses = []
    for _ in range(20):
        after, state, value = step(after, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    for path in before:
        if "mixing" in path or "collapse" in path:
            moved = np.asarray(after[path] - before[path])
            assert np.all(np.abs(moved).max(axis=tuple(range(moved.ndim - 1))) > 1e-4), path  # every p has moved
            assert np.ptp(moved, axis=-1).max() > 1e-4, path  # and they have moved apart


def test_commands(tmp_path, capsys):
    tensors = checkpoint(tmp_path / "theirs", {**CONFIGS["qwen2"], "vocab_size": V})
    run_directory = tmp_path / "run"
    assert main(["from-hf", str(tmp_path / "theirs"), str(run_directory), "--pseudo-heads", "3"]) == 0
    assert "'bytes'" in capsys.readouterr().out
    trained = open_trained(run_directory)
    assert trained.config.model.layer_kinds == ("iha",) * L
    logits = run(trained.config.model, trained.params, TOKENS)
    np.testing.assert_allclose(logits, expected_logits(CONFIGS["qwen2"], tensors, TOKENS), atol=1e-4)
    [[completion]] = Generator.of(trained).complete([TOKENS[0][:5]], Sampling(max_new_tokens=4))
    assert completion.ids[0] == logits[0, 4].argmax()

    assert main(["to-hf", str(run_directory), str(tmp_path / "back")]) == 0
    back = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    chex.assert_trees_all_equal({name: back[name] for name in tensors}, tensors)
    assert "Interleaved Head Attention" in (tmp_path / "back" / "README.md").read_text()
    with pytest.raises(SystemExit, match="is not empty"):
        main(["to-hf", str(run_directory), str(tmp_path / "back")])
    with pytest.raises(SystemExit, match="is not empty"):
        main(["from-hf", str(tmp_path / "theirs"), str(run_directory)])


def test_bfloat16_survives_exactly(tmp_path):
    config, params = read_huggingface_of(tmp_path, {**CONFIGS["llama"], "torch_dtype": "bfloat16"})
    assert config.param_dtype == config.dtype == "bfloat16"
    write_huggingface(tmp_path / "back", config, params)
    again, read = read_huggingface(tmp_path / "back")
    assert again == config.resolve()
    chex.assert_trees_all_equal(read, params)
    assert all(x.dtype == jnp.bfloat16 for x in read.values())


def read_huggingface_of(tmp_path, config):
    checkpoint(tmp_path / "theirs", config)
    return read_huggingface(tmp_path / "theirs")


def test_yarn_of_both_spellings():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}
    old = from_huggingface({**CONFIGS["qwen2"], "rope_scaling": {"type": "yarn", **yarn}}, "float32")
    new = from_huggingface(
        {**CONFIGS["qwen2"], "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **yarn}}, "float32"
    )
    assert old == new
    assert old.rope.scaling == YarnScaling(factor=4.0, original_max_position=32, beta_fast=16.0)
    assert from_huggingface(to_huggingface(old), "float32") == old
    expected = Llama3Scaling(4.0, 1.0, 4.0, 16)
    assert from_huggingface(CONFIGS["llama"], "float32").rope.scaling == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of .*'llama'.*, got 'gpt2'"),
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of .*, got 'quick_gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling must be one of .*, got 'longrope'"),
        ({"torch_dtype": "float8"}, "dtype must be float32, bfloat16 or float16, got 'float8'"),
        (
            {"intermediate_size": F + 1},
            r"mlp.down_proj.weight must have shape \(24, 41\), got \(24, 40\)",
        ),
        ({"num_hidden_layers": L + 1}, "9 are missing, model.layers.3.input_layernorm.weight first"),
        ({"num_hidden_layers": L - 1}, "9 are unknown, model.layers.2.input_layernorm.weight first"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, change, message):
    checkpoint(tmp_path / "theirs", CONFIGS["llama"])
    config = {**CONFIGS["llama"], **change}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_huggingface(tmp_path / "theirs")


def test_damaged_and_missing_files(tmp_path):
    checkpoint(tmp_path / "theirs", CONFIGS["llama"])
    weights = tmp_path / "theirs" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        read_huggingface(tmp_path / "theirs")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="must have one"):
        read_huggingface(tmp_path / "theirs")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names '../elsewhere.safetensors'"):
        read_huggingface(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="isn't JSON"):
        read_huggingface(tmp_path / "theirs")


def test_models_that_have_no_counterpart_there():
    config = from_huggingface(CONFIGS["llama"], "float32")
    for change in ({"norm": "layer"}, {"mlp": "gelu"}, {"logits_soft_cap": 30.0}, {"pattern": ("talking_heads",)}):
        [name] = change
        with pytest.raises(ValueError, match=f"has {name}="):
            to_huggingface(dataclasses.replace(config, **change))
