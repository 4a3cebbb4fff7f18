"""Conversations: their schemas, their templates, and which of their tokens are trained on.

A conversation is a list of messages {"role", "content"}. `conversation_of` reads it from a record of OpenThoughts,
ShareGPT or OpenAI; a `ChatTemplate` writes it as text; a `ChatEncoder` makes tokens of that, with the weight 1 where
the assistant speaks and 0 elsewhere.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from iha_jax.data.tokenizers import Tokenizer
from iha_jax.extras import needed
from iha_jax.json_text import parse_json_object

Message = dict[str, str]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
CHAT_FIELDS = ("messages", "conversations", "conversation", "system")
"""Keys of a record that a conversation is read from."""


def conversation_of(record: Any) -> list[Message]:
    """The messages of a record.

    Args:
      record: {"messages": [{"role", "content"}]} (OpenAI; content a text or a list of {"type": "text", "text"}), or
        {"conversations": [{"from", "value"}], "system"} (OpenThoughts, ShareGPT), or the list of messages itself.

    Raises:
      ValueError: it is none of them, a role is unknown, or nobody answers; the reason, in few words.
    """
    system, turns = None, record
    if isinstance(record, Mapping):
        turns = next((record[name] for name in CHAT_FIELDS[:3] if record.get(name) is not None), None)
        system = record.get("system")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError("no messages or conversations")
    messages = []
    if isinstance(system, str) and system.strip():
        messages.append({"role": "system", "content": system})
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ValueError("a message isn't an object")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"unknown role {role!r}")
        messages.append({"role": _ROLES[role], "content": _text(turn.get("content", turn.get("value")))})
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise ValueError("no answer of an assistant")
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "".join(texts)
    raise ValueError("content isn't text")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written.

    Attributes:
      name: of the template, or the file it came from.
      render: (messages, whether an assistant's answer is to follow) → text.
    """

    name: str
    render: Callable[[Sequence[Message], bool], str]

    def parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Texts one after the other, and whether the assistant wrote them.

        What the assistant writes begins where its answer would be asked for and ends with its message, the end
        mark included.

        Raises:
          ValueError: the template rewrites what it has written when a message is added.
        """
        found, written = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked, answered = self.render(messages[:i], True), self.render(messages[: i + 1], False)
            if not (asked.startswith(written) and answered.startswith(asked)):
                raise ValueError(
                    f"chat template {self.name!r} writes earlier messages otherwise once another is added: it can't be "
                    "trained on turn by turn"
                )
            found += [(asked[len(written) :], False), (answered[len(asked) :], True)]
            written = answered
        return [(text, spoken) for text, spoken in found if text]


def _chatml(messages: Sequence[Message], asked: bool) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" * asked


def _llama3(messages: Sequence[Message], asked: bool) -> str:
    def head(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    return "".join(f"{head(m['role'])}{m['content'].strip()}<|eot_id|>" for m in messages) + head("assistant") * asked


def _plain(messages: Sequence[Message], asked: bool) -> str:
    return "".join(f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages) + "Assistant: " * asked


_NAMED = {"chatml": _chatml, "llama3": _llama3, "plain": _plain}


@functools.cache
def load_template(name: str, tokenizer: str = "bytes") -> ChatTemplate:
    """A template by name or from a file.

    Args:
      name: "chatml", "llama3", "plain", "tokenizer" (the one beside the tokenizer), or the path of a Jinja file.
      tokenizer: name of the tokenizer, a directory for "tokenizer".

    Raises:
      ValueError: there is no such template, or it isn't valid Jinja.
      ImportError: Jinja is not installed.
    """
    if name in _NAMED:
        return ChatTemplate(name, _NAMED[name])
    if name == "tokenizer":
        return _jinja(*_of_tokenizer(pathlib.Path(tokenizer).expanduser()))
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"unknown chat template {name!r}: expected one of {[*_NAMED, 'tokenizer']}, or the path of a Jinja file"
        )
    return _jinja(name, path.read_text(encoding="utf-8"), {})


def _of_tokenizer(directory: pathlib.Path) -> tuple[str, str, dict[str, Any]]:
    file, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    described = parse_json_object(settings.read_bytes(), str(settings)) if settings.is_file() else {}
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = described.get(name)
        special[name] = token.get("content") if isinstance(token, dict) else token
    text = file.read_text(encoding="utf-8") if file.is_file() else described.get("chat_template")
    if isinstance(text, list):  # several, by name
        named = (t for t in text if isinstance(t, dict))
        text = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if not isinstance(text, str):
        raise ValueError(
            f"chat template 'tokenizer' needs a tokenizer directory with chat_template.jinja, or a chat_template in "
            f"its tokenizer_config.json, got {str(directory)!r}"
        )
    return str(file if file.is_file() else settings), text, special


def _jinja(name: str, source: str, special: Mapping[str, Any]) -> ChatTemplate:
    """A Jinja template, in a sandbox: it can read what it is given, and call nothing that reaches further."""
    with needed("jinja2", "a chat template in Jinja"):
        jinja2 = importlib.import_module("jinja2")
        sandbox = importlib.import_module("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(reason: str) -> None:
        raise jinja2.exceptions.TemplateError(reason)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    # Templates made for Transformers mark the assistant's words by this tag; where they are is found out otherwise.
    source = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", source)
    source = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", source)
    try:
        compiled = environment.from_string(source)
    except (
        jinja2.exceptions.TemplateError,
        ValueError,
        SyntaxError,
        RecursionError,
    ) as error:  # Jinja makes Python of it
        raise ValueError(f"chat template {name!r} isn't valid Jinja: {error}") from error

    def render(messages: Sequence[Message], asked: bool) -> str:
        try:
            return compiled.render(messages=list(messages), add_generation_prompt=asked, **special)
        except jinja2.exceptions.TemplateError as error:  # its own refusals, and what the sandbox forbids
            raise ValueError(f"chat template {name!r} refused a conversation: {error}") from error
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RecursionError) as error:
            raise ValueError(f"chat template {name!r} failed: {type(error).__name__}: {error}") from error

    return ChatTemplate(name, render)


@dataclasses.dataclass(frozen=True)
class ChatEncoder:
    """Conversations to tokens and weights.

    Attributes:
      tokenizer: of the model.
      template: how they are written.
      length: T; what a conversation has beyond T + 1 tokens is left out.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    length: int

    def __call__(self, conversation: str) -> dict[str, np.ndarray] | None:
        """Inputs and targets, int32 [n], and float32 weights [n], 1 where the target is the assistant's.

        Args:
          conversation: JSON of the messages.

        Returns:
          None where no token of the assistant is left, or the template can't write it.
        """
        try:
            parts = self.template.parts(json.loads(conversation))
        except ValueError:
            return None
        ids, spoken = [], []
        if self.tokenizer.bos_id is not None:
            ids.append(np.asarray([self.tokenizer.bos_id], np.int32))
            spoken.append(np.zeros(1, np.float32))
        for text, is_spoken in parts:
            encoded = self.tokenizer.encode(text)
            if is_spoken and self.template.name == "plain" and self.tokenizer.eos_id is not None:
                encoded = np.append(encoded, np.int32(self.tokenizer.eos_id))  # it has no end mark of its own
            if len(ids) == 1 and self.tokenizer.bos_id is not None and encoded[:1].tolist() == [self.tokenizer.bos_id]:
                encoded = encoded[1:]  # the template writes the start itself
            ids.append(encoded)
            spoken.append(np.full(len(encoded), is_spoken, np.float32))
        tokens, weights = np.concatenate(ids)[: self.length + 1], np.concatenate(spoken)[1 : self.length + 1]
        if not weights.any():
            return None
        return {"inputs": tokens[:-1], "targets": tokens[1:], "weights": weights}
