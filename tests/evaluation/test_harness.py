"""The model in lm-evaluation-harness, on local tasks, against scores computed by hand."""

import json
import types

import jax
import numpy as np
import pytest
import yaml

from iha_jax.training.trained import open_trained
from tests.evaluation.data import data_file
from tests.evaluation.runs import make_run

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own

LENGTH = 48


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("harness") / "run", LENGTH)


@pytest.fixture(scope="module")
def model(run):
    from iha_jax.evaluation.harness import HarnessModel

    return HarnessModel(checkpoint=str(run), batch_size=3)


@pytest.fixture(scope="module")
def log_probabilities(run):
    """Ids → the log-probability of every next token, ``[n, 258]`` in float64, by the forward pass."""
    forward = jax.jit(open_trained(run).model.__call__)

    def of(ids):
        logits = np.asarray(forward(np.pad(np.asarray(ids), (0, LENGTH - len(ids)))[None])[0, : len(ids)], np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return of


def request(*args):
    return types.SimpleNamespace(args=args)


def score(log_probabilities, context, continuation):
    """By hand: the log-likelihood of bytes after bytes, and whether each was the likeliest."""
    ids = [256, *context.encode(), *continuation.encode()]
    table = log_probabilities(ids[:-1])
    places = range(len(ids) - len(continuation.encode()), len(ids))
    return sum(table[i - 1, ids[i]] for i in places), all(table[i - 1].argmax() == ids[i] for i in places)


def test_log_likelihoods(model, log_probabilities):
    pairs = [("a question", " yes"), ("another, longer question", " no, never"), ("x", "y")]
    for found, (context, continuation) in zip(model.loglikelihood([request(*p) for p in pairs]), pairs, strict=True):
        expected = score(log_probabilities, context, continuation)
        assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])
    # A space at the end belongs to the continuation, in the harness's convention.
    [(space, _)] = model.loglikelihood([request("ends in a space ", "z")])
    assert space == pytest.approx(score(log_probabilities, "ends in a space", " z")[0], abs=1e-4)
    [(empty, _)] = model.loglikelihood([request("", "abc")])
    assert empty == pytest.approx(score(log_probabilities, "", "abc")[0], abs=1e-4)


def test_what_is_likeliest_is_said_to_be(model, log_probabilities):
    ids = [256, *b"some"]
    for _ in range(3):
        ids.append(int(log_probabilities(ids)[-1].argmax()))
    [(_, greedy)] = model._loglikelihood_tokens([(None, ids[:5], ids[5:])])
    assert greedy
    [(_, greedy)] = model._loglikelihood_tokens([(None, ids[:5], [*ids[5:7], (ids[7] + 1) % 256])])
    assert not greedy


def test_long_contexts_lose_their_beginning_and_are_counted(model, log_probabilities):
    before = model.truncated
    text = "0123456789" * 6
    [(found, _)] = model.loglikelihood([request(text, "ab")])
    ids = [*text.encode(), *b"ab"][-(LENGTH + 1) :]
    table = log_probabilities(ids[:-1])
    assert found == pytest.approx(table[-2, ids[-2]] + table[-1, ids[-1]], abs=1e-4)
    model.generate_until([request(text, {"until": [], "max_gen_toks": 4})])
    assert model.truncated == before + 2
    with pytest.raises(ValueError, match="1 to max_length=48 tokens, got 60"):
        model.loglikelihood([request("a", text)])


def test_whole_texts(model, log_probabilities):
    short, long = "a short text", "0123456789" * 13
    found = model.loglikelihood_rolling([request(short), request(long), request("")])
    assert found[0] == pytest.approx(score(log_probabilities, "", short)[0], abs=1e-4)
    assert found[2] == 0
    # Windows as the harness defines them: the last one is whole too, and scores only what is new.
    ids = [256, *long.encode()]
    expected, done = 0.0, 1
    while done < len(ids):
        stop = min(done + LENGTH, len(ids))
        table = log_probabilities(ids[stop - 1 - LENGTH : stop - 1])
        expected += sum(table[i - (stop - LENGTH), ids[i]] for i in range(done, stop))
        done = stop
    assert found[1] == pytest.approx(expected, abs=1e-3)


def test_generation(model, log_probabilities):
    ids = [256, *b"go on"]
    expected = []
    while len(expected) < 6:
        expected.append(int(log_probabilities(ids)[-1].argmax()))
        ids.append(expected[-1])
    whole = bytes(i for i in expected if i < 256).decode(errors="replace")
    options = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    assert model.generate_until([request("go on", options)]) == [whole]
    stop = whole[2:4]
    [cut] = model.generate_until([request("go on", {"until": stop, "max_gen_toks": 6})])
    assert cut == whole[: whole.index(stop)]
    drawn = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    texts = model.generate_until([request("go on", drawn)] * 4)
    assert len(set(texts)) > 1  # repeats draw anew
    assert model.generate_until([request("go on", drawn)] * 4) == texts
    with pytest.raises(ValueError, match=r"generation options \['num_beams'\] are not supported"):
        model.generate_until([request("a", {"num_beams": 3})])


def test_conversations(model):
    history = [{"role": "user", "content": "2+2?"}]
    assert model.apply_chat_template(history) == "User: 2+2?\n\nAssistant: "
    history.append({"role": "assistant", "content": "It is"})
    assert model.apply_chat_template(history, add_generation_prompt=False) == "User: 2+2?\n\nAssistant: It is"
    assert model.chat_template(True) == "plain"
    assert "run-0" in model.tokenizer_name


def test_wrong_arguments(run):
    from iha_jax.evaluation.harness import HarnessModel

    with pytest.raises(ValueError, match=r"unknown model_args \['pretrained'\]: expected checkpoint"):
        HarnessModel(checkpoint=str(run), pretrained="x")


def task(folder, name, rows, **fields):
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(described))


def evaluate(model, folder, names, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options)[
        "results"
    ]


def test_local_tasks(model, log_probabilities, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    questions = [{"q": f"number {i}:", "choices": ["a", "bb", "c!"], "gold": i % 3} for i in range(6)]
    task(
        tmp_path,
        "choice",
        questions,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc"}],
    )
    texts = [{"text": "one small text"}, {"text": "and one more"}]
    task(
        tmp_path,
        "rolling",
        texts,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity"}],
    )
    answer = model.generate_until([request("number 1:", {"until": ["."], "max_gen_toks": 5})])[0]
    task(
        tmp_path,
        "writing",
        [{"q": "number 1:", "a": answer}, {"q": "number 2:", "a": "surely not this"}],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        generation_kwargs={"until": ["."], "max_gen_toks": 5},
        metric_list=[{"metric": "exact_match"}],
    )
    found = evaluate(model, tmp_path, ["choice", "rolling", "writing"])
    right = 0
    for question in questions:
        scores = [score(log_probabilities, question["q"], " " + choice)[0] for choice in question["choices"]]
        right += int(np.argmax(scores)) == question["gold"]
    assert found["choice"]["acc,none"] == pytest.approx(right / 6)
    total = sum(score(log_probabilities, "", row["text"])[0] for row in texts)
    size = sum(len(row["text"]) for row in texts)
    assert found["rolling"]["byte_perplexity,none"] == pytest.approx(np.exp(-total / size), rel=1e-4)
    assert found["writing"]["exact_match,none"] == 0.5


@pytest.mark.slow
def test_the_harness_own_gsm8k_on_a_local_file(run, tmp_path, monkeypatch, capsys):
    """Its prompt and scoring, by the command line."""
    import lm_eval

    from iha_jax.evaluation.harness import main

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    own = f"{lm_eval.__path__[0]}/tasks/gsm8k/gsm8k.yaml"
    data = str(data_file("gsm8k_test.jsonl"))
    described = {
        "include": own,
        "task": "gsm8k_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": data, "test": data}},
        "num_fewshot": 0,
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(described))
    monkeypatch.setattr("sys.argv", ["lm_eval"])
    arguments = ["--model", "iha_jax", "--model_args", f"checkpoint={run},batch_size=2", "--tasks", "gsm8k_local"]
    main([*arguments, "--include_path", str(tmp_path), "--limit", "2", "--output_path", str(tmp_path / "out")])
    assert "gsm8k_local" in capsys.readouterr().out
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["gsm8k_local"]["exact_match,strict-match"] == 0
