"""The bodies of requests, as pydantic models. An unknown field or an unsupported value is an error that names the
field.

A field with one allowed value is one of OpenAI's fields that may be sent and has no effect. An unknown field without a
value (null, or an empty text or list) counts as absent: clients send back what they have read of an answer, with all
fields that their own classes have.

A value that may have several forms (`Texts`, `Item`) is checked as the form that it has, so that an error names what is
wrong with this form. The names of forms begin with "<", so that no error takes one for a field.

A body of 8 MiB may hold millions of wrong values, and pydantic describes each in about a kilobyte. So a list is checked
up to its first wrong item (`FAIL_FAST`), and an object with more than `_FIELDS` fields is refused before its fields are
read.
"""

from collections.abc import Callable, Coroutine, Sequence, Set
from functools import cache
from typing import Annotated, Any, Literal, LiteralString, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from tenant.endpoint.engine.requests import MOST_BUCKET


def _check_field_count(value: Any) -> Any:
    """Refuse an object with more than `_FIELDS` fields."""
    if isinstance(value, dict) and len(value) > _FIELDS:
        raise PydanticCustomError("too_many_fields", f"an object has more than {_FIELDS} fields")
    return value


def _check_part_count(value: Any) -> Any:
    """Refuse a list of messages whose fields are lists of more than `_PARTS` items in all."""
    messages = (one.values() for one in value if isinstance(one, dict)) if isinstance(value, list) else ()
    if sum(len(given) for fields in messages for given in fields if isinstance(given, list)) > _PARTS:
        raise PydanticCustomError("too_many_parts", f"there are more than {_PARTS:,} parts and calls")
    return value


def _check_text_only(value: Any) -> Any:
    """Refuse a part of a message that is no text."""
    if not isinstance(value, dict) or value.get("type") not in ("text", "input_text", "output_text"):
        raise PydanticCustomError("form", _TEXTS_ONLY)
    return value


_FORMS: dict[type, str] = {str: "<text>", list: "<list>", dict: "<object>"}


def _form(value: Any) -> str | None:
    return "<object>" if isinstance(value, BaseModel) else _FORMS.get(type(value))


def _prompt_form(value: Any) -> str | None:
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        return _form(value)
    return "<lists of ids>" if isinstance(value[0], list) else "<ids>"


def _type(value: Any) -> str | None:
    """Return the form of an object with a field `type`."""
    given = vars(value) if isinstance(value, BaseModel) else value
    return f"<{given.get('type') or 'message'}>" if isinstance(given, dict) else None


def _chosen(form: Callable[[Any], str | None], forms: str) -> Discriminator:
    """Return what chooses the form as which a value is checked, and the error for a value with none of the `forms`."""
    return Discriminator(form, custom_error_type="form", custom_error_message=f"Input should be {forms}")


def _check_together(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a list of token ids at once. One by one, millions of them would take the event loop for a second."""
    if isinstance(value, list) and value and set(map(type, value)) == {int} and min(value) >= 0:
        return value
    if isinstance(value, list) and len(value) > _ONE_BY_ONE:
        raise PydanticCustomError("not_token_ids", "these are no token ids, which are integers of at least 0")
    return check(value)


_TEXTS_ONLY: LiteralString = (
    "this endpoint takes texts only; for pictures and sounds, call model.generate() with the model's processor: "
    "docs/checkpoints.md, Images and sound"
)
_FIELDS = 1024
_ONE_BY_ONE = 1 << 16
_PARTS = 1 << 14  # and calls, of all messages: pydantic makes 100,000 a second
_TEXTS = 2048
BOUNDED = BeforeValidator(_check_field_count)
_FEW_PARTS = BeforeValidator(_check_part_count)
_TEXT_ONLY = BeforeValidator(_check_text_only)
FAIL_FAST = Field(fail_fast=True)
INTEGER = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""Accepts 5.0 for 5, because JSON has only one type of numbers."""
Texts = Annotated[list[str], Field(min_length=1, max_length=_TEXTS), FAIL_FAST]
Ids = Annotated[
    list[Annotated[int, Field(ge=0), INTEGER]], Field(min_length=1), FAIL_FAST, WrapValidator(_check_together)
]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=_TEXTS), FAIL_FAST]
Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<list>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[ManyIds, Tag("<lists of ids>")],
    _chosen(_prompt_form, "a text, texts, token ids, or lists of token ids"),
]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16), BOUNDED]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
T = TypeVar("T")
_TEXT_OR_LIST = _chosen(_form, "a text or a list")
TextOrList = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[T], Field(max_length=_PARTS), FAIL_FAST, Tag("<list>")],
    _TEXT_OR_LIST,
]
Choice = Literal["auto", "none", "required"]
ChoiceOr = Annotated[
    Annotated[Choice, Tag("<text>")] | Annotated[T, Tag("<object>")],
    _chosen(_form, "'auto', 'none', 'required', or an object that names a tool"),
]


class Strict(BaseModel):
    """A body that refuses unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_absent(cls, value: Any) -> Any:
        """Refuse too many fields, and leave out unknown ones without a value."""
        if not isinstance(_check_field_count(value), dict) or value.keys() <= (known := _known(cls)):
            return value
        return {name: given for name, given in value.items() if name in known or given not in (None, "", [])}


@cache
def _known(body: type[BaseModel]) -> Set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class StreamOptions(ResponsesStreamOptions):
    """Contents of a stream besides the answer. `include_usage`: add a last chunk with the numbers of tokens. Not
    OpenAI's fields: `include_ledger`: add the costs so far to every chunk. `include_row`: add to the usage a row of the
    last token, as it is here and as the executor saw it, for clients on this machine only."""

    include_usage: bool = False
    include_ledger: bool = False
    include_row: bool = False


class ForModel(Strict):
    """The fields that all requests to a model share."""

    model: Annotated[str, Field(max_length=1024)]
    user: str | None = None


class Generating(ForModel):
    """The fields that OpenAI's requests for an answer share."""

    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class CompletionFields(Generating):
    """The fields that chat and completions share. Not OpenAI's field: `answer_bucket`: providers see rows and passes in
    multiples of this number, or of the endpoint's own if that is larger."""

    answer_bucket: Annotated[int, Field(ge=1, le=MOST_BUCKET), INTEGER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=_FIELDS),
            BOUNDED,
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=0), INTEGER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0), INTEGER] | None = None
    n: Annotated[int, Field(ge=1, le=128), INTEGER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGER] | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag("<text>")]
            | Annotated[list[StopText], Field(max_length=16), FAIL_FAST, Tag("<list>")],
            _TEXT_OR_LIST,
        ]
        | None
    ) = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), INTEGER] | None = None


class CompletionRequest(CompletionFields):
    """`POST /v1/completions`."""

    prompt: Prompts
    best_of: Literal[1] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), INTEGER] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A call by the model; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call of a tool in an earlier answer. `index`: counts the calls of a stream, and has no effect."""

    id: str
    index: int | None = None
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrList[Annotated[TextPart, _TEXT_ONLY]] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128), FAIL_FAST] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    """A JSON schema. The answer follows the schema; with `strict`, its objects have no other properties."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of the answer: text, any JSON object, or JSON with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(CompletionFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096), FAIL_FAST, _FEW_PARTS]
    chat_template_kwargs: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)] | int | float | bool], Field(max_length=16), BOUNDED]
        | None
    ) = None
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=0), INTEGER] | None = None
    metadata: Metadata | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1), FAIL_FAST] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: ChoiceOr[NamedTool] | None = None
    tools: Annotated[list[Tool], Field(max_length=128), FAIL_FAST] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), INTEGER] | None = None


def text_of(content: str | Sequence["TextPart | InputText | TextBlock"], between: str = "") -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else between.join(part.text for part in content)


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str


InputContent = TextOrList[Annotated[InputText, _TEXT_ONLY]]


class InputItem(Strict):
    """An item of the conversation. `id` and `status` are those of an earlier answer, and have no effect."""

    id: str | None = None
    status: str | None = None


class InputMessage(InputItem):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent


class InputCall(InputItem):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputResult(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class InputReasoning(InputItem):
    """The reasoning of another model's earlier answer, which has no effect."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputResult, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    _chosen(_type, "an item of the type message, function_call, function_call_output or reasoning"),
]


class FunctionTool(Function):
    type: Literal["function"]


class ChosenFunction(FunctionName):
    type: Literal["function"]


class TextFormat(JsonSchema):
    """The format of the answer, as in `ResponseFormat`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponsesRequest(Generating):
    """`POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Item], Field(min_length=1, max_length=4096), FAIL_FAST, _FEW_PARTS, Tag("<list>")],
        _TEXT_OR_LIST,
    ]
    background: Literal[False] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1), INTEGER] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: ChoiceOr[ChosenFunction] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128), FAIL_FAST] | None = None
    truncation: Literal["disabled"] | None = None


class MessageBlock(Strict):
    """A block of a message's content. `cache_control` has no effect: prompts are cached by their beginnings."""

    cache_control: dict[str, Any] | None = None


class TextBlock(MessageBlock):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ToolUseBlock(MessageBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(MessageBlock):
    """The result of a tool. `is_error` has no effect: the text says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrList[Annotated[TextBlock, _TEXT_ONLY]] | None = None
    is_error: bool | None = None


class ThinkingBlock(MessageBlock):
    """The reasoning of an earlier answer, which has no effect."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ThinkingBlock, Tag("<redacted_thinking>")],
    _chosen(_type, f"a block of the type text, tool_use, tool_result or thinking: {_TEXTS_ONLY}"),
]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant"]
    content: TextOrList[Block]


class AnthropicTool(MessageBlock):
    """A tool that the client runs. Tools of Anthropic's servers have other types, and are refused."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class AnthropicChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Strict):
    """`POST /v1/messages`, Anthropic's form. `thinking` has no effect: the model's template decides."""

    model: Annotated[str, Field(max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1), INTEGER]
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096), FAIL_FAST, _FEW_PARTS]
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16), FAIL_FAST] | None = None
    stream: bool | None = None
    system: TextOrList[Annotated[TextBlock, _TEXT_ONLY]] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    thinking: Annotated[dict[str, Any], BOUNDED] | None = None
    tool_choice: AnthropicChoice | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128), FAIL_FAST] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), INTEGER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class CountTokensRequest(MessagesRequest):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: Annotated[int, Field(ge=1), INTEGER] = 1


class EmbeddingRequest(ForModel):
    """`POST /v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None


class ClassifyRequest(ForModel):
    """`POST /classify`, as vLLM has it."""

    input: Prompts
    use_activation: bool | None = None


Documents = Annotated[list[str], Field(min_length=1, max_length=2048), FAIL_FAST]


class ScoreRequest(ForModel):
    """`POST /score`, with both of vLLM's names for the texts."""

    queries: str | Documents = Field(validation_alias=AliasChoices("queries", "text_1"))
    documents: str | Documents = Field(validation_alias=AliasChoices("documents", "text_2"))
    use_activation: bool | None = None


class RerankRequest(ForModel):
    """`POST /rerank`, as Jina, Cohere and vLLM have it."""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0), INTEGER] | None = None
    return_documents: bool | None = None


class _JsonRequest(Request):
    async def json(self) -> Any:
        return from_json(await self.body(), allow_inf_nan=False)


class JsonRoute(APIRoute):
    """A route whose body is strict JSON: no infinity, no lone surrogate, at most 200 levels."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strict
