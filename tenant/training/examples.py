"""Makes training examples of a corpus: token ids, and which of them the model learns.

The tokens are those of TRL's own preparation (`tests/tenant/training/test_examples.py` compares them). Of a chat, the
model learns the assistant's messages. A template says which they are (`{% generation %}`), if it is one for training or
TRL has such a twin of it. Otherwise each message is found by rendering the chat up to it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from symbiosis_priv.errors import ConfigError, one_line
from tenant.training.corpus import Corpus, ended, log, render_chat, to_blocks
from tenant.training.options import check_installed

NOT_LEARNED = -100
"""The label of a token that is input only; transformers' losses ignore it."""

_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_TIME = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<form>[^'"]*)(?P=quote)\s*\)""")
_RENDER = "remove it, or use a template that renders it"
_LINE_EACH = 'write a line for each answer, as {"prompt": [...], "completion": [...]}'

Chat = list[dict[str, Any]]
T = TypeVar("T")


class Example(NamedTuple):
    """A training example of at least two tokens. A label is the token's id if the model learns to predict it, else
    NOT_LEARNED."""

    input_ids: list[int]
    labels: list[int]


class Preference(NamedTuple):
    """Two answers to one prompt. The model learns to prefer the first one."""

    chosen: Example
    rejected: Example


def columns(one: Example | Preference) -> dict[str, list[int]]:
    """Return the fields of an example that TRL's collators take."""
    if isinstance(one, Example):
        return one._asdict()
    start = one.chosen.labels.count(NOT_LEARNED)
    chosen, rejected = one.chosen.input_ids, one.rejected.input_ids
    return {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}


class Examples(NamedTuple):
    """Examples or preferences, how many were cut to the sequence length, and how many have nothing to learn within it
    and were left out."""

    found: list[Any]
    cut: int = 0
    left_out: int = 0


def make_examples(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, length: int, now: datetime | None = None
) -> Examples:
    """Encode a corpus. Texts are packed into blocks of `length` tokens (`to_blocks`); other examples are cut to
    `length` tokens. `now`: the time that chat templates may render. Raises `ConfigError`: the template refuses a chat
    or leaves a part of it out, or nothing is left to learn. The message names the line."""
    if corpus.form == "text":
        blocks = to_blocks([row["text"] for _, row in corpus.rows], tokenizer, length=length)
        return Examples([Example(block, block) for block in blocks])

    def encode_texts(row: dict[str, Any]) -> list[Example]:
        wholes = [ended(tokenizer(whole)["input_ids"], tokenizer) for whole in _wholes(row)]
        return _after(tokenizer(row["prompt"])["input_ids"], wholes)

    encode = _Chats(tokenizer, now or datetime.now()).encode if corpus.has_chats else encode_texts
    found, cut = [], 0
    for place, row in corpus.rows:
        try:
            wholes = encode(row)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        rows = [Example(whole.input_ids[:length], whole.labels[:length]) for whole in wholes]
        differ = len(rows) == 1 or rows[0] != rows[1]
        if differ and all(any(label != NOT_LEARNED for label in one.labels[1:]) for one in rows):
            found.append(Preference(*rows) if corpus.form == "preferences" else rows[0])
            cut += any(len(whole.input_ids) > length for whole in wholes)
    if not found:
        file = place.partition(", line ")[0]
        raise ConfigError(f"{file}: no line has a token to learn within {length} tokens; raise --sequence-length")
    return Examples(found, cut=cut, left_out=len(corpus.rows) - len(found))


def rows_of(examples: Sequence[Example | Preference]) -> list[Example]:
    """Return examples, with both answers of each preference."""
    return [row for one in examples for row in (one if isinstance(one, Preference) else (one,))]


def learned_parts(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the text of an example in parts, each with whether it is learned."""
    for learned, part in groupby(zip(*example, strict=True), key=lambda pair: pair[1] != NOT_LEARNED):
        yield str(tokenizer.decode([token for token, _ in part])), learned


def _after(prompt: list[int], wholes: list[list[int]]) -> list[Example]:
    """Return the examples of the answers to a prompt. The tokens after those that all begin with are learned."""
    start = min(_common(prompt, whole) for whole in wholes)
    return [Example(whole, [NOT_LEARNED] * start + whole[start:]) for whole in wholes]


def _common(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the number of items that two sequences begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _wholes(row: dict[str, Any]) -> list[Any]:
    """Return the prompt of a row with each of its answers."""
    return [row["prompt"] + row[name] for name in ("completion", "chosen", "rejected") if name in row]


def _strings(chat: Iterable[tuple[int, dict[str, Any]]], *, calls: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield the contents and thoughts of numbered messages, and the names of calls, each with its number and field."""
    for i, one in chat:
        yield from ((i, name, one[name]) for name in _TEXTS if isinstance(one.get(name), str))
        for call in one.get("tool_calls", ()) if calls else ():
            yield i, "tool_calls", call["function"]["name"]


def _holds(text: str, part: str) -> bool:
    """Return whether a text has a part, as it is or in JSON. Templates trim white space."""
    bare = "".join(text.split())
    return any("".join(one.split()) in bare for one in (part, _to_json(part)[1:-1]))


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # as templates write it


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON texts."""
    calls = [
        call
        | {"function": {name: value if name == "name" else _to_json(value) for name, value in call["function"].items()}}
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


class _Chats:
    """Encodes chats with the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, now: datetime) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("chats need a fast tokenizer (tokenizer.json), which knows where each token stands")
        self._tokenizer, self._now = tokenizer, now
        self._checked: set[object] = set()
        self._marked, self._training_template = _training_template(tokenizer)

    def encode(self, row: dict[str, Any]) -> list[Example]:
        options = {"tools": row.get("tools"), **self._template_options(row)}
        options["chat_template"] = self._template(options["tools"], training="messages" in row)
        if "messages" not in row:
            wholes = [self._checked_chat(whole, options) for whole in _wholes(row)]
            prompt = self._ids(wholes[0][: len(row["prompt"])], options, add_generation_prompt=True)
            return _after(prompt, [self._ids(whole, options) for whole in wholes])
        learned = [one["role"] == "assistant" and one.get("weight") != 0 for one in row["messages"]]
        messages = [
            {name: value for name, value in one.items() if (one["role"], name) != ("assistant", "weight")}
            for one in row["messages"]
        ]
        messages = self._checked_chat(messages, options)
        return [(self._by_template if self._marked else self._by_prefix)(messages, learned, options)]

    def _template(self, tools: Any, *, training: bool) -> str | None:
        """Return the template of a chat. The time that it renders is that of the run's start, also in a resumed run."""
        found = self._training_template if training else None
        if found is None and self._tokenizer.chat_template:
            found = self._tokenizer.get_chat_template(tools=tools)
        return found and _TIME.sub(lambda call: repr(self._now.strftime(call["form"])), found)

    def _checked_chat(self, chat: Chat, options: dict[str, Any]) -> Chat:
        """Return a chat whose every part the template renders. Arguments of calls become texts if it needs texts."""
        try:
            text = self._render(chat, options)
        except ConfigError:
            calls = [call for one in chat for call in one.get("tool_calls", ())]
            if not calls or any(isinstance(call["function"]["arguments"], str) for call in calls):
                raise
            return self._checked_chat([_with_texts(one) for one in chat], options)
        self._check_used(chat, options, text)
        for i, name, value in _strings(enumerate(chat)):
            if not _holds(text, value) and self._cuts(chat, i, name, options, text):
                raise ConfigError(f"the chat template leaves out a part of messages[{i}].{name}; {_RENDER}")
        return chat

    def _cuts(self, chat: Chat, i: int, name: str, options: dict[str, Any], text: str) -> bool:
        """Return whether the part of a field that is rendered gives the same text as all of it."""

        def render(value: str) -> str:
            return self._render([*chat[:i], chat[i] | {name: value}, *chat[i + 1 :]], options)

        try:
            other = render("\0")
            start, end = _common(text, other), _common(text[::-1], other[::-1])
            part = text[start : max(start, len(text) - end)]
            shorter = len("".join(part.split())) < len("".join(chat[i][name].split()))
            return other == text or (shorter and render(part) == text)
        except ConfigError:  # the template refuses another text
            return False

    def _render(self, messages: Chat, options: dict[str, Any], **more: Any) -> str:
        return render_chat(messages, self._tokenizer, **options, **more)

    def _ids(self, messages: Chat, options: dict[str, Any], **more: Any) -> list[int]:
        text = self._render(messages, options, **more)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template adds them

    def _template_options(self, row: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = row.get("chat_template_kwargs", {})
        taken = signature(self._tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        for name in options:
            if name in taken or not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise ConfigError(f"the chat template does not use chat_template_kwargs.{name}; remove it")
        return options

    def _check_used(self, chat: Chat, options: dict[str, Any], whole: str) -> None:
        """Refuse a field that changes nothing in the rendered chat. Chats with the same fields are checked once."""
        fields = ((one["role"], *sorted(one), one["content"] != "", len(one.get("tool_calls", ()))) for one in chat)
        kind = *fields, bool(options["tools"]), *options
        if kind in self._checked:
            return
        changes = [("tools", chat, options | {"tools": None})] if options["tools"] else []
        for i, one in enumerate(chat):
            for name, value in one.items():
                others: Chat = [{key: one[key] for key in one if key != name}]
                if name == "content":
                    others = [{**one, name: "\0"}]  # some templates need a content
                elif name == "tool_calls":
                    others = [{**one, name: value[:j] + value[j + 1 :]} for j in range(len(value))]
                # ids link calls and results, and so does the name of a tool
                if name not in ("role", "tool_call_id") and (one["role"], name) != ("tool", "name") and value != "":
                    chats = ([*chat[:i], other, *chat[i + 1 :]] for other in others)
                    changes += [(f"messages[{i}].{name}", changed, options) for changed in chats]
        for name, changed, given in changes:
            try:
                same = self._render(changed, given) == whole
            except ConfigError:  # the template needs the field
                continue
            if same:
                raise ConfigError(f"the chat template leaves out {name}; {_RENDER}")
        self._checked.add(kind)

    def _by_template(self, messages: Chat, learned: list[bool], options: dict[str, Any]) -> Example:
        """Learn what the template marks. Each mark is one message of the assistant, if some are not learned."""
        given: dict[str, Any] = {**self._tokenizer.special_tokens_map, **options}
        try:
            rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **given)
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(f"the chat template refuses these messages: {one_line(str(error))}") from error
        (text,), (marks,) = rendered
        replies = [wanted for one, wanted in zip(messages, learned, strict=True) if one["role"] == "assistant"]
        if not all(replies):
            if len(marks) != len(replies):
                raise ConfigError("the chat template marks the assistant's messages together, so no weight can be 0")
            marks = [mark for mark, wanted in zip(marks, replies, strict=True) if wanted]
        marked = "".join(text[start:end] for start, end in marks)
        wanted = [(i, one) for i, (one, wanted) in enumerate(zip(messages, learned, strict=True)) if wanted]
        for i, name, value in _strings(wanted, calls=True):
            if not marked or not _holds(marked, value):
                what = f"messages[{i}].{name}"
                raise ConfigError(f"the chat template renders {what}, but does not mark it as learned; {_LINE_EACH}")
        return self._example(text, marks)

    def _by_prefix(self, messages: Chat, learned: list[bool], options: dict[str, Any]) -> Example:
        """Learn what follows the generation prompt of each message of the assistant."""
        text = self._render(messages, options)
        replies = []
        for i, wanted in enumerate(learned):
            if not wanted:
                continue
            after = self._render(messages[: i + 1], options)
            try:
                before = self._render(messages[:i], options, add_generation_prompt=True)
            except ConfigError:  # some templates refuse an empty chat
                before = None
            if before is None or not after.startswith(before):  # it opens a thought, for example
                other = self._render([*messages[:i], {"role": "assistant", "content": "\0"}], options)
                before = after[: _common(after, other)]
            if not text.startswith(after):
                raise ConfigError(
                    f"the chat template renders messages[{i}] in another way if others follow, so it cannot be found; "
                    f"{_LINE_EACH}"
                )
            replies.append((len(before), len(after)))
        return self._example(text, replies)

    def _example(self, text: str, learned: list[tuple[int, int]]) -> Example:
        """Encode a text of which some ranges are learned. Some tokenizers place a token of spaces at its end only."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        wanted = [
            any(start < last and first < end for first, last in learned) for start, end in encoded["offset_mapping"]
        ]
        return Example(ids, [token if one else NOT_LEARNED for token, one in zip(ids, wanted, strict=True)])


def _training_template(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, str | None]:
    """Return whether messages of the assistant are marked, and the template that marks them, if it is another one than
    the tokenizer's."""
    check_installed()
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    try:
        marked = has_generation_markers(tokenizer.chat_template)
        template = None if marked else get_training_chat_template(tokenizer)
    except (TemplateError, ValueError, TypeError, KeyError):  # TRL knows no twin
        return False, None
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        log.warning("the chat template marks no token that ends an answer, so the model may not learn to stop")
    return True, template
