"""Completions, against the model's own forward pass and against a model whose text is known."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.data.tokenizers import ByteTokenizer
from iha_jax.evaluation.engine import Engine, bucket
from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.sampling import Sampling, choose, restrict
from iha_jax.generate import main
from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer
from iha_jax.training.state import ModelFunctions
from tests.evaluation.runs import make_run

SMALL = ModelConfig(
    vocab_size=258,
    max_length=96,
    num_layers=2,
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=32,
    tied_embeddings=False,
)
MODELS = {
    "paper": dataclasses.replace(
        SMALL,
        num_layers=4,
        num_kv_heads=None,
        pattern=("iha", "mha"),
        iha=IHAConfig(num_pseudo_heads=3, window=5),
        scan_layers=True,
    ),
    "global, grouped queries": dataclasses.replace(SMALL, pattern=("iha",), iha=IHAConfig(2, window=None)),
    "token, across heads": dataclasses.replace(
        SMALL,
        pattern=("iha", "local"),
        iha=IHAConfig(3, window=4, causal="token", rope_positions="token", collapse="across_heads"),
        local=MHAConfig(window=6),
    ),
}
PROMPTS = ["a", "some words,", "a longer prompt that is read in several chunks", "two"]


@functools.cache
def made(name):
    functions = ModelFunctions(Transformer(MODELS[name], rngs=nnx.Rngs(3)))
    return functions, functions.params


@functools.cache
def compiled(name):
    functions, params = made(name)
    return jax.jit(functions.merge(params).__call__)


def forward(name, ids):
    """Logits of one row, by the model's forward pass; one length for all, so that it is compiled once."""
    return np.asarray(compiled(name)(np.pad(ids, (0, 80 - len(ids)))[None])[0, : len(ids)], np.float64)


def generator(name, **options):
    functions, params = made(name)
    return Generator(functions, params, ByteTokenizer(), **{"max_length": 96, "chunk": 16, "block": 4, **options})


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_argmax_of_the_forward_pass_everywhere(name):
    ours = generator(name)
    found = ours.complete(PROMPTS, Sampling(max_new_tokens=13))
    assert len({completion.ids for [completion] in found}) > 1
    for prompt, [completion] in zip(PROMPTS, found, strict=True):
        start = len(ours.ids(prompt))
        ids = np.concatenate([ours.ids(prompt), np.asarray(completion.ids, np.int32)])
        likeliest = forward(name, ids).argmax(-1)
        np.testing.assert_array_equal(likeliest[start - 1 : len(ids) - 1], ids[start:])
        if completion.finish == "end":
            assert likeliest[len(ids) - 1] == 257
        else:
            assert completion.finish == "length"
            assert len(completion.ids) == 13


def test_scores_are_log_probabilities_of_the_forward_pass():
    functions, params = made("paper")
    rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in (PROMPTS[2], "short", "ab")]
    log_probabilities, likeliest = Engine(functions, params, None, chunk=16).score(rows)
    assert log_probabilities.shape == likeliest.shape == (3, len(rows[0]) - 1)
    for row, ours, best in zip(rows, log_probabilities, likeliest, strict=True):
        logits = forward("paper", row)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        n = len(row) - 1
        np.testing.assert_allclose(ours[:n], expected[np.arange(n), row[1:]], atol=2e-5)
        np.testing.assert_array_equal(best[:n], logits[:n].argmax(-1) == row[1:])
        assert not ours[n:].any()


def test_draws_depend_on_seed_prompt_and_sample_only():
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=5)
    together = generator("paper").complete(PROMPTS, sampling, num_samples=3)
    apart = generator("paper", batch_size=2, block=16, chunk=32).complete(PROMPTS, sampling, num_samples=3)
    assert together == apart
    for samples in together:
        assert len({completion.ids for completion in samples}) == 3
    other = generator("paper").complete(PROMPTS, dataclasses.replace(sampling, seed=6), num_samples=3)
    assert other != together


def test_the_limit_of_each_prompt_and_streamed_texts():
    told = {}

    def on_text(prompt, sample, text):
        told[prompt, sample] = told.get((prompt, sample), "") + text

    found = generator("global, grouped queries").complete(
        PROMPTS, Sampling(temperature=1.0), 2, on_text, max_new_tokens=[1, 2, 3, 20]
    )
    for i, limit in enumerate((1, 2, 3, 20)):
        for sample, completion in enumerate(found[i]):
            assert len(completion.ids) == limit or completion.finish == "end"
            assert told.get((i, sample), "") == completion.text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptCache:
    lengths: jax.Array

    def take_rows(self, rows):
        return ScriptCache(self.lengths[rows])


class Script:
    """A model that writes a given text after a prompt of one token, whatever it is told."""

    def __init__(self, text):
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        self.ids = np.concatenate([ids, [257]])

    def merge(self, params):
        return self

    def init_cache(self, batch, max_length):
        return ScriptCache(jnp.zeros((batch,), jnp.int32))

    def decode(self, tokens, cache, segment_ids, logits_at=None):
        lengths = cache.lengths + segment_ids.sum(axis=1, dtype=jnp.int32)
        at = jnp.clip(lengths - 1, 0, len(self.ids) - 1)
        return jax.nn.one_hot(jnp.asarray(self.ids)[at], 258)[:, None], ScriptCache(lengths)


def scripted(text, **sampling):
    told = []
    ours = Generator(Script(text), {}, ByteTokenizer(), max_length=100, block=3)
    [[completion]] = ours.complete(
        [[256]], Sampling(max_new_tokens=60, **sampling), on_text=lambda prompt, sample, text: told.append(text)
    )
    assert "".join(told) == completion.text
    return completion, told


def test_the_end_of_a_document():
    completion, _ = scripted("all of it")
    assert (completion.text, completion.finish) == ("all of it", "end")
    assert bytes(completion.ids) == b"all of it"


@pytest.mark.parametrize("stop", [("STOP",), ("xyz", "STOP", "OPq")])
def test_a_stop_text_is_left_out_and_never_told(stop):
    completion, told = scripted("one ST two STOP three", stop=stop)
    assert (completion.text, completion.finish) == ("one ST two ", "stop")
    assert bytes(completion.ids) == b"one ST two STOP"
    assert len(told) > 2


def test_the_earliest_of_the_stop_texts_counts():
    assert scripted("abcdefghij", stop=("gh", "efghi", "ij"))[0].text == "abcd"


def test_characters_of_several_bytes_are_told_whole():
    completion, told = scripted("ab€😀é!", stop=("??",))
    assert completion.text == "ab€😀é!"
    assert not any("\ufffd" in text for text in told)


def test_the_longest_length_is_a_limit():
    assert scripted("x" * 70)[0].finish == "length"


def test_what_may_be_drawn():
    logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.05, 0.3, 0.15], [0.2, 0.2, 0.2, 0.2, 0.2]]))
    np.testing.assert_array_equal(
        np.isfinite(restrict(logits, 2, None)), [[False, True, False, True, False], [True] * 5]
    )
    np.testing.assert_array_equal(np.isfinite(restrict(logits, None, 0.71))[0], [False, True, False, True, True])
    np.testing.assert_array_equal(np.isfinite(restrict(logits, None, 0.69))[0], [False, True, False, True, False])
    np.testing.assert_array_equal(np.isfinite(restrict(logits, None, 1e-6))[0], [False, True, False, False, False])
    # After the two likeliest are kept, 0.4 of 0.7 is more than half.
    np.testing.assert_array_equal(np.isfinite(restrict(logits, 2, 0.5))[0], [False, True, False, False, False])


def test_draws_follow_the_tempered_probabilities():
    logits = jnp.asarray([0.0, 1.0, 2.0, -1.0])
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(choose(jnp.tile(logits, (20_000, 1)), keys, 2.0, None, None))
    weights = np.exp(np.asarray(logits, np.float64) / 2)
    np.testing.assert_allclose(np.bincount(drawn) / 20_000, weights / weights.sum(), atol=0.012)


@pytest.mark.parametrize(("n", "steps", "expected"), [(1, 1, 16), (17, 1, 32), (33, 4, 40), (40, 4, 40), (65, 4, 80)])
def test_buckets(n, steps, expected):
    assert bucket(n, steps=steps) == expected


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["x" * 90], {}, r"prompt 0 has 91 tokens and is to get up to 128 more, .* max_length=96"),
        ([[]], {}, "at least one token"),
        (["x"], {"num_samples": 0}, "num_samples must be at least 1, got 0"),
    ],
)
def test_wrong_prompts(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generator("paper").complete(prompts, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"stop": ("",)},
        {"stop": "text"},
    ],
)
def test_wrong_sampling(options):
    [name] = options
    with pytest.raises(ValueError, match=name):
        Sampling(**options)


def test_the_command(tmp_path, capsys):
    run = str(make_run(tmp_path / "run", 64))
    assert main([run, "--prompt", "one", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("one")
    arguments = ["--prompt", "one", "--prompt", "two", "--samples", "2", "--max-new-tokens", "5", "--json"]
    assert main([run, *arguments, "--temperature", "0"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert lines[0]["text"] == lines[1]["text"] == alone[len("one") : -1]
    (tmp_path / "prompt.txt").write_text("three")
    assert main([run, "--prompt-file", str(tmp_path / "prompt.txt"), "--samples", "2", "--max-new-tokens", "5"]) == 0
    assert "--- 'three', sample 1" in capsys.readouterr().out
    for arguments, message in (
        ([run], "there is no prompt"),
        ([run, "--prompt", "x" * 99], "max_length=64"),
        ([run, "--prompt", "x", "--top-p", "2"], "top_p must be above 0"),
        ([str(tmp_path / "nowhere"), "--prompt", "x"], "no config at"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
