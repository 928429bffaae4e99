"""`POST /v1/messages`: a chat in Anthropic's form, which coding agents speak."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from tenant.endpoint.api import bodies
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.routes.chat import PreparedChat, prepare
from tenant.endpoint.api.running import FinishReason, Json, Running, new_id, respond

router = APIRouter(route_class=bodies.JsonRoute)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_PARAMS = {"stop": "stop_sequences", "parallel_tool_calls": "tool_choice"}
"""The field of `MessagesRequest` for each field of a chat request that has another name."""


@router.post("/v1/messages", response_model=None)
async def messages(body: bodies.MessagesRequest, http: Request) -> Any:
    """Answer a conversation."""
    chat = await prepare(http, _chat(body), params=_PARAMS)
    return await respond(_Prepared(body, chat), http, streamed=body.stream, named_events=True)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: bodies.CountTokensRequest, http: Request) -> dict[str, int]:
    """Count the tokens of a conversation."""
    chat = await prepare(http, _chat(body), params=_PARAMS)
    return {"input_tokens": len(chat.requests[0].prompt)}


def _chat(body: bodies.MessagesRequest) -> Json:
    """Convert the request to the fields of a chat request."""
    if body.messages[-1].role == "assistant":
        raise ApiError(400, "the last message is the assistant's; end with one of the user", param="messages")
    found: list[dict[str, Any]] = []
    if body.system is not None:
        system = bodies.text_of(body.system, "\n")
        found.append({"role": "system", "content": system})
    for message in body.messages:
        text = message.content
        found += _messages(message.role, [bodies.TextBlock(type="text", text=text)] if isinstance(text, str) else text)
    same = ("model", "max_tokens", "temperature", "top_k", "top_p", "stream")
    given: dict[str, Any] = {name: getattr(body, name) for name in same}
    given |= {"messages": found, "stop": body.stop_sequences}
    given["stream_options"] = {"include_usage": True} if body.stream else None
    if body.tools:
        functions = [
            {"name": one.name, "description": one.description, "strict": one.strict, "parameters": one.input_schema}
            for one in body.tools
        ]
        given["tools"] = [{"type": "function", "function": function} for function in functions]
    if (choice := body.tool_choice) is not None:
        given["tool_choice"] = _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
        given["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return given


def _messages(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert a message to messages of a chat: the results of tools first, as the messages that they are there."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, bodies.ToolResultBlock):
            said = bodies.text_of(block.content or "")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
        elif isinstance(block, bodies.ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, bodies.ThinkingBlock):
            texts.append(block.text)
    if texts or calls or not results:
        results.append({"role": role, "content": "".join(texts) if texts else None, "tool_calls": calls or None})
    return results


class _Prepared:
    """A conversation whose fields have been checked, and its answer."""

    def __init__(self, body: bodies.MessagesRequest, chat: PreparedChat) -> None:
        self.requests = chat.requests
        self._chat = chat
        self._begun: Json = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(chat.requests[0].prompt), 0),
        }
        self._message = self._begun

    async def whole(self, running: Running) -> Json:
        async for _ in self.chunks(running):
            pass
        return self._message

    async def chunks(self, running: Running) -> AsyncIterator[Json]:
        def event(kind: str, **fields: Any) -> Json:
            return {"type": kind, **fields}

        yield event("message_start", message=self._begun)
        reason, stopped, used = None, None, None
        texts, calls, content = list[str](), list[Json](), list[Json]()
        async for chunk in self._chat.chunks(running):
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                reason, stopped = choice["finish_reason"] or reason, choice.get("stop_reason") or stopped
                calls += choice["delta"].get("tool_calls", ())
                if text := choice["delta"].get("content"):
                    if not texts:
                        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                    texts.append(text)
                    yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        if texts:
            content.append({"type": "text", "text": "".join(texts)})
            yield event("content_block_stop", index=0)
        for call in calls:
            index, arguments = len(content), call["function"]["arguments"]
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            content.append({**block, "input": json.loads(arguments)})
            yield event("content_block_start", index=index, content_block=block)
            yield event(
                "content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": arguments}
            )
            yield event("content_block_stop", index=index)
        assert used is not None  # the last chunk has the usage
        assert reason is not None
        cached = used["prompt_tokens_details"]["cached_tokens"]
        usage = _usage(used["prompt_tokens"] - cached, used["completion_tokens"], cached) | {"ledger": used["ledger"]}
        ended = {"stop_reason": "stop_sequence" if stopped else _REASONS[reason], "stop_sequence": stopped}
        self._message = {**self._begun, **ended, "content": content, "usage": usage}
        yield event("message_delta", delta=ended, usage=usage)
        yield event("message_stop")


def _usage(prompt: int, new: int, cached: int = 0) -> Json:
    """Return numbers of tokens; those of the prompt are without those from the cache."""
    return {
        "input_tokens": prompt,
        "output_tokens": new,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
