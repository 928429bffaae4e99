"""`POST /v1/responses`: a chat in another format. Nothing is stored, so each request has the whole conversation."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from tenant.endpoint.api import answers, bodies
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.routes.chat import PreparedChat, prepare
from tenant.endpoint.api.running import DOCUMENTED, Running, respond

router = APIRouter(route_class=bodies.JsonRoute)
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""The field of `ResponsesRequest` for each field of a chat request."""


@router.post("/v1/responses", response_model=answers.Response, responses=DOCUMENTED)
async def responses(body: bodies.ResponsesRequest, http: Request) -> Any:
    """Answer a conversation."""
    chat = await prepare(http, lambda: _chat(body), params=_PARAMS)
    return await respond(_Prepared(body, chat), http, streamed=body.stream)


def _chat(body: bodies.ResponsesRequest) -> bodies.ChatRequest:
    """Convert the request to a chat request, with calls inside the assistant's messages."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    for item in [bodies.InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        if isinstance(item, bodies.InputMessage):
            found.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, bodies.InputCall):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, bodies.InputResult):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
    given: dict[str, Any] = {name: getattr(body, name) for name in same}
    given |= {"messages": found, "max_tokens": body.max_output_tokens}
    given["stream_options"] = {"include_usage": True} if body.stream else None
    if body.tools:
        given["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]
    choice = body.tool_choice
    given["tool_choice"] = choice
    if choice is not None and not isinstance(choice, str):
        given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude={"type"})
        kind = body.text.format.type
        given["response_format"] = {"type": kind, "json_schema": form if kind == "json_schema" else None}
    try:
        return bodies.ChatRequest.model_validate(given)
    except ValidationError as error:
        raise ApiError(400, f"too many items, or {error.errors()[0]['msg']}"[:500], param="input") from error


def _content(content: bodies.InputContent) -> str | list[dict[str, Any]]:
    """Convert the content of a message to that of a chat."""
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: bodies.InputText | bodies.InputImage | bodies.AudioPart) -> dict[str, Any]:
    """Convert a part of a message to a part of a chat."""
    if isinstance(part, bodies.InputText):
        return {"type": "text", "text": part.text}
    if isinstance(part, bodies.InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
    return part.model_dump()


class _Prepared:
    """A conversation whose fields have been checked, and its answer."""

    def __init__(self, body: bodies.ResponsesRequest, chat: PreparedChat) -> None:
        self.requests = chat.requests
        self._chat = chat
        given = body.model_dump(by_alias=True, include=set(answers.Response.model_fields) - {"id"}, exclude_none=True)
        self._head: dict[str, Any] = {**given, "id": answers.new_id("resp"), "created_at": chat.created}

    async def whole(self, running: Running) -> answers.Response:
        """Return the answer as one object: the response of the last event."""
        return [event.response async for event in self.chunks(running) if event.response is not None][-1]

    async def chunks(self, running: Running) -> AsyncIterator[answers.ResponseEvent]:
        """Yield the events of a stream."""
        number = 0

        def event(kind: str, **fields: Any) -> answers.ResponseEvent:
            nonlocal number
            number += 1
            return answers.ResponseEvent(type=f"response.{kind}", sequence_number=number - 1, **fields)

        begun = answers.Response(**self._head, status="in_progress", output=[])
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        message = _message("", status="in_progress")
        place = {"item_id": message.id, "output_index": 0, "content_index": 0}
        text, calls, reason, used = "", list[answers.CalledTool](), "stop", None
        async for chunk in self._chat.chunks(running):
            used = chunk.usage or used
            for delta in chunk.choices:
                reason = delta.finish_reason or reason
                calls += delta.delta.tool_calls or ()
                if not delta.delta.content:
                    continue
                if not text:
                    yield event("output_item.added", output_index=0, item=message.model_copy(update={"content": []}))
                    yield event("content_part.added", part=message.content[0], **place)
                text += delta.delta.content
                yield event("output_text.delta", delta=delta.delta.content, logprobs=[], **place)
        items: list[answers.MessageItem | answers.FunctionCallItem] = []
        if text:
            message = _message(text, id=message.id)
            items.append(message)
            yield event("output_text.done", text=text, logprobs=[], **place)
            yield event("content_part.done", part=message.content[0], **place)
            yield event("output_item.done", output_index=0, item=message)
        for called in calls:
            where, function = {"output_index": len(items)}, called.function
            call = answers.FunctionCallItem(
                id=answers.new_id("fc"), call_id=called.id, name=function.name, arguments=function.arguments
            )
            items.append(call)
            empty = call.model_copy(update={"arguments": "", "status": "in_progress"})
            yield event("output_item.added", item=empty, **where)
            yield event("function_call_arguments.delta", item_id=call.id, delta=call.arguments, **where)
            yield event("function_call_arguments.done", item_id=call.id, arguments=call.arguments, **where)
            yield event("output_item.done", item=call, **where)
        assert used is not None  # the last chunk has the usage
        cut = reason == "length"
        ended = answers.Response(
            **self._head,
            status="incomplete" if cut else "completed",
            incomplete_details=answers.IncompleteDetails() if cut else None,
            output=items,
            usage=answers.ResponseUsage(
                input_tokens=used.prompt_tokens,
                input_tokens_details=used.prompt_tokens_details,
                output_tokens=used.completion_tokens,
                total_tokens=used.total_tokens,
                ledger=used.ledger,
            ),
        )
        yield event(ended.status, response=ended)


def _message(text: str, **fields: Any) -> answers.MessageItem:
    return answers.MessageItem(**{"id": answers.new_id("msg"), **fields}, content=[answers.OutputText(text=text)])
