"""Passes requests from the event loop to the engine, and events back; sends answers whole or as server-sent events."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, refused, shown
from tenant.endpoint.api.service import Endpoint, endpoint_of
from tenant.endpoint.engine import requests as engine
from tenant.endpoint.engine.sequence import Sequence

T = TypeVar("T")
Json = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls"]

_UNREAD = 1024  # events that a client may leave unread; with log probabilities, 4 KiB each
_UNREAD_STEPS = 64  # ... and of a request with many choices, this number per choice
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")
_PING_S = 15  # between comments to a client that waits


class Running:
    """The choices of one HTTP request, while they run in the engine. Iterate to receive their events. `cancel` ends
    them. Raises `ApiError` if the engine refuses one of them."""

    def __init__(self, endpoint: Endpoint, requests: Ordered[engine.EngineRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, engine.Event]] = asyncio.Queue()
        self._unread = max(_UNREAD, _UNREAD_STEPS * len(requests))
        self._shared = len(endpoint.settings.keys) > 1  # other keys may have rows in the same steps
        self._handles: list[Sequence] = []
        self._ended: dict[int, engine.RequestLedger] = {}
        try:
            for index, request in enumerate(requests):
                self._handles.append(endpoint.service.engine.submit(request, partial(self._receive, index)))
        except SymbiosisError as error:
            self.cancel()
            raise refused(error) from error

    def cancel(self) -> None:
        """End all requests that have not ended."""
        for handle in self._handles:
            handle.cancel()

    def ledger(self) -> engine.RequestLedger:
        """Return the costs of all choices so far; rounded, if the exact ones would tell the lengths of other keys'
        texts."""
        each = (self._ended.get(index) or handle.ledger() for index, handle in enumerate(self._handles))
        found = sum(each, engine.RequestLedger())
        return found.rounded() if self._shared else found

    async def __aiter__(self) -> AsyncIterator[tuple[int, engine.Event]]:
        """Yield (index of the request, event). Raises `ApiError` if a request fails, or too many events are unread."""
        while len(self._ended) < len(self._handles):
            if self._events.qsize() > self._unread:
                raise ApiError(503, "the client reads too slowly; the answer was cancelled")
            index, event = await self._events.get()
            if isinstance(event, engine.Failed):
                raise shown(event.error)
            if isinstance(event, engine.Done):
                self._ended[index] = event.ledger
                if event.finish == "cancelled":
                    raise ApiError(503, "the endpoint is stopping; the answer was cancelled", code="stopping")
            yield index, event

    def _receive(self, index: int, event: engine.Event) -> None:
        """Receive an event, in the engine's thread."""

        def put() -> None:
            self._events.put_nowait((index, event))
            if self._events.qsize() > self._unread:
                self.cancel()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)


async def pooled(
    http: HttpRequest,
    texts: Ordered[tuple[Ordered[int], Ordered[int] | None]],
    take: Callable[[int, tuple[float, ...]], None],
    *,
    model: str,
    pooling: engine.Pooling,
    most: int,
) -> None:
    """Compute the vector of each text, and pass its index and the vector to `take`. `texts`: token ids, and for some
    classifiers the type of each. `most`: texts in the engine at a time; its other places are for other requests."""
    endpoint = endpoint_of(http)
    service, adapter = endpoint.service, endpoint.service.adapter(model)

    async def compute(begin: int) -> None:
        requests = [
            engine.EngineRequest(
                id=new_id("text"),
                prompt=tuple(tokens),
                types=None if types is None else tuple(types),
                adapter=adapter,
                client=endpoint.client(http),
                bucket=service.answer_bucket,
                pooling=pooling,
            )
            for tokens, types in texts[begin : begin + most]
        ]
        running = Running(endpoint, requests)
        try:
            async for index, event in running:
                if isinstance(event, engine.Done):
                    take(begin + index, event.vector)
        finally:
            running.cancel()

    for begin in range(0, len(texts), most):
        await while_connected(http, compute(begin))


async def while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """Return the result of `work`, and cancel it as soon as the client closes the connection. Then raises an
    `ApiError`, which nobody receives."""

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        task.cancel()
        gone.cancel()


def usage(dones: Mapping[int, engine.Done], prompts: int, ledger: engine.RequestLedger) -> Json:
    """Return the numbers of tokens; and the ledger and, if requested, a row of the last token, which are not OpenAI's.
    `dones`: the last event of each choice, ordered by prompt. `prompts`: number of different prompts."""
    prompt = sum(dones[index].prompt_tokens for index in range(0, len(dones), len(dones) // prompts))
    new = sum(one.new_tokens for one in dones.values())
    row = dones[0].row if len(dones) == 1 else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": ledger.cached_tokens},
        "ledger": vars(ledger),
        **({} if row is None else {"row": vars(row)}),
    }


def new_id(prefix: str) -> str:
    """Return a new identifier of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def finish_reason(done: engine.Done) -> FinishReason:
    """Return why an answer without calls of tools has ended."""
    return "stop" if done.finish == "stop" else "length"


def finite(logprob: float) -> float:
    """Return a log probability as JSON, which has no infinity; OpenAI's API uses this number."""
    return max(logprob, -9999.0)


def several(request: engine.EngineRequest, n: int) -> list[engine.EngineRequest]:
    """Return `n` requests for the same prompt. Each has its own seed."""
    seed = request.sampling.seed
    samplings = [replace(request.sampling, seed=None if seed is None else seed + index) for index in range(n)]
    return [replace(request, id=f"{request.id}-{i}", sampling=sampling) for i, sampling in enumerate(samplings)]


class Prepared(Protocol):
    """A request whose fields have been checked, and its answer in the form of OpenAI or Anthropic."""

    requests: list[engine.EngineRequest]

    def chunks(self, running: Running) -> AsyncIterator[Json]:
        """Yield the chunks of a stream; the last one has the usage if the client asked for it, or for no stream."""

    async def whole(self, running: Running) -> Json:
        """Return the answer as one object: its chunks put together."""


async def respond(prepared: Prepared, http: HttpRequest, *, streamed: bool | None, named_events: bool = False) -> Any:
    """Run the requests, and return their answer: whole; or as a stream, which ends with `[DONE]` or with an error.
    `named_events`: as Anthropic's streams end: with the last event, or with an event `error`."""
    endpoint = endpoint_of(http)
    if prepared.requests[0].shows_row:
        ends = (http.client.host if http.client else "", http.url.hostname or "")
        if not all(_LOOPBACK.fullmatch(end) for end in ends):
            raise ApiError(403, "rows are shown on the endpoint's own machine only", param="stream_options.include_row")
    running = Running(endpoint, prepared.requests)

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            async for chunk in prepared.chunks(running):
                # ASCII, because many clients divide lines as Python does, also at U+2028
                data = json.dumps(chunk, allow_nan=False, separators=(",", ":"))
                yield ServerSentEvent(data, event=chunk.get("type"))
            if not named_events:
                yield ServerSentEvent("[DONE]")
        except ApiError as error:
            yield ServerSentEvent(json.dumps(error.body()), event="error" if named_events else None)
        finally:
            running.cancel()

    if streamed:
        return EventSourceResponse(
            events(),
            sep="\n",
            ping=_PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="still working", sep="\n"),
            shutdown_grace_period=endpoint.settings.drain_s,
        )
    try:
        return JSONResponse(await while_connected(http, prepared.whole(running)))
    finally:
        running.cancel()
