"""A decoder's configuration as Hugging Face writes it, and as we do.

Read are the keys of ``config.json`` that change what the model computes, in the spelling of Transformers 4
(``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``). What we can't express is refused, never ignored.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from iha_jax.models import MHAConfig, ModelConfig, RopeConfig
from iha_jax.ops.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MOST_LAYERS = 10_000
"""Beyond it a file is damaged: what it describes is not laid out."""
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "relu": "reglu"}


def from_huggingface(config: Mapping[str, Any], dtype: str) -> ModelConfig:
    """Our configuration of a Llama-, Mistral-, Qwen 2- or Qwen 3-style model.

    Args:
      config: what ``config.json`` holds.
      dtype: of parameters and computation.

    Raises:
      ValueError: another kind of model, or an option that has no counterpart here.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {list(MODEL_TYPES)}, got {kind!r}")
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {list(_ACTIVATIONS)}, got {activation!r}")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1, got {config['partial_rotary_factor']}")
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    if not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be from 1 to {_MOST_LAYERS}, got {layers}")
    window, local = _windows(config, kind, layers)
    attention_bias = kind == "qwen2" or bool(config.get("attention_bias", False))
    places = {"qkv": attention_bias, "out": attention_bias and kind != "qwen2", "mlp": config.get("mlp_bias", False)}
    return ModelConfig(
        vocab_size=int(config["vocab_size"]),
        max_length=int(config.get("max_position_embeddings", 2048)),
        num_layers=layers,
        model_dim=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or int(config["hidden_size"]) // heads,
        mlp_dim=int(config["intermediate_size"]),
        mlp=_ACTIVATIONS[activation],  # pyright: ignore[reportArgumentType]
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        pattern=_shortest(tuple("local" if is_local else "mha" for is_local in local)),
        local=MHAConfig(window=window or 512),
        rope=_rope(config),
        normalize_qk=kind == "qwen3",
        biases=tuple(place for place, has in places.items() if has),  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        param_dtype=dtype,  # pyright: ignore[reportArgumentType]
    )


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """What ``config.json`` says of one of our models, as far as Transformers has a name for it.

    A model with pseudo-heads is described as the one that it would be without: its ``config.json`` needs ours beside
    it, which `write_huggingface` adds.

    Raises:
      ValueError: an option that Hugging Face's models of these kinds don't have.
    """
    gates = {mlp: name for name, mlp in reversed(_ACTIVATIONS.items())}
    unknown = {
        "mlp": config.mlp not in gates,
        "norm": config.norm != "rms",
        "rope": config.rope is None,
        "logits_soft_cap": config.logits_soft_cap is not None,
        "pattern": not {*config.layer_kinds} <= {"iha", "mha", "local"},
        "mha": config.uses("mha") and config.mha.window is not None,
        "local": config.uses("local") and config.local.window is None,
    }
    if name := next((name for name, wrong in unknown.items() if wrong), None):
        raise ValueError(
            f"no Llama-, Mistral- or Qwen-style model has {name}={getattr(config, name)!r}: it can't be written as one"
        )
    places = {place for place in ("qkv", "out", "mlp") if config.has_bias(place)}
    windows = [config.window(kind) for kind in config.layer_kinds]
    sliding = any(window is not None for window in windows)
    if places == {"qkv"} and not config.normalize_qk:
        kind = "qwen2"
    elif config.normalize_qk and places in (set(), {"qkv", "out"}):
        kind = "qwen3"
    elif not config.normalize_qk and not sliding and places in (set(), {"qkv", "out"}, {"mlp"}, {"qkv", "out", "mlp"}):
        kind = "llama"
    elif not config.normalize_qk and all(w is not None for w in windows) and not places:
        kind = "mistral"
    elif not config.normalize_qk and not places:
        raise ValueError("windows in some layers only, without normalize_qk or biases: no such Hugging Face model")
    else:
        raise ValueError(
            f"no Hugging Face model has biases in {sorted(places)} with normalize_qk={config.normalize_qk} and "
            f"windows {windows}"
        )
    assert config.rope is not None
    architectures = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    rope, scaling = _rope_parameters(config.rope, config.max_length)
    described: dict[str, Any] = {
        "architectures": [f"{architectures[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim_per_head,
        "intermediate_size": config.hidden_dim,
        "hidden_act": gates[config.mlp],
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        # Both spellings: Transformers 4 reads the first two, 5 the third.
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }
    if kind in ("llama", "qwen3"):
        described["attention_bias"] = "qkv" in places
    if kind == "llama":
        described["mlp_bias"] = "mlp" in places
    if sliding:
        described["sliding_window"] = next(w for w in windows if w is not None)
        described["use_sliding_window"] = True
        described["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    elif kind == "mistral" or kind.startswith("qwen"):
        described["sliding_window"] = None
    return described


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that ``config.json`` names; float32 where it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {name!r}")
    return jnp.dtype(name).name


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, list[bool]]:
    """The window, and for every layer whether it has it."""
    window = config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if kind == "llama" or window is None:
        return None, [False] * layers
    if types := config.get("layer_types"):
        if len(types) != layers or not {*types} <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"layer_types must name full_attention or sliding_attention for each of {layers} layers, got {types}"
            )
        return int(window), [name == "sliding_attention" for name in types]
    first = int(config.get("max_window_layers", 28)) if kind.startswith("qwen") else 0
    return int(window), [layer >= first for layer in range(layers)]


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or parameters)
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return RopeConfig(theta=theta, scaling=_scaling(scaling, int(config.get("max_position_embeddings", 2048))))


def _scaling(given: Mapping[str, Any], length: int) -> RopeScaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(given["factor"]))
    original = int(given.get("original_max_position_embeddings") or length)
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_max_position=original,
        )
    if kind == "yarn":
        if not given.get("truncate", True):
            raise ValueError("YaRN with truncate=false is not supported")
        factor, attention = float(given["factor"]), given.get("attention_factor")
        if attention is None and given.get("mscale") and given.get("mscale_all_dim"):
            attention = _mscale(factor, given["mscale"]) / _mscale(factor, given["mscale_all_dim"])
        return YarnScaling(
            factor=factor,
            original_max_position=original,
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            attention_factor=None if attention is None else float(attention),
        )
    raise ValueError(f"rope scaling must be one of default, linear, llama3, yarn, got {kind!r}")


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_parameters(rope: RopeConfig, length: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """In the spelling of Transformers 5, and the scaling in that of 4."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}, None
    if isinstance(scaling, LinearScaling):
        found: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        found = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    else:
        found = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_position,
        }
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
    return {**found, "rope_theta": rope.theta}, found


def _shortest(pattern: tuple[str, ...]) -> tuple[Any, ...]:
    """The shortest cycle that a pattern repeats."""
    n = len(pattern)
    return next(pattern[:p] for p in range(1, n + 1) if all(pattern[i] == pattern[i % p] for i in range(n)))
