"""`POST /v1/chat/completions`."""

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from symbiosis_priv.errors import ConfigError, OverloadedError
from tenant.endpoint.api.bodies import ChatRequest, JsonRoute, Message, NamedTool, StreamOptions, text_of
from tenant.endpoint.api.errors import ApiError, invalid
from tenant.endpoint.api.routes.tools import ToolText, arguments_of, calling, closed, tagged
from tenant.endpoint.api.running import (
    FinishReason,
    Json,
    Running,
    finish_reason,
    finite,
    new_id,
    respond,
    several,
    usage,
    while_connected,
)
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.engine import requests as engine
from tenant.training.corpus import render_chat

router = APIRouter(route_class=JsonRoute)
_NEW_TOKENS = 2048  # default of a request
_ANY_OBJECT = {"type": "object"}
_SAME: Mapping[str, str] = {}
_SPACE = {"whitespace_pattern": "[ \\n\\t]{0,16}"}  # without a limit, some models write white space up to `max_tokens`


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatRequest, http: Request) -> Any:
    """Answer a chat."""
    return await respond(await prepare(http, body), http, streamed=body.stream)


async def prepare(http: Request, given: ChatRequest | Json, *, params: Mapping[str, str] = _SAME) -> "PreparedChat":
    """Prepare a chat, or the fields of one that a request in another form was converted to. `params`: the request's
    field for each field of a chat that has another name there; errors name it."""
    endpoint = endpoint_of(http)

    def named(param: str) -> str:
        return params.get(param.partition(".")[0], param)

    try:
        body = given if isinstance(given, ChatRequest) else ChatRequest.model_validate(given)
        return await while_connected(http, PreparedChat.of(body, endpoint.service, endpoint.client(http)))
    except ValidationError as error:
        raise invalid(error, named) from error
    except ApiError as error:
        error.param = named(error.param or "") or None
        raise


@dataclass
class PreparedChat:
    """A chat whose fields have been checked, and its answers. `_in_tags`: the model writes calls between tags."""

    requests: list[engine.EngineRequest]
    created: int
    _body: ChatRequest
    _service: Service
    _head: Json
    _in_tags: bool

    @classmethod
    async def of(cls, body: ChatRequest, service: Service, client: str) -> "PreparedChat":
        """Check the fields and make the request for the engine."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; pass one of them", param="max_tokens")
        service.adapter(body.model)
        template = service.chat_template()
        in_tags = False
        if body.tools:
            try:
                in_tags = tagged(template)
            except ConfigError as error:
                raise ApiError(400, str(error), param="tools") from error
        prompt = await _prompt(body, service, template, client)
        grammar = await _grammar(body, service, template, client)
        request = service.request(
            body,
            prompt,
            client=client,
            limit=limits.pop() if limits else None,
            default=_NEW_TOKENS,
            grammar=grammar,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        created = int(time.time())
        head = {"id": new_id("chatcmpl"), "created": created, "model": body.model}
        return cls(several(request, body.n or 1), created, body, service, head, in_tags)

    async def chunks(self, running: Running) -> AsyncIterator[Json]:
        body, options = self._body, self._body.stream_options or StreamOptions()
        names = {tool.function.name for tool in body.tools or () if body.tool_choice != "none"}
        texts = [ToolText(tagged=self._in_tags, names=names) for _ in self.requests]
        dones: dict[int, engine.Done] = {}
        head = {**self._head, "object": "chat.completion.chunk"}
        unused = {"usage": None} if options.include_usage else {}

        def ledger() -> Json:
            return {"ledger": vars(running.ledger())} if options.include_ledger else {}

        def chunk(
            index: int, finish: FinishReason | None = None, *, logprobs: Json | None = None, **delta: Any
        ) -> Json:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return {**head, **unused, "choices": [choice], **ledger()}

        for index in range(len(texts)):
            yield chunk(index, role="assistant", content="")
        async for index, event in running:
            if isinstance(event, engine.Token):
                text = texts[index].add(event.text)
                logprobs = self._logprobs(event) if body.logprobs else None
                if text or logprobs or options.include_ledger:
                    yield chunk(index, content=text, logprobs=logprobs)
            elif isinstance(event, engine.Done):
                dones[index] = event
                text = texts[index].add(event.text)
                rest, calls = texts[index].end()
                if text + rest:
                    yield chunk(index, content=text + rest)
                if calls:
                    yield chunk(index, tool_calls=[{"index": place, **call} for place, call in enumerate(calls)])
                last = chunk(index, "tool_calls" if calls else finish_reason(event))
                if event.stop_text is not None:
                    last["choices"][0]["stop_reason"] = event.stop_text  # vLLM's field
                yield last
        if options.include_usage or not body.stream:
            yield {**head, "choices": [], "usage": usage(dones, 1, running.ledger()), **ledger()}

    async def whole(self, running: Running) -> Json:
        choices: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": {"content": [], "refusal": None} if self._body.logprobs else None,
                "finish_reason": "length",
            }
            for index in range(len(self.requests))
        ]
        texts: list[list[str]] = [[] for _ in choices]
        async for chunk in self.chunks(running):
            used = chunk.get("usage")
            for part in chunk["choices"]:
                choice, piece = choices[part["index"]], part["delta"]
                texts[part["index"]].append(piece.get("content", ""))
                choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
                if "tool_calls" in piece:
                    calls = [{name: call[name] for name in ("id", "type", "function")} for call in piece["tool_calls"]]
                    choice["message"]["tool_calls"] = calls
                if part["logprobs"]:
                    choice["logprobs"]["content"] += part["logprobs"]["content"]
        for choice, text in zip(choices, texts, strict=True):
            choice["message"]["content"] = "".join(text) or (None if "tool_calls" in choice["message"] else "")
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": used}

    def _logprobs(self, token: engine.Token) -> Json:
        def top(token: int, logprob: float) -> Json:
            vocabulary = self._service.vocabulary
            known = vocabulary.bytes_of(token)
            as_bytes = None if known is None else list(known)
            return {"token": vocabulary.text_of(token), "logprob": finite(logprob), "bytes": as_bytes}

        assert token.logprob is not None
        tops = [top(other, logprob) for other, logprob in token.logprob.top]
        own = top(token.id, token.logprob.logprob)
        return {"content": [{**own, "top_logprobs": tops}], "refusal": None}


async def _prompt(body: ChatRequest, service: Service, template: str, client: str) -> list[int]:
    """Return the token ids of the rendered messages."""
    messages = [_message(one, place) for place, one in enumerate(body.messages)]
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools]

    options: dict[str, Any] = _options(body, service, template)
    options |= {"chat_template": template, "tools": tools, "add_generation_prompt": True}
    try:
        text = await service.in_thread(client, lambda: render_chat(messages, service.tokenizer, **options))
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages") from error
    prompt = await service.encode(text, param="messages", client=client, special=False)  # the template adds them
    if not prompt:
        raise ApiError(400, "the messages have no tokens", param="messages")
    if len(prompt) > service.context:
        raise service.too_long(len(prompt), "tokens", param="messages")
    return prompt


def _options(body: ChatRequest, service: Service, template: str) -> dict[str, str | int | float | bool]:
    """Return the values for the chat template. Raises `ApiError` for one that the template does not use or must not."""
    options, field = dict(body.chat_template_kwargs or {}), "chat_template_kwargs"
    own = {"messages", "conversations", *service.tokenizer.special_tokens_map, "raise_exception", "strftime_now"}
    if taken := sorted(options.keys() & (own | signature(service.tokenizer.apply_chat_template).parameters.keys())):
        raise ApiError(400, f"{taken[0]} cannot be set here; the fields of the request set it", param=field)
    if body.reasoning_effort is not None:
        options["reasoning_effort"], field = body.reasoning_effort, "reasoning_effort"
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            known = next((one for one in ("enable_thinking", "thinking") if one in template), None)
            instead = f'pass chat_template_kwargs: {{"{known}": false}}' if known else "leave it out"
            raise ApiError(400, f"this model's chat template has no {name[:80]!a}; {instead}", param=field)
    return options


def _message(message: Message, place: int) -> dict[str, Any]:
    """Return a message as chat templates need it: joined text, and arguments as objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = None if message.content is None else text_of(message.content)
    if message.content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise ApiError(400, "the message has no content", param=f"messages.{place}.content")
        found["content"] = ""
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, "only assistants call tools", param=f"messages.{place}.tool_calls")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise ApiError(
            400, "tool_call_id belongs to messages of tools, and to no others", param=f"messages.{place}.tool_call_id"
        )
    if message.tool_calls:
        found["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        for call in found["tool_calls"]:
            try:
                call["function"]["arguments"] = arguments_of(call["function"]["arguments"])
            except (ValueError, RecursionError) as error:
                raise ApiError(
                    400, "arguments is no JSON of an object", param=f"messages.{place}.tool_calls"
                ) from error
    found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    return found


async def _grammar(body: ChatRequest, service: Service, template: str, client: str) -> Any:
    """Return the grammar of the answer: of `response_format`, or of calls that are forced, strict or not parallel."""
    forces = body.tool_choice not in (None, "auto", "none")
    tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    if body.parallel_tool_calls is False and not body.tools:
        raise ApiError(400, "false needs tools", param="parallel_tool_calls")
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        if forces or tools:
            raise ApiError(400, "response_format and tools exclude each other here", param="response_format")
        schema = wanted.json_schema.json_schema if wanted.json_schema else None
        schema = _ANY_OBJECT if wanted.type == "json_object" else schema
        if schema is None:
            raise ApiError(400, "the schema is missing", param="response_format.json_schema.schema")
        schema = closed(schema) if wanted.json_schema and wanted.json_schema.strict else schema
        rules, param = f"start: %json {json.dumps({'x-guidance': _SPACE, **schema})}", "response_format"
    elif forces:
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        functions = [tool for tool in tools if name in (None, tool.name)]
        if not functions:
            raise ApiError(400, "tools has no such tool", param="tool_choice")
        rules, param = calling(functions, template, forced=True), "tool_choice"
    elif tools and (body.parallel_tool_calls is False or any(tool.strict for tool in tools)):
        parallel = body.parallel_tool_calls is not False
        rules, param = calling(tools, template, forced=False, parallel=parallel), "tools"
    else:
        return None
    try:
        return await service.vocabulary.grammar(rules, client=client)
    except ConfigError as error:
        raise ApiError(400, str(error), param=param) from error
    except OverloadedError as error:
        raise ApiError(429, str(error), code="overloaded") from error
