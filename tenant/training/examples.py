"""Makes training examples of a corpus: token ids, and which of them the model learns.

The tokens are those of TRL's own preparation (`tests/tenant/training/test_examples.py` compares them). Of a chat, the
model learns the assistant's messages. A template says which they are (`{% generation %}`), if it is one for training or
TRL has such a twin of it. Otherwise each message is found by rendering the chat up to it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
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

    def columns(self) -> dict[str, list[int]]:
        """Return the fields that TRL's collator takes."""
        start = self.chosen.labels.count(NOT_LEARNED)
        chosen, rejected = self.chosen.input_ids, self.rejected.input_ids
        return {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}


@dataclass(frozen=True)
class Examples:
    """The examples or preferences of a corpus, how many were cut to the sequence length, and how many were left out,
    because nothing to learn stands within it."""

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
    encode = _Chats(tokenizer).encode if corpus.has_chats else _encode_texts(tokenizer)
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
        raise ConfigError(f"{place}: no line has a token to learn within {length} tokens; raise --sequence-length")
    return Examples(found, cut=cut, left_out=len(corpus.rows) - len(found))


def rows_of(examples: Sequence[Example | Preference]) -> list[Example]:
    """Return examples, with both answers of each preference."""
    return [row for one in examples for row in (one if isinstance(one, Preference) else (one,))]


def learned_parts(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the text of an example in parts, each with whether it is learned."""
    for learned, part in groupby(zip(*example, strict=True), key=lambda pair: pair[1] != NOT_LEARNED):
        yield str(tokenizer.decode([token for token, _ in part])), learned


def _after(prompt: list[int], *wholes: list[int]) -> list[Example]:
    """Return the example of each answer: the tokens after those that it shares with the prompt are learned."""
    start = min(_common(prompt, whole) for whole in wholes)
    return [Example(whole, [NOT_LEARNED] * start + whole[start:]) for whole in wholes]


def _common(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the number of items that two sequences begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _encode_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[dict[str, Any]], list[Example]]:
    def encode(row: dict[str, Any]) -> list[Example]:
        answers = [row[name] for name in ("completion", "chosen", "rejected") if name in row]
        wholes = [ended(tokenizer(row["prompt"] + answer)["input_ids"], tokenizer) for answer in answers]
        return _after(tokenizer(row["prompt"])["input_ids"], *wholes)

    return encode


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
        if "messages" in row:
            messages = [{name: value for name, value in one.items() if name != "weight"} for one in row["messages"]]
            learned = [one["role"] == "assistant" and one.get("weight", 1) == 1 for one in row["messages"]]
            options["chat_template"] = self._training_template
            self._check_used(messages, options)
            return [(self._by_template if self._marked else self._by_prefix)(messages, learned, options)]
        wholes = [row["prompt"] + row[name] for name in ("completion", "chosen", "rejected") if name in row]
        for whole in wholes:
            self._check_used(whole, options)
        prompt = self._ids(self._render(row["prompt"], options, add_generation_prompt=True))
        return _after(prompt, *(self._ids(self._render(whole, options)) for whole in wholes))

    def _render(self, messages: Chat, options: dict[str, Any], **more: Any) -> str:
        return render_chat(messages, self._tokenizer, **options, **more)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template adds them

    def _template_options(self, row: dict[str, Any]) -> dict[str, Any]:
        options = row.get("chat_template_kwargs", {})
        taken = signature(self._tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        for name in options:
            if name in taken or not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise ConfigError(f"the chat template does not use chat_template_kwargs.{name}; remove it")
        return dict(options)

    def _check_used(self, messages: Chat, options: dict[str, Any]) -> None:
        """Refuse a field that changes nothing in the rendered chat. Chats with the same fields are checked once."""
        fields = [
            (i, name, j)
            for i, one in enumerate(messages)
            for name, value in one.items()
            if name not in ("role", "tool_call_id") and (one["role"], name) != ("tool", "name")
            if (value.strip() if isinstance(value, str) else value)
            for j in (range(len(value)) if name == "tool_calls" else (None,))
        ]
        kind = (tuple(one["role"] for one in messages), tuple(fields), bool(options["tools"]), len(options))
        if kind in self._checked:
            return
        whole = self._render(messages, options)

        def unused(messages: Chat, **changed: Any) -> bool:
            try:
                return self._render(messages, options | changed) == whole
            except ConfigError:  # the template needs the field
                return False

        if options["tools"] and unused(messages, tools=None):
            raise ConfigError("the chat template leaves out tools; remove them, or use a template that renders them")
        for i, name, j in fields:
            without = deepcopy(messages)
            if j is not None:
                del without[i][name][j]
            elif name == "content":
                without[i][name] = "\0"  # some templates need a content
            else:
                del without[i][name]
            if unused(without):
                what = f"messages[{i}].{name}" + ("" if j is None else f"[{j}]")
                raise ConfigError(f"the chat template leaves out {what}; remove it, or use a template that renders it")
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
