"""Conversations: schemas, templates, tokens and weights, and packed rows of them."""

import json

import numpy as np
import pytest

from iha_jax.data import ByteTokenizer, DataConfig, DataPipeline, SourceConfig
from iha_jax.data.chat import ChatEncoder, conversation_of, load_template
from iha_jax.data.sources import open_documents
from iha_jax.data.tokenizers import load_tokenizer, train_tokenizer

TURNS = [("system", "be brief"), ("user", "2+2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "yes, 4")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
RECORDS = {
    "openai": {"messages": MESSAGES},
    "parts": {"messages": [{"role": r, "content": [{"type": "text", "text": c}]} for r, c in TURNS]},
    "openthoughts": {
        "system": "be brief",
        "conversations": [{"from": role, "value": content} for role, content in TURNS[1:]],
    },
    "sharegpt": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": content} for role, content in TURNS
        ]
    },
    "list": MESSAGES,
}


@pytest.mark.parametrize("schema", RECORDS)
def test_schemas(schema):
    assert conversation_of(RECORDS[schema]) == MESSAGES


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "no messages or conversations"),
        ({"messages": "a"}, "no messages or conversations"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer of an assistant"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "unknown role 'nobody'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content isn't text"),
        ({"messages": ["a"]}, "a message isn't an object"),
        (None, "no messages or conversations"),
    ],
)
def test_records_that_are_no_conversations(record, reason):
    with pytest.raises(ValueError, match=reason):
        conversation_of(record)


WRITTEN = {
    "chatml": (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        "4<|im_end|>\n",
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n",
        "yes, 4<|im_end|>\n",
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "4<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nsure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "yes, 4<|eot_id|>",
    ),
    "plain": ("System: be brief\n\nUser: 2+2?\n\nAssistant: ", "4\n\n", "User: sure?\n\nAssistant: ", "yes, 4\n\n"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_named_templates(name):
    template = load_template(name)
    assert template.parts(MESSAGES) == list(zip(WRITTEN[name], (False, True, False, True), strict=True))
    assert template.render(MESSAGES[:2], True) == WRITTEN[name][0]


JINJA = """{% for m in messages %}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_jinja_template_writes_what_the_named_one_does(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(JINJA)
    assert load_template(str(tmp_path / "chat.jinja")).parts(MESSAGES) == load_template("chatml").parts(MESSAGES)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": JINJA, "bos_token": {"content": "<s>"}})
    )
    ours = load_template("tokenizer", str(tmp_path))
    assert ours.parts(MESSAGES) == load_template("chatml").parts(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('no system') }}",
    ],
)
def test_a_template_reaches_nothing(tmp_path, source):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(source)
    with pytest.raises(ValueError, match=r"refused a conversation|failed"):
        load_template(str(tmp_path / "chat.jinja")).render(MESSAGES, True) and pytest.fail("it was rendered")


def test_templates_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match=r"unknown chat template 'nothing': expected one of .*chatml"):
        load_template("nothing")
    with pytest.raises(ValueError, match="needs a tokenizer directory"):
        load_template("tokenizer", str(tmp_path))
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="isn't valid Jinja"):
        load_template(str(tmp_path / "chat.jinja"))
    # One that drops earlier answers: what was trained on would no longer stand where it stood.
    (tmp_path / "last.jinja").write_text("{{ messages | length }} {{ messages[-1].content }}")
    with pytest.raises(ValueError, match="writes earlier messages otherwise"):
        load_template(str(tmp_path / "last.jinja")).parts(MESSAGES)


def spoken(row):
    """The text of the targets that weigh."""
    ids = row["targets"][row["weights"] > 0]
    return bytes(i for i in ids.tolist() if i < 256).decode()


def test_only_the_assistants_words_weigh():
    pairs = ChatEncoder(ByteTokenizer(), load_template("chatml"), 1000)(json.dumps(MESSAGES))
    text = "".join(WRITTEN["chatml"])
    assert pairs["inputs"][0] == 256
    assert bytes(pairs["targets"].tolist()).decode() == text
    np.testing.assert_array_equal(pairs["inputs"][1:], pairs["targets"][:-1])
    expected = np.concatenate([np.full(len(t), i % 2) for i, t in enumerate(WRITTEN["chatml"])])
    np.testing.assert_array_equal(pairs["weights"], expected)
    plain = ChatEncoder(ByteTokenizer(), load_template("plain"), 1000)(json.dumps(MESSAGES))
    assert spoken(plain) == "4\n\nyes, 4\n\n"
    assert [int(t) for t in plain["targets"][plain["weights"] > 0]].count(257) == 2


def test_conversations_longer_than_a_row():
    encoder = ChatEncoder(ByteTokenizer(), load_template("plain"), len(WRITTEN["plain"][0]) + 2)
    pairs = encoder(json.dumps(MESSAGES))
    assert len(pairs["inputs"]) == len(WRITTEN["plain"][0]) + 2
    assert spoken(pairs) == "4\n"
    assert ChatEncoder(ByteTokenizer(), load_template("plain"), 10)(json.dumps(MESSAGES)) is None


def test_a_tokenizer_with_words_of_its_own(tmp_path):
    pytest.importorskip("tokenizers")
    train_tokenizer(["be brief yes sure user assistant system " * 50], 300, tmp_path / "bpe.json")
    tokenizer = load_tokenizer(str(tmp_path / "bpe.json"))
    pairs = ChatEncoder(tokenizer, load_template("chatml"), 1000)(json.dumps(MESSAGES))
    assert tokenizer.decode(pairs["targets"][pairs["weights"] > 0]) == "4<|im_end|>\nyes, 4<|im_end|>\n"


@pytest.fixture
def conversations(tmp_path):
    records = []
    for i in range(40):
        question, answer = f"number {i}?", "x" * (i % 7 + 1) + f" is {i}"
        schema = (lambda r, c: {"role": r, "content": c}, lambda r, c: {"from": r, "value": c})[i % 2]
        key = ("messages", "conversations")[i % 2]
        records.append({key: [schema("user", question), schema("assistant", answer)]})
    records.insert(3, {"messages": [{"role": "user", "content": "nobody answers"}]})
    lines = [json.dumps(record) for record in records]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (tmp_path / "more.jsonl").write_text("\n".join(lines[20:]) + "\n{broken\n")
    return tmp_path, {"x" * (i % 7 + 1) + f" is {i}\n\n" for i in range(40)}


def test_rows_of_conversations(conversations):
    folder, answers = conversations
    config = DataConfig(
        sources=(SourceConfig("files", str(folder / "*.jsonl"), format="chat"),),
        sequence_length=96,
        packing="fit",
        chat_template="plain",
        held_out_fraction=0.0,
        streams=1,
        shuffle=False,
    )
    pipeline = DataPipeline(config)
    batches = pipeline.training_batches(4)
    seen = set()
    try:
        for _ in range(20):  # packing holds some back for a while
            batch = next(batches)
            assert set(batch) == {"inputs", "targets", "segment_ids", "positions", "weights"}
            for row in range(4):
                one = {name: column[row] for name, column in batch.items()}
                for segment in range(1, one["segment_ids"].max() + 1):
                    kept = one["segment_ids"] == segment
                    assert one["inputs"][kept][0] == 256
                    np.testing.assert_array_equal(one["positions"][kept], np.arange(kept.sum()))
                    seen.add(spoken({name: column[kept] for name, column in one.items()}))
                assert not one["weights"][one["segment_ids"] == 0].any()
    finally:
        batches.close()
    assert seen == answers
    assert pipeline.skipped == {"no answer of an assistant": 1, "not JSON": 1}


def test_parquet_of_conversations(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"system": ["be brief"], "conversations": [RECORDS["openthoughts"]["conversations"]], "other": [1]}
    parquet.write_table(pa.table(columns), tmp_path / "chats.parquet")
    documents = open_documents(SourceConfig("files", str(tmp_path), format="chat"))
    assert json.loads(documents[0]) == MESSAGES
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "chats.parquet")
    with pytest.raises(ValueError, match=r"chats.parquet has no conversations, only \['text'\]"):
        open_documents(SourceConfig("files", str(tmp_path), format="chat"))


def test_sources_that_hold_no_conversations(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"holds no \.jsonl or \.parquet file"):
        open_documents(SourceConfig("files", str(tmp_path / "a.txt"), format="chat"))
    with pytest.raises(ValueError, match="format 'chat' must be of kind 'files' or 'hub', got 'stdlib'"):
        SourceConfig("stdlib", format="chat")
    with pytest.raises(ValueError, match=r"data.packing must be 'fit' with conversations"):
        DataConfig(sources=(SourceConfig("files", "a.jsonl", format="chat"),))


def test_text_and_conversations_in_one_mixture(conversations):
    folder, _ = conversations
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words " * 200)
    chats = SourceConfig("files", str(folder / "*.jsonl"), format="chat")
    config = DataConfig(
        sources=(chats, SourceConfig("files", str(folder / "text"))),
        sequence_length=64,
        packing="fit",
        chat_template="plain",
        held_out_fraction=0.0,
        streams=2,
    )
    batches = DataPipeline(config).training_batches(8)
    try:
        batch = next(batches)
    finally:
        batches.close()
    share = batch["weights"].sum(axis=1) / (batch["segment_ids"] > 0).sum(axis=1)
    assert 0 < share.min() < 0.6
    assert share.max() == 1
