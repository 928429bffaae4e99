"""Makes training examples of a corpus: token ids, and which of them the model learns.

The tokens are those of TRL's own preparation (`tests/tenant/training/test_examples.py` compares them). Of a chat, the
model learns the assistant's messages. A template says which they are (`{% generation %}`), if it is one for training or
TRL has such a twin of it. Otherwise each message is found by rendering the chat up to it.
"""

import re
from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import ConfigError
from tenant.training.corpus import Corpus, ended, log, render_chat, to_blocks
from tenant.training.options import check_installed

NOT_LEARNED = -100
"""The label of a token that is input only; transformers' losses ignore it."""

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


def make_examples(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, length: int) -> Examples:
    """Encode a corpus. Texts are packed into blocks of `length` tokens (`to_blocks`); other examples are cut to
    `length` tokens. Raises `ConfigError`: the template refuses a chat or leaves a part of it out, or nothing is left to
    learn. The message names the line."""
    if corpus.form == "text":
        blocks = to_blocks([row["text"] for _, row in corpus.rows], tokenizer, length=length)
        return Examples([Example(block, block) for block in blocks])

    def encode_texts(row: dict[str, Any]) -> list[Example]:
        wholes = [ended(tokenizer(whole)["input_ids"], tokenizer) for whole in _wholes(row)]
        return _after(tokenizer(row["prompt"])["input_ids"], wholes)

    encode = _Chats(tokenizer).encode if corpus.has_chats else encode_texts
    found, cut = [], 0
    for place, row in corpus.rows:
        try:
            wholes = encode(row)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        rows = [Example(whole.input_ids[:length], whole.labels[:length]) for whole in wholes]
        if all(any(label != NOT_LEARNED for label in one.labels[1:]) for one in rows):
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


class _Chats:
    """Encodes chats with the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("chats need a fast tokenizer (tokenizer.json), which knows where each token stands")
        self._tokenizer = tokenizer
        self._checked: set[object] = set()
        self._marked, self._training_template = _training_template(tokenizer)

    def encode(self, row: dict[str, Any]) -> list[Example]:
        options = {"tools": row.get("tools"), **self._template_options(row)}
        if "messages" not in row:
            for whole in _wholes(row):
                self._check_used(whole, options)
            prompt = self._ids(row["prompt"], options, add_generation_prompt=True)
            return _after(prompt, [self._ids(whole, options) for whole in _wholes(row)])
        options["chat_template"] = self._training_template
        learned = [one["role"] == "assistant" and one.get("weight") != 0 for one in row["messages"]]
        messages = [
            {name: value for name, value in one.items() if (one["role"], name) != ("assistant", "weight")}
            for one in row["messages"]
        ]
        self._check_used(messages, options)
        return [(self._by_template if self._marked else self._by_prefix)(messages, learned, options)]

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

    def _check_used(self, chat: Chat, options: dict[str, Any]) -> None:
        """Refuse a field that changes nothing in the rendered chat. Chats with the same fields are checked once."""
        fields = ((one["role"], *sorted(one), one["content"] != "", len(one.get("tool_calls", ()))) for one in chat)
        kind = *fields, bool(options["tools"]), *options
        if kind in self._checked:
            return
        whole = self._render(chat, options)
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
                raise ConfigError(f"the chat template leaves out {name}; remove it, or use a template that renders it")
        self._checked.add(kind)

    def _by_template(self, messages: Chat, learned: list[bool], options: dict[str, Any]) -> Example:
        """Learn what the template marks. Each mark is one message of the assistant, if some are not learned."""
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        ids, mask = list(encoded["input_ids"]), encoded["assistant_masks"]
        marks = [list(part) for marked, part in groupby(range(len(ids)), key=lambda at: mask[at]) if marked]
        replies = [wanted for one, wanted in zip(messages, learned, strict=True) if one["role"] == "assistant"]
        if not all(replies):
            if len(marks) != len(replies):
                raise ConfigError("the chat template marks the assistant's messages together, so no weight can be 0")
            marks = [mark for mark, wanted in zip(marks, replies, strict=True) if wanted]
        wanted = {at for mark in marks for at in mark}
        return Example(ids, [token if at in wanted else NOT_LEARNED for at, token in enumerate(ids)])

    def _by_prefix(self, messages: Chat, learned: list[bool], options: dict[str, Any]) -> Example:
        """Learn what follows the generation prompt of each message of the assistant."""
        text = self._render(messages, options)
        replies = []  # (start, end) in the text
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
                    f"the chat template renders messages[{i}] in another way if others follow, so it cannot be found. "
                    'Write a line for each answer, as {"prompt": [...], "completion": [...]}'
                )
            replies.append((len(before), len(after)))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)

        def wanted_at(start: int, end: int) -> bool:
            return start < end and any(first <= start and end <= last for first, last in replies)

        return Example(list(encoded["input_ids"]), [token if wanted_at(*at) else NOT_LEARNED for token, at in pairs])


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
