"""Makes training examples from a tenant's data: plain text, or JSON lines of text, pairs or chats."""

from __future__ import annotations

import codecs
import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from jinja2 import TemplateError

from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.errors import ConfigError, one_line
from symbiosis_priv.system.files import UNDECODABLE, read_text

if TYPE_CHECKING:  # the commands check the data file before they import transformers
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
log = logging.getLogger(__name__)

NOT_LEARNED = -100
"""The label of a token that is input only; transformers' losses ignore it."""

_JSON_LINES = (".jsonl", ".ndjson")
_MAX_HELD_OUT = 16  # held-out examples are evaluated before and after training, which costs round trips
_OBJECT = re.compile(rb"\[?\s*\{")
_FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or '
    '{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}'
)
_PREFERENCES = "input+non_preferred_output+preferred_output"


_NO_TEMPLATE = "this model's tokenizer has no chat template; write plain prompts (and completions) instead"


@dataclass(frozen=True)
class Example:
    """One training example of at least two tokens. A label is the token's id if the model learns to predict it, else
    NOT_LEARNED."""

    input_ids: list[int]
    labels: list[int]


class Preference(NamedTuple):
    """Two answers to one chat. The model learns to prefer the first one."""

    preferred: Example
    other: Example


class JsonMessage(msgspec.Struct):
    role: str
    content: str


class JsonReply(JsonMessage):
    role: Literal["assistant"]


class JsonInput(msgspec.Struct):
    """The chat before the two answers of a preference. Tools are refused, because they would be left out."""

    messages: list[JsonMessage]
    tools: Annotated[list[Any], msgspec.Meta(max_length=0)] = msgspec.field(default_factory=list)


OneReply = Annotated[list[JsonReply], msgspec.Meta(min_length=1, max_length=1)]


class JsonLine(msgspec.Struct):
    """One line of a JSONL file, in exactly one of four forms. Unknown fields are ignored."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[JsonMessage] | None = None
    input: JsonInput | None = None
    preferred_output: OneReply | None = None
    non_preferred_output: OneReply | None = None

    @property
    def form(self) -> str | None:
        """The fields of the line's form, joined by `+`; None if the line has no form or more than one."""
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        form = "+".join(sorted(given))
        return form if form in ("text", "completion+prompt", "messages", _PREFERENCES) else None


def render_chat(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Return the text of a chat in the tokenizer's chat template. Raises `ConfigError` if there is no template, or if
    the template refuses the messages."""
    if not (options.get("chat_template") or tokenizer.chat_template):
        raise ConfigError(_NO_TEMPLATE)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"the chat template refuses these messages: {one_line(str(error))}") from error


def context_of(config: Any) -> int | None:
    """Return the number of positions of a model's context; None if its configuration sets no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if positions and positions > 0 else None


def check_context(context: int | None, *, prompt: int, new: int) -> None:
    """Raise `ConfigError` if a prompt and its new tokens, both as numbers of tokens, exceed the model's context."""
    if context is not None and prompt + new > context:
        raise ConfigError(
            f"{prompt:,} tokens of prompt and {new:,} new tokens are more than the model's context of {context:,}; "
            f"shorten the prompt or ask for fewer"
        )


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase, *, length: int) -> tuple[list[Any], int]:
    """Read a file and encode it as training examples.

    A `*.jsonl` or `*.ndjson` file holds one JSON object per line. All lines have the same fields: `text`, which is
    packed like plain text; `prompt` and `completion`, of which the model learns the completion; `messages`, which the
    chat template renders and of which the model learns the assistant's; or `input`, `preferred_output` and
    `non_preferred_output`, as in OpenAI's API, which become preferences. Any other file is plain text; see
    `read_documents`.

    Args:
        length: maximum number of tokens of an example.

    Returns:
        The examples or preferences, and the number of those that were cut to `length`.

    Raises:
        ConfigError: the file is unreadable, empty or malformed. The message names the line.
    """
    lines = list(_read_lines(path)) if path.suffix.lower() in _JSON_LINES else []
    if not lines or lines[0][1].form == "text":
        documents = [str(line.text) for _, line in lines] or read_documents(path)
        return [Example(block, block) for block in to_blocks(documents, tokenizer, length=length)], 0
    examples, shortened = [], 0
    for number, line in lines:
        try:
            wholes = _encode(line, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        cuts = [Example(whole.input_ids[:length], whole.labels[:length]) for whole in wholes]
        shortened += any(len(whole.input_ids) > length for whole in wholes)
        if all(any(label != NOT_LEARNED for label in cut.labels[1:]) for cut in cuts):
            examples.append(cuts)
    if not examples:
        raise ConfigError(f"{path}: no line has a token to learn within {length} tokens; raise --sequence-length")
    if lines[0][1].form == _PREFERENCES:
        return [Preference(*cuts) for cuts in examples], shortened
    return [cut for (cut,) in examples], shortened


def rows_of(examples: Sequence[Example | Preference]) -> list[Example]:
    """Return examples, with both answers of each preference."""
    return [row for one in examples for row in (one if isinstance(one, Preference) else (one,))]


def check(path: Path, *, model: Path | None = None, preferences: bool | None = None) -> None:
    """Check a file without encoding it, in no more memory than the file's size. Raises `ConfigError`, which names the
    line, if the file is unreadable, empty or malformed, or if it has chats and the folder `model` has no template.
    `preferences`: whether the file must have preferences, or must not."""
    forms = {line.form for _, line in _read_lines(path)} if path.suffix.lower() in _JSON_LINES else {None}
    if preferences is not None and preferences != (_PREFERENCES in forms):
        needed = "--beta and the method dpo need" if preferences else "only the method dpo takes"
        raise ConfigError(f'{path}: {needed} lines of {{"input", "preferred_output", "non_preferred_output"}}')
    if forms != {None}:
        if forms & {"messages", _PREFERENCES} and model is not None:
            check_template(model)
        return
    if not any(line.strip() for line in _lines(path)):
        raise ConfigError(f"{path} holds no text")
    _refuse_json(path)


def check_template(model: Path) -> None:
    """Raise `ConfigError` if no file in a model's folder holds a chat template."""
    settings = model / "tokenizer_config.json"
    if not any((model / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")) and not (
        settings.exists() and read_json(settings).get("chat_template")
    ):
        raise ConfigError(_NO_TEMPLATE)


def _refuse_json(path: Path) -> None:
    """Raise `ConfigError` if the text, or its first line that is not blank, is a JSON object or an array of JSON
    objects."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip()
    if path.suffix.lower() == ".json" or _is_json(text.partition(b"\n")[0]) or _is_json(text):
        raise ConfigError(
            f"{path} holds JSON, and the model would learn braces and field names as text. Pass plain text, or pass a "
            f"file .jsonl to `tenant finetune`, with one example per line, as {_FORMS}"
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
    parts = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise ConfigError(f"{path} holds no text")
    return documents


def to_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase, *, length: int) -> list[list[int]]:
    """Encode all documents, end each with the end-of-text token, and cut the sequence into blocks of `length` tokens.

    The last tokens, which do not fill a block, are dropped unless there is no full block. Raises `ConfigError` if the
    documents have fewer than two tokens.
    """
    ids: list[int] = []
    for encoded in tokenizer(documents, verbose=False)["input_ids"]:
        ids += _ended(encoded, tokenizer)
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


def _encode_pair(line: JsonLine, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt, completion = str(line.prompt), str(line.completion)
    given = tokenizer(prompt)["input_ids"]
    if given[-1:] == [tokenizer.eos_token_id]:
        given = given[:-1]
    whole = tokenizer(prompt + completion)["input_ids"]
    if whole[: len(given)] != given:  # a token spans prompt and completion, which cannot happen in generation
        whole = given + tokenizer(completion, add_special_tokens=False)["input_ids"]
    whole = _ended(whole, tokenizer)
    return Example(whole, [NOT_LEARNED] * len(given) + whole[len(given) :])


def _encode(line: JsonLine, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Return the example of a line, or its two examples."""
    if line.input is not None:
        chat, replies = line.input.messages, (line.preferred_output or (), line.non_preferred_output or ())
        return [_encode_chat([*chat, *reply], tokenizer, first=len(chat)) for reply in replies]
    return [_encode_pair(line, tokenizer) if line.messages is None else _encode_chat(line.messages, tokenizer)]


def _encode_chat(given: Sequence[JsonMessage], tokenizer: PreTrainedTokenizerBase, *, first: int = 0) -> Example:
    """Encode a chat, of which the model learns the assistant's messages from number `first` on."""
    messages = [{"role": message.role, "content": message.content} for message in given]
    if not tokenizer.is_fast:
        raise ConfigError(
            "chats need a fast tokenizer (tokenizer.json), which returns the offset of each token in the text"
        )
    text = render_chat(messages, tokenizer)
    replies = []  # (start, end) in the text of each assistant message: the text that follows the generation prompt
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= first:
            before = render_chat(messages[:i], tokenizer, add_generation_prompt=True)
            after = render_chat(messages[: i + 1], tokenizer)
            # some templates render a message differently if others follow; such a message is not learned
            if after.startswith(before) and text.startswith(after):
                replies.append((len(before), len(after)))
    if not replies:
        raise ConfigError("the rendered chat has no message of role assistant, so there is nothing to learn; add one")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # the template adds them

    def learned(start: int, end: int) -> bool:
        return start < end and any(first <= start and end <= last for first, last in replies)

    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return Example(list(encoded["input_ids"]), [token if learned(*at) else NOT_LEARNED for token, at in pairs])


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None or ids[-1:] == [tokenizer.eos_token_id]:
        return ids
    return [*ids, int(tokenizer.eos_token_id)]


def _read_lines(path: Path) -> Iterator[tuple[int, JsonLine]]:
    """Yield the number and content of each line that is not blank. Raises `ConfigError` if a line has another form than
    the first."""
    form = None
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                parsed = msgspec.json.decode(line, type=JsonLine)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}, line {number}: {error}; write one of {_FORMS}") from error
            except UNDECODABLE as error:
                raise ConfigError(
                    f"{path}, line {number} is not one whole JSON object; write each example on one line, as {_FORMS}"
                ) from error
            form = form or parsed.form
            if form is None or parsed.form != form:
                raise ConfigError(f"{path}, line {number}: every line must have the same form, one of {_FORMS}")
            yield number, parsed
    if form is None:
        raise ConfigError(f"{path} holds no lines")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, one at a time in memory. Raises `ConfigError` as `read_text` does."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError):
        read_text(path)
        raise
