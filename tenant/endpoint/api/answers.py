"""The bodies of answers, as pydantic models. Most are those of OpenAI's API."""

import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from tenant.endpoint.api.bodies import ChosenFunction, FunctionTool, TextOptions, ToolCall
from tenant.endpoint.engine.requests import RequestLedger, ShownRow

Absent = Field(default=None, exclude_if=lambda value: value is None)
"""A field that is left out if it is None."""

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Number of tokens of the prompt whose keys and values were cached."""

    cached_tokens: int


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Usage(EmbeddingUsage):
    """Numbers of tokens; and the ledger and, if requested, a row of the last token (not OpenAI's fields)."""

    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    ledger: RequestLedger
    row: ShownRow | None = Absent


class TextLogprobs(BaseModel):
    """Log probabilities of a completion, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """One completion; in a stream, the new text of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None


class Chunk(BaseModel):
    """What answers of `/v1/completions` and `/v1/chat/completions` have in common, and the chunks of their streams.
    `usage` is left out unless it was set, also to None."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    ledger: RequestLedger | None = Absent

    @model_serializer(mode="wrap")
    def _without_unset(self, serialize: SerializerFunctionWrapHandler) -> Any:
        found = serialize(self)
        if "usage" not in self.model_fields_set:
            found.pop("usage")
        return found


class Completion(Chunk):
    """The answer of `/v1/completions`, or a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer, with the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a message, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledTool(ToolCall):
    index: int | None = Absent
    type: Literal["function"] = "function"


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | None = Absent


class ChatPiece(BaseModel):
    """The new text or calls of a message, in a stream."""

    role: Literal["assistant"] | None = Absent
    content: str | None = Absent
    tool_calls: list[CalledTool] | None = Absent


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Chat(Chunk):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = Absent
    """The stop text that ended the answer (vLLM's field)."""


class ChatChunk(Chunk):
    """A chunk of the stream of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed"] = "completed"
    content: list[OutputText]


class FunctionCallItem(BaseModel):
    """A call of a tool; `arguments` is JSON."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed"] = "completed"


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class OutputTokensDetails(BaseModel):
    """Always 0, because reasoning is not separated from the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Numbers of tokens, and the ledger (not one of OpenAI's fields)."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int
    ledger: RequestLedger


class Response(BaseModel):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[MessageItem | FunctionCallItem]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction = "auto"
    tools: list[FunctionTool] = []
    top_p: float | None = None
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """An event of the stream of `/v1/responses`. Its type determines which fields it has."""

    type: str
    sequence_number: int
    response: Response | None = Absent
    item_id: str | None = Absent
    output_index: int | None = Absent
    content_index: int | None = Absent
    item: MessageItem | FunctionCallItem | None = Absent
    part: OutputText | None = Absent
    delta: str | None = Absent
    text: str | None = Absent
    arguments: str | None = Absent
    logprobs: list[None] | None = Absent


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Numbers of tokens, without those from the cache, and the ledger (not one of Anthropic's fields)."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    ledger: RequestLedger | None = Absent


class AnthropicMessage(BaseModel):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock] = []
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of the stream of `/v1/messages`. Its type determines which fields it has."""

    type: str
    message: AnthropicMessage | None = Absent
    index: int | None = Absent
    content_block: TextBlock | ToolUseBlock | None = Absent
    delta: dict[str, Any] | None = Absent
    usage: MessageUsage | None = Absent


class Embedding(BaseModel):
    """The embedding of one input: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Classification(BaseModel):
    """The class of one text. `label`: of the largest of `probs`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(BaseModel):
    text: str


class Ranked(BaseModel):
    """A document, by its place in the request."""

    index: int
    document: RankedText | None = Absent
    relevance_score: float


class Ranking(BaseModel):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class Model(BaseModel):
    """A model: the base model, or an adapter with its base model as `parent`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def new_id(prefix: str) -> str:
    """Return a new identifier of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"
