"""Wrong calls, configurations and files: the message says what was given, what is allowed, what to do."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import iha_jax
from iha_jax import Rope
from iha_jax.convert.configs import from_huggingface
from iha_jax.convert.huggingface import read_huggingface
from iha_jax.data import DataConfig, SourceConfig, load_tokenizer
from iha_jax.data.chat import load_template
from iha_jax.data.rows import Manifest
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import train_tokenizer
from iha_jax.evaluation.problems import load_benchmark
from iha_jax.evaluation.sampling import Sampling
from iha_jax.models import IHAConfig, ModelConfig, RopeConfig, Transformer
from iha_jax.nn import SimplicialAttention
from iha_jax.nn import linen as iha_linen
from iha_jax.nn.init import initial_mixing
from iha_jax.ops.rope import LinearScaling, YarnScaling
from iha_jax.sharding import Rules
from iha_jax.training import cli
from iha_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
from iha_jax.training.serialization import from_json, to_json
from iha_jax.training.trained import open_trained

MODEL = {"vocab_size": 258, "max_length": 64, "num_layers": 2, "model_dim": 32, "num_heads": 4}
ROOT = pathlib.Path(__file__).parents[1]


def layer(kind=iha_jax.InterleavedHeadAttention, *, num_heads=4, in_features=32, **options):
    if kind is iha_jax.InterleavedHeadAttention:
        options = {"num_pseudo_heads": 2, **options}
    return kind(num_heads, in_features, rngs=nnx.Rngs(0), **options)


def x(*shape, dtype=jnp.float32):
    return jnp.ones(shape or (2, 8, 32), dtype)


def model(**options):
    return ModelConfig(**{**MODEL, **options})


def config(**options):
    return TrainConfig(**{"name": "x", "steps": 100, "batch_size": 4, "model": model(),
                          "data": DataConfig(sequence_length=64), **options})  # fmt: skip


def documents(path, **options):
    return open_documents(SourceConfig(kind="files", path=str(path), **options))


def file(directory, name, content):
    path = directory / name
    path.write_text(content)
    return path


# name: (what is done, given a directory of its own; the error; what its message has)
CASES = {
    # Layers
    "no head": (lambda d: layer(num_heads=0), ValueError, ["num_heads", ">= 1", "0"]),
    "heads do not divide the width": (
        lambda d: layer(num_heads=5),
        ValueError,
        ["in_features=32", "num_heads=5", "head_dim"],
    ),
    "key heads do not divide": (lambda d: layer(num_kv_heads=3), ValueError, ["num_kv_heads=3", "num_heads=4"]),
    "no pseudo-head": (lambda d: layer(num_pseudo_heads=0), ValueError, ["num_pseudo_heads", "0"]),
    "no window": (lambda d: layer(window=0), ValueError, ["window", "0", "None"]),
    "half a window": (lambda d: layer(window=2.5), ValueError, ["window", "2.5"]),
    "causality by another name": (lambda d: layer(causal=True), ValueError, ['"virtual"', '"token"', "None", "True"]),
    "causality of plain attention": (
        lambda d: layer(iha_jax.MultiHeadAttention, causal="token"),
        ValueError,
        ["True or False", "'token'"],
    ),
    "another collapse": (
        lambda d: layer(collapse="mean"),
        ValueError,
        ["collapse", "per_head", "across_heads", "'mean'"],
    ),
    "another start": (lambda d: layer(mixing_init="identity"), ValueError, ["live", "exact", "'identity'"]),
    "an exact start by virtual position": (
        lambda d: layer(mixing_init="exact"),
        ValueError,
        ["exact", 'positions="token"', "live"],
    ),
    "rope by name": (lambda d: layer(rope="rope"), ValueError, ["iha_jax.Rope", "None", "str"]),
    "an odd head dimension": (lambda d: layer(head_dim=7), ValueError, ["even", "head_dim=7"]),
    "a soft cap of 0": (lambda d: layer(logits_soft_cap=0.0), ValueError, ["logits_soft_cap", "> 0", "0"]),
    "an input without batch": (lambda d: layer()(x(8, 32)), ValueError, ["batch, tokens", "(8, 32)"]),
    "an input of another width": (lambda d: layer()(x(2, 8, 16)), ValueError, ["32", "(2, 8, 16)"]),
    "segment ids of another shape": (
        lambda d: layer()(x(), segment_ids=jnp.ones((2, 7), int)),
        ValueError,
        ["segment_ids", "(2, 7)", "8"],
    ),
    "float segment ids": (
        lambda d: layer()(x(), segment_ids=jnp.ones((2, 8))),
        ValueError,
        ["segment_ids", "float32", "integer"],
    ),
    "a context for a causal layer": (lambda d: layer()(x(), context=x()), ValueError, ["causal=None", "virtual"]),
    "another implementation": (
        lambda d: layer(implementation="flash")(x()),
        ValueError,
        ["implementation", "blockwise", "'flash'"],
    ),
    "a cache of another layer": (
        lambda d: layer().decode(x(2, 1, 32), layer(num_kv_heads=2).init_cache(2, 8)),
        ValueError,
        ["cache", "init_cache"],
    ),
    "decoding both ways": (
        lambda d: layer(causal=None).decode(x(2, 1, 32), layer().init_cache(2, 8)),
        ValueError,
        ["causal", "None"],
    ),
    "rngs in Linen": (
        lambda d: iha_linen.InterleavedHeadAttention(4, 32, num_pseudo_heads=2, rngs=nnx.Rngs(0)),
        ValueError,
        ["rngs", "init"],
    ),
    "simplicial with rope": (lambda d: layer(SimplicialAttention, rope=Rope()), ValueError, ["rope", "None"]),
    "tokens that are numbers with a point": (
        lambda d: Transformer(model(), rngs=nnx.Rngs(0))(jnp.ones((1, 4))),
        ValueError,
        ["integers", "float32"],
    ),
    "mixing of another scheme": (
        lambda d: initial_mixing(jax.random.key(0), 4, 2, scheme="random"),
        (ValueError, TypeError),
        ["scheme"],
    ),
    # RoPE
    "rope by other positions": (lambda d: Rope(positions="absolute"), ValueError, ["virtual", "token", "'absolute'"]),
    "rope of theta 0": (lambda d: Rope(theta=0.0), ValueError, ["theta", "0"]),
    "linear scaling below one": (lambda d: Rope(scaling=LinearScaling(factor=0.0)), ValueError, ["factor", "0"]),
    "YaRN without a length": (
        lambda d: YarnScaling(factor=2.0, original_max_position=0),
        ValueError,
        ["original_max_position", "0"],
    ),
    # Configurations
    "a model without layers": (lambda d: model(num_layers=0), ValueError, ["num_layers", ">= 1", "0"]),
    "a width that heads do not divide": (
        lambda d: model(num_heads=5),
        ValueError,
        ["model_dim=32", "num_heads=5", "head_dim"],
    ),
    "another kind of layer": (lambda d: model(pattern=("ihaa",)), ValueError, ["pattern", "iha", "mha", "'ihaa'"]),
    "no kind of layer": (lambda d: model(pattern=()), ValueError, ["pattern", "()"]),
    "another dtype": (lambda d: model(dtype="fp8"), ValueError, ["dtype", "bfloat16", "'fp8'"]),
    "all of it dropped": (lambda d: model(dropout=1.0), ValueError, ["dropout", "[0, 1)", "1.0"]),
    "iha's other collapse": (lambda d: IHAConfig(collapse="sum"), ValueError, ["iha.collapse", "'sum'"]),
    "rope's theta": (lambda d: RopeConfig(theta=-1.0), ValueError, ["theta", "-1"]),
    "micro-batches do not divide": (
        lambda d: config(micro_batches=3),
        ValueError,
        ["micro_batches", "3", "batch_size 4"],
    ),
    "rows longer than the model's": (
        lambda d: config(data=DataConfig(sequence_length=65)),
        ValueError,
        ["sequence_length", "max_length", "65", "64"],
    ),
    "a warm-up longer than the run": (
        lambda d: config(optimizer=OptimizerConfig(warmup_steps=100)),
        ValueError,
        ["warmup_steps", "100"],
    ),
    "a bucket's address": (lambda d: config(directory="gs://bucket/runs"), ValueError, ["gs://bucket/runs", "mount"]),
    "two open axes of a mesh": (lambda d: MeshConfig(data=-1, fsdp=-1), ValueError, ["mesh.data", "mesh.fsdp", "-1"]),
    "two logical axes on one of the mesh": (
        lambda d: Rules(embed=("tensor",)).resolve(("embed", "heads"), ("tensor",)),
        ValueError,
        ["'embed'", "'heads'", "'tensor'"],
    ),
    "a mesh axis without its tuple": (
        lambda d: Rules(embed="tensor"),
        ValueError,
        ["embed", '("tensor",)', "'tensor'"],
    ),
    "a temperature below 0": (lambda d: Sampling(temperature=-1.0), ValueError, ["temperature", "-1"]),
    "top-p of 0": (lambda d: Sampling(top_p=0.0), ValueError, ["top_p", "0"]),
    "an unknown field of a JSON configuration": (
        lambda d: from_json(TrainConfig, '{"stepz": 3}'),
        ValueError,
        ["stepz", "did you mean 'steps'"],
    ),
    "a text for a number": (
        lambda d: from_json(TrainConfig, '{"steps": "many"}'),
        ValueError,
        ["TrainConfig.steps", "int", "'many'"],
    ),
    # Files
    "no configuration": (
        lambda d: cli.load(str(d / "no.py")),
        FileNotFoundError,
        ["no.py", ".json", "run's directory"],
    ),
    "a file without CONFIG": (
        lambda d: cli.load(str(file(d, "c.py", "X = 1\n"))),
        ValueError,
        ["c.py", "CONFIG", "TrainConfig"],
    ),
    "no run": (lambda d: open_trained(d), FileNotFoundError, ["no config", str(pathlib.PurePath("run's directory"))]),
    "no data": (lambda d: documents(d / "*.txt"), FileNotFoundError, ["*.txt", "glob"]),
    "empty data": (lambda d: documents(file(d, "a.jsonl", "")), ValueError, ["a.jsonl", "no document"]),
    "Parquet that isn't": (lambda d: documents(file(d, "a.parquet", "PAR")), ValueError, ["a.parquet", "Parquet"]),
    "conversations in a text": (
        lambda d: documents(file(d, "a.txt", "hello"), format="chat"),
        ValueError,
        [".jsonl", "a.txt"],
    ),
    "rows not yet prepared": (lambda d: Manifest.read(d), FileNotFoundError, ["manifest.json", "iha_jax.data.prepare"]),
    "an unknown tokenizer": (
        lambda d: load_tokenizer(str(d / "t.json")),
        ValueError,
        ["t.json", "bytes", "SentencePiece"],
    ),
    "a tokenizer too small for bytes": (lambda d: train_tokenizer([""], 100, d / "t.json"), ValueError, ["258", "100"]),
    "an unknown template": (lambda d: load_template("alpaca"), ValueError, ["alpaca", "chatml", "Jinja"]),
    "a template that isn't": (
        lambda d: load_template(str(file(d, "t.jinja", "{% if %}"))),
        ValueError,
        ["t.jinja", "Jinja"],
    ),
    "no benchmark": (lambda d: load_benchmark("gsm8k", d / "g.jsonl"), FileNotFoundError, ["g.jsonl", "JSON lines"]),
    "an unknown benchmark": (lambda d: load_benchmark("mmlu", d / "g.jsonl"), ValueError, ["mmlu", "gsm8k"]),
    "a benchmark's line": (
        lambda d: load_benchmark("gsm8k", file(d, "g.jsonl", '{"question": "?"}')),
        ValueError,
        ["g.jsonl, line 1", "answer"],
    ),
    "no checkpoint of others": (lambda d: read_huggingface(d), FileNotFoundError, ["config.json"]),
    "a model we do not have": (
        lambda d: from_huggingface({"model_type": "gpt2"}, "float32"),
        ValueError,
        ["llama", "qwen3", "'gpt2'"],
    ),
    "a configuration cut short": (
        lambda d: read_huggingface(file(d, "config.json", json.dumps({"model_type": "llama"})).parent),
        ValueError,
        ["config.json", "num_hidden_layers"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message_says_what_was_given_and_what_is_allowed(name, tmp_path):
    do, kind, essentials = CASES[name]
    with pytest.raises(kind) as caught:
        do(tmp_path)
    message = str(caught.value)
    assert not [part for part in essentials if part not in message], message


def test_a_wrong_call_leaves_a_run_as_it_was(tmp_path):
    wrong = to_json(config(optimizer=OptimizerConfig(warmup_steps=1))).replace('"steps": 100', '"steps": -1')
    path = file(tmp_path, "config.json", wrong)
    with pytest.raises(ValueError, match="steps must be at least 1, got -1"):
        cli.load(str(tmp_path))
    assert path.read_text() == wrong
