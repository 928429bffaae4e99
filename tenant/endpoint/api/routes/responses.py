"""`POST /v1/responses`: a chat in another format. Nothing is stored, so each request has the whole conversation."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from tenant.endpoint.api import bodies
from tenant.endpoint.api.routes.chat import PreparedChat, prepare
from tenant.endpoint.api.running import Json, Running, new_id, respond

router = APIRouter(route_class=bodies.JsonRoute)
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""The field of `ResponsesRequest` for each field of a chat request."""
_UNSET: Json = {
    **dict.fromkeys(("error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id")),
    **dict.fromkeys(("temperature", "text", "top_p", "usage")),
    **{"metadata": {}, "parallel_tool_calls": True, "store": False, "tool_choice": "auto", "tools": []},
}
"""The fields of an answer that the request or the answer's end sets."""


@router.post("/v1/responses", response_model=None)
async def responses(body: bodies.ResponsesRequest, http: Request) -> Any:
    """Answer a conversation."""
    chat = await prepare(http, _chat(body), params=_PARAMS)
    return await respond(_Prepared(body, chat), http, streamed=body.stream)


def _chat(body: bodies.ResponsesRequest) -> Json:
    """Convert the request to the fields of a chat request, with calls inside the assistant's messages."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    for item in [bodies.InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        if isinstance(item, bodies.InputMessage):
            found.append({"role": item.role, "content": bodies.text_of(item.content)})
        elif isinstance(item, bodies.InputCall):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, bodies.InputResult):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": bodies.text_of(item.output)})
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
    return given


class _Prepared:
    """A conversation whose fields have been checked, and its answer."""

    def __init__(self, body: bodies.ResponsesRequest, chat: PreparedChat) -> None:
        self.requests = chat.requests
        self._chat = chat
        given = {name: value for name, value in body.model_dump(by_alias=True).items() if value is not None}
        self._head: Json = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": chat.created,
            "model": body.model,
            **{name: given.get(name, value) for name, value in _UNSET.items()},
        }

    async def whole(self, running: Running) -> Json:
        found: list[Json] = [event["response"] async for event in self.chunks(running) if "response" in event]
        return found[-1]

    async def chunks(self, running: Running) -> AsyncIterator[Json]:
        number = 0

        def event(kind: str, **fields: Any) -> Json:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

        begun = {**self._head, "status": "in_progress", "output": []}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        message: Json = {"type": "message", "id": new_id("msg"), "role": "assistant", "status": "in_progress"}
        part: Json = {"type": "output_text", "text": "", "annotations": []}
        place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
        text, calls, reason, used = "", list[Json](), "stop", None
        async for chunk in self._chat.chunks(running):
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
                calls += choice["delta"].get("tool_calls", ())
                if not (more := choice["delta"].get("content")):
                    continue
                if not text:
                    yield event("output_item.added", output_index=0, item={**message, "content": []})
                    yield event("content_part.added", part=part, **place)
                text += more
                yield event("output_text.delta", delta=more, logprobs=[], **place)
        items: list[Json] = []
        if text:
            part = {**part, "text": text}
            message = {**message, "status": "completed", "content": [part]}
            items.append(message)
            yield event("output_text.done", text=text, logprobs=[], **place)
            yield event("content_part.done", part=part, **place)
            yield event("output_item.done", output_index=0, item=message)
        for called in calls:
            where, arguments = {"output_index": len(items)}, called["function"]["arguments"]
            call = {
                "type": "function_call",
                "id": new_id("fc"),
                "call_id": called["id"],
                **called["function"],
                "status": "completed",
            }
            items.append(call)
            yield event("output_item.added", item={**call, "arguments": "", "status": "in_progress"}, **where)
            yield event("function_call_arguments.delta", item_id=call["id"], delta=arguments, **where)
            yield event("function_call_arguments.done", item_id=call["id"], arguments=arguments, **where)
            yield event("output_item.done", item=call, **where)
        assert used is not None  # the last chunk has the usage
        cut = reason == "length"
        status = "incomplete" if cut else "completed"
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # it is not separated from the answer
            "total_tokens": used["total_tokens"],
            "ledger": used["ledger"],
        }
        details = {"reason": "max_output_tokens"} if cut else None
        ended = {"status": status, "incomplete_details": details, "output": items, "usage": usage}
        yield event(status, response={**self._head, **ended})
