"""`POST /v1/chat/completions`."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from symbiosis_priv.errors import ConfigError, OverloadedError
from tenant.endpoint.api import answers
from tenant.endpoint.api.bodies import ChatRequest, JsonRoute, Message, NamedTool
from tenant.endpoint.api.endpoint import endpoint_of
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.routes.tools import ToolText, calling, closed, tagged
from tenant.endpoint.api.running import (
    DOCUMENTED,
    Collected,
    Running,
    choices,
    finish_reason,
    finite,
    respond,
    usage,
    while_connected,
)
from tenant.endpoint.api.service import Service
from tenant.endpoint.engine import requests as engine
from tenant.training.corpus import render_chat

router = APIRouter(route_class=JsonRoute)
_NEW_TOKENS = 2048  # default of a request
_ANY_OBJECT = {"type": "object"}
_SPACE = {"whitespace_pattern": "[ \\n\\t]{0,16}"}  # without a limit, some models write white space up to `max_tokens`


@router.post("/v1/chat/completions", response_model=answers.Chat, responses=DOCUMENTED)
async def chat(body: ChatRequest, http: Request) -> Any:
    """Answer a chat."""
    endpoint = endpoint_of(http)
    prepared = await while_connected(http, PreparedChat.of(body, endpoint.service, endpoint.client(http)))
    return await respond(prepared, http, streamed=body.stream)


class PreparedChat:
    """A chat whose fields have been checked, and its answers."""

    def __init__(self, body: ChatRequest, service: Service, request: engine.EngineRequest, *, in_tags: bool) -> None:
        self.requests = choices(request, body.n or 1)
        self._body = body
        self._service = service
        self._in_tags = in_tags
        self.created = int(time.time())
        self._head: dict[str, Any] = {"id": answers.new_id("chatcmpl"), "created": self.created, "model": body.model}

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
        return cls(body, service, request, in_tags=in_tags)

    def whole(self, results: list[Collected], running: Running) -> answers.Chat:
        """Return the answer as one object."""
        found = []
        for index, answer in enumerate(results):
            text = self._separated()
            content = text.add(answer.text)
            rest, calls = text.end()
            content += rest
            reason: answers.FinishReason = "tool_calls" if calls else finish_reason(answer.done)
            found.append(
                answers.ChatChoice(
                    index=index,
                    message=answers.ChatMessage(
                        content=content if content or not calls else None, tool_calls=calls or None
                    ),
                    logprobs=self._logprobs(answer.tokens),
                    finish_reason=reason,
                )
            )
        dones = [answer.done for answer in results if answer.done is not None]
        return answers.Chat(**self._head, choices=found, usage=usage(dones, 1, running.ledger()))

    async def chunks(self, running: Running) -> AsyncIterator[answers.ChatChunk]:
        """Yield the chunks of a stream."""
        options = self._body.stream_options
        texts = [self._separated() for _ in self.requests]
        dones = []

        def chunk(*deltas: answers.ChatDelta) -> answers.ChatChunk:
            ledger = running.ledger() if options and options.include_ledger else None
            return answers.ChatChunk(**self._head, choices=list(deltas), ledger=ledger)

        for index in range(len(texts)):
            yield chunk(answers.ChatDelta(index=index, delta=answers.ChatPiece(role="assistant", content="")))
        async for index, event in running:
            if isinstance(event, engine.Token):
                text = texts[index].add(event.text)
                logprobs = self._logprobs([event])
                if text or logprobs or (options and options.include_ledger):
                    yield chunk(
                        answers.ChatDelta(index=index, delta=answers.ChatPiece(content=text), logprobs=logprobs)
                    )
            elif isinstance(event, engine.Done):
                dones.append(event)
                text = texts[index].add(event.text)
                rest, calls = texts[index].end()
                if text + rest:
                    yield chunk(answers.ChatDelta(index=index, delta=answers.ChatPiece(content=text + rest)))
                if calls:
                    numbered = [call.model_copy(update={"index": place}) for place, call in enumerate(calls)]
                    yield chunk(answers.ChatDelta(index=index, delta=answers.ChatPiece(tool_calls=numbered)))
                reason: answers.FinishReason = "tool_calls" if calls else finish_reason(event)
                yield chunk(answers.ChatDelta(index=index, delta=answers.ChatPiece(), finish_reason=reason))
        if options is not None and options.include_usage:
            last = chunk()
            last.usage = usage(dones, 1, running.ledger())
            yield last

    def _separated(self) -> "ToolText | _AllText":
        tools = self._body.tools
        if not tools or self._body.tool_choice == "none":
            return _AllText()
        return ToolText(tagged=self._in_tags, names={tool.function.name for tool in tools})

    def _logprobs(self, tokens: Sequence[engine.Token]) -> answers.ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        found = []
        for token in tokens:
            assert token.logprob is not None
            tops = [self._top(other, logprob) for other, logprob in token.logprob.top]
            found.append(answers.ChatLogprob(**vars(self._top(token.id, token.logprob.logprob)), top_logprobs=tops))
        return answers.ChatLogprobs(content=found)

    def _top(self, token: int, logprob: float) -> answers.TopLogprob:
        found = self._service.vocabulary.bytes_of(token)
        return answers.TopLogprob(
            token=self._service.vocabulary.text_of(token),
            logprob=finite(logprob),
            bytes=None if found is None else list(found),
        )


class _AllText:
    """Replaces `ToolText` for requests without tools."""

    def add(self, text: str) -> str:
        return text

    def end(self) -> tuple[str, list[Any]]:
        return "", []


async def _prompt(body: ChatRequest, service: Service, template: str, client: str) -> list[int]:
    messages = [_message(one, place) for place, one in enumerate(body.messages)]
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools]

    def render() -> str:
        return render_chat(messages, service.tokenizer, chat_template=template, tools=tools, add_generation_prompt=True)

    try:
        text = await service.in_thread(client, render)
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages") from error
    prompt = await service.encode(text, param="messages", client=client, special=False)  # the template adds them
    if not prompt:
        raise ApiError(400, "the messages have no tokens", param="messages")
    if len(prompt) > service.context:
        raise service.too_long(len(prompt), "tokens", param="messages")
    return prompt


def _message(message: Message, place: int) -> dict[str, Any]:
    """Return a message as chat templates need it: joined text, and arguments as objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    parts = message.content
    found["content"] = "".join(part.text for part in parts) if isinstance(parts, list) else parts
    if found["content"] is None:
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
        found["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in found["tool_calls"]:
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError) as error:
                raise ApiError(400, "arguments is not JSON", param=f"messages.{place}.tool_calls") from error
    found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    return found


async def _grammar(body: ChatRequest, service: Service, template: str, client: str) -> Any:
    """Return the grammar of the answer: that of `response_format`, or of calls that are forced, strict or not
    parallel."""
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
