"""Reads a tenant's data: plain text, or JSON lines in one of TRL's forms. Nothing here imports torch, so the commands
report a mistake in the data at once.

Every field with a value is used, or refused by name. `tenant.training.examples` makes tokens of what is read here, and
refuses what a chat template leaves out.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from jinja2 import TemplateError

from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.errors import ConfigError, one_line
from symbiosis_priv.system.files import UNDECODABLE, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
log = logging.getLogger(__name__)

Form = Literal["text", "pairs", "chats", "preferences"]

_JSON_LINES = (".jsonl", ".ndjson")
_MAX_HELD_OUT = 16  # held-out examples are evaluated before and after training, which costs round trips
_OBJECT = re.compile(rb"\[?\s*\{")
_FORMS: dict[frozenset[str], Form] = {
    frozenset({"text"}): "text",
    frozenset({"prompt", "completion"}): "pairs",
    frozenset({"messages"}): "chats",
    frozenset({"prompt", "chosen", "rejected"}): "preferences",
    frozenset({"chosen", "rejected"}): "preferences",
}
_OF_CHATS = ("tools", "chat_template_kwargs")
_INSTEAD = {"functions": "write tools", "label": "ratings are learned with TRL's KTOTrainer (docs/training.md)"}
_OPENAI = {"messages": "prompt", "preferred_output": "chosen", "non_preferred_output": "rejected"}
_SHAREGPT = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_ALPACA = ("instruction", "output", "input")
_WRITE = (
    'write {"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or '
    '{"prompt": ..., "chosen": ..., "rejected": ...} on every line'
)
_NO_TEMPLATE = "this model's tokenizer has no chat template"
_PLAIN = "write plain prompts (and completions) instead"


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any]


class _Call(msgspec.Struct):
    function: _Function


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    """A message. It may have more fields, if the chat template uses them."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    weight: Literal[0, 1] | None = None


_Chat = Annotated[list[_Message], msgspec.Meta(min_length=1)]
_Line = msgspec.defstruct(
    "Line",
    [
        *((name, str | _Chat | None, None) for name in ("prompt", "completion", "chosen", "rejected")),
        *(("text", str | None, None), ("messages", _Chat | None, None)),
        *(("tools", list[dict[str, Any]] | None, None), ("chat_template_kwargs", dict[str, Any] | None, None)),
    ],
)
"""A line in TRL's forms."""


@dataclass(frozen=True)
class Corpus:
    """The rows of a file in one form, each with its place in the file. A chat is a list of messages: dicts with a role,
    a content (a text), and what else the file gives them."""

    form: Form
    rows: list[tuple[str, dict[str, Any]]]

    @property
    def has_chats(self) -> bool:
        return any(isinstance(value, list) for name, value in self.rows[0][1].items() if name not in _OF_CHATS)


def read(path: Path, *, model: Path | None = None) -> Corpus:
    """Read a file. `*.jsonl` and `*.ndjson` hold one JSON object per line; any other file is plain text
    (`read_documents`). OpenAI's preferences, Alpaca's and ShareGPT's rows are converted. Raises `ConfigError`, which
    names the line, if the file is unreadable, empty or malformed, or if it has chats and the folder `model` has no
    template."""
    if path.suffix.lower() not in _JSON_LINES:
        return Corpus("text", [(str(path), {"text": text}) for text in read_documents(path)])
    read_text(path)  # names what is wrong with the file
    form, rows = None, []
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            own, row = _row(line)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        kind = own, {type(row[name]) for name in row.keys() - _OF_CHATS}
        form = form or kind
        if kind != form:
            raise ConfigError(f"{place}: every line must have the form of the first one; {_WRITE}")
        rows.append((place, row))
    if form is None:
        raise ConfigError(f"{path} holds no lines")
    corpus = Corpus(form[0], rows)
    if model is not None and corpus.has_chats:
        check_template(model, instead=_PLAIN)
    return corpus


def _row(line: bytes) -> tuple[Form, dict[str, Any]]:
    """Return the form of a line, and its fields in TRL's forms."""
    try:
        msgspec.json.decode(line, type=dict[str, Any])
        row = _convert(json.loads(line, object_pairs_hook=_unique))
        row = {name: value for name, value in row.items() if _given(value)}
        for name in sorted(row.keys() - _Line.__struct_fields__):
            raise ConfigError(f"the field {name!r} would not be learned; {_INSTEAD.get(name, 'remove it')}")
        msgspec.convert(row, _Line)  # checks the types
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}; {_WRITE}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"this is not one whole JSON object ({one_line(str(error))}); {_WRITE}") from error
    answers = row.keys() - _OF_CHATS
    form = _FORMS.get(frozenset(answers))
    kinds = {type(row[name]) for name in answers}
    if form is None or len(kinds) > 1 or (kinds == {str} and len(answers) < len(row)):
        found = f"{', '.join(sorted(row))} do not go together" if len(row) > 1 else f"{', '.join(row)} alone is no row"
        raise ConfigError(f"{found if row else 'no field has a value'}; {_WRITE}")
    if kinds == {list}:
        row |= {name: [_message(one) for one in row[name]] for name in answers}
    if "chosen" in row and row["chosen"] == row["rejected"]:
        raise ConfigError("chosen and rejected are equal, so there is nothing to prefer; remove this line")
    if form == "preferences" and "prompt" not in row:  # it is what both answers begin with, as in TRL
        chosen, rejected = row["chosen"], row["rejected"]
        pairs = enumerate(zip(chosen, rejected, strict=False))
        start = next((at for at, (one, other) in pairs if one != other), max(min(len(chosen), len(rejected)) - 1, 0))
        start -= start > 0 and chosen[start - 1] == " "
        row |= {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
    if kinds == {list}:
        learned = [one for name in answers - {"prompt"} for one in row[name] if one.get("weight") != 0]
        roles = {one["role"] for one in learned}
        if "assistant" not in roles:
            raise ConfigError("there is no message of role assistant to learn")
        if form != "chats" and len(roles) > 1:
            raise ConfigError("an answer has another role than assistant; write the chat as messages")
        if not row.get("prompt", True):
            raise ConfigError("chosen and rejected begin with different messages, so there is no prompt")
    return form, row


def _given(value: object) -> bool:
    return value is not None and value not in ([], {})


def _convert(row: dict[str, Any]) -> dict[str, Any]:
    """Bring OpenAI's preferences and the rows of ShareGPT and Alpaca into TRL's forms, and tools into a list."""
    if isinstance(row.get("input"), dict):
        row = _merged(row, row.pop("input"))
        row = _merged(row, {new: row.pop(old) for old, new in _OPENAI.items() if old in row})
    elif isinstance(row.get("conversations"), list):
        row = _merged(row, {"messages": [_turn(one) for one in row.pop("conversations")]})
    elif all(isinstance(row.get(name) or "", str) for name in _ALPACA) and row.keys() >= set(_ALPACA[:2]):
        asked, answer, more = (row.pop(name, None) or "" for name in _ALPACA)
        chat = [{"role": "user", "content": "\n\n".join(filter(None, (asked, more)))}]
        row = _merged(row, {"messages": [*chat, {"role": "assistant", "content": answer}]})
    return row | {"tools": _json(row["tools"])} if isinstance(row.get("tools"), str) else row


def _turn(one: Any) -> Any:
    """Return a message of ShareGPT's as one of TRL's."""
    if not (isinstance(one, dict) and {"from", "value"} <= one.keys()):
        return one
    if (name := str(one.pop("from"))) not in _SHAREGPT:
        raise ConfigError(f"a message is from {name!r}, which is not known; write role and content")
    return _merged(one, {"role": _SHAREGPT[name], "content": one.pop("value")})


def _merged(row: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Add fields to a row. Raises `ConfigError` if one of them has a value already."""
    if twice := [name for name in more if _given(row.get(name))]:
        raise ConfigError(f"{twice[0]!r} is given twice, once in another form or place; remove one of them")
    return row | more


def _unique(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(fields)
    if len(row) < len(fields):
        ((name, _),) = Counter(name for name, _ in fields).most_common(1)
        raise ConfigError(f"{name!r} is given twice; remove one of them")
    return row


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates need it: with a text as its content, and the arguments of calls as objects."""
    message = {name: value for name, value in given.items() if _given(value) and value != ""}
    content = given.get("content")
    if not _given(content) and "tool_calls" not in message:
        others = ", ".join(["no content", *(f"but {name}" for name in message if name != "role")])
        raise ConfigError(f"a message of role {given['role']} has {others}; write content or tool_calls")
    if isinstance(content, list):
        for part in content:
            _check_known(part, "a part of a content", ("type", "text"))
        content = "".join(part["text"] for part in content)
    message["content"] = content or ""
    if given["role"] == "developer":
        message["role"] = "system"
    for call in message.get("tool_calls", ()):
        _check_known(call, "a call", ("id", "type", "index", "function"))
        _check_known(call["function"], "a call's function", ("name", "arguments"))
        if isinstance(arguments := call["function"]["arguments"], str):
            call["function"]["arguments"] = _json(arguments)
    return message


def _check_known(given: dict[str, Any], what: str, names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names and _given(given[name]):
            raise ConfigError(f"{what} has the field {name!r}, which would not be learned; remove it")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tools or arguments are not JSON: {text[:80]!r}") from error


def render_chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Return the text of a chat in the tokenizer's chat template. Raises `ConfigError` if there is no template, or if
    the template refuses the messages."""
    if not (options.get("chat_template") or tokenizer.chat_template):
        raise ConfigError(f"{_NO_TEMPLATE}; {_PLAIN}")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"the chat template refuses these messages: {one_line(str(error))}") from error


def context_of(config: Any) -> int | None:
    """Return the number of positions of a model's context; None if its configuration sets no limit. YaRN multiplies the
    positions that the model was trained with: some configurations state the product, others the factor alone."""
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not positions or positions < 0:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # one, or one for each kind of layer
        if isinstance(entry, dict) and entry.get("rope_type") == "yarn":
            original = entry.get("original_max_position_embeddings") or config.max_position_embeddings
            positions = max(positions, int(original * (entry.get("factor") or 1.0)))
    return int(positions)


def check_context(context: int | None, *, prompt: int, new: int) -> None:
    """Raise `ConfigError` if a prompt and its new tokens, both as numbers of tokens, exceed the model's context."""
    if context is not None and prompt + new > context:
        raise ConfigError(
            f"{prompt:,} tokens of prompt and {new:,} new tokens are more than the model's context of {context:,}; "
            f"shorten the prompt or ask for fewer"
        )


def check_template(model: Path, *, instead: str) -> None:
    """Raise `ConfigError` if no file in a model's folder holds a chat template. `instead`: what to do then."""
    settings = model / "tokenizer_config.json"
    if not any((model / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")) and not (
        settings.exists() and read_json(settings).get("chat_template")
    ):
        raise ConfigError(f"{_NO_TEMPLATE}; {instead}")


def _refuse_json(path: Path) -> None:
    """Raise `ConfigError` if the text, or its first line that is not blank, is a JSON object or an array of JSON
    objects."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip()
    if path.suffix.lower() == ".json" or _is_json(text.partition(b"\n")[0]) or _is_json(text):
        raise ConfigError(
            f"{path} holds JSON, and the model would learn braces and field names as text. Pass plain text, or pass a "
            f"file .jsonl to `tenant finetune`, and {_WRITE}"
        )


def _is_json(text: bytes) -> bool:
    if _OBJECT.match(text):
        with contextlib.suppress(*UNDECODABLE):
            msgspec.json.decode(text, type=msgspec.Raw)  # makes no objects
            return True
    return False


def read_documents(path: Path) -> list[str]:
    """Return the documents of a text file: the paragraphs between blank lines, or the lines if no line is blank. Raises
    `ConfigError` if the file is unreadable, not UTF-8, empty, or JSON."""
    text = read_text(path)
    _refuse_json(path)
    parts = text.split("\n\n" if "\n\n" in text.strip() else "\n")
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise ConfigError(f"{path} holds no text")
    return documents


def to_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase, *, length: int) -> list[list[int]]:
    """Encode all documents, end each with the end-of-text token, and cut the sequence into blocks of `length` tokens.
    The last tokens, which do not fill a block, are dropped unless there is no full block. Raises `ConfigError` if the
    documents have fewer than two tokens."""
    ids: list[int] = []
    for encoded in tokenizer(documents, verbose=False)["input_ids"]:
        ids += ended(encoded, tokenizer)
    if len(ids) < 2:
        raise ConfigError("the text has fewer than two tokens; there is nothing to predict")
    if len(ids) < length:
        log.warning("the text has %d tokens, fewer than a block of %d; a model learns little from it", len(ids), length)
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)] or [ids]


def hold_out(examples: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split examples into training examples and held-out examples. The held-out examples are the last tenth, at most
    16. Of fewer than ten examples, none is held out."""
    count = min(len(examples) // 10, _MAX_HELD_OUT)
    return list(examples[: len(examples) - count]), list(examples[len(examples) - count :])


def ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return token ids with the end-of-text token at their end, if there is one."""
    if tokenizer.eos_token_id is None or ids[-1:] == [tokenizer.eos_token_id]:
        return ids
    return [*ids, int(tokenizer.eos_token_id)]
