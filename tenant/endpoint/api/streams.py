"""Sends generated answers, whole or as server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request as HttpRequest

from tenant.endpoint.api.endpoint import endpoint_of
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import Collected, Running, collected, while_connected
from tenant.endpoint.engine.requests import EngineRequest

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": {"type": "object", "required": ["data"]}}}}
}
"""`responses` of a route that may stream, for the OpenAPI document."""

_PING_S = 15


class Prepared(Protocol):
    """A request whose fields have been checked, and its answer."""

    requests: list[EngineRequest]

    def whole(self, results: list[Collected], running: Running) -> BaseModel:
        """Return the whole answer."""

    def chunks(self, running: Running) -> AsyncIterator[BaseModel]:
        """Yield the chunks of a stream."""


async def respond(prepared: Prepared, http: HttpRequest, *, streamed: bool | None) -> Any:
    """Run the requests, and return their answer."""
    endpoint = endpoint_of(http)
    running = Running(endpoint.service.engine, prepared.requests, endpoint.metrics, endpoint.service.users)
    if streamed:
        return stream(running, prepared.chunks(running), drain_s=endpoint.settings.drain_s)
    try:
        results = await while_connected(http, collected(running, len(prepared.requests)))
    finally:
        running.cancel()
    return prepared.whole(results, running)


def stream(running: Running, chunks: AsyncIterator[BaseModel], *, drain_s: float) -> EventSourceResponse:
    """Return a response that sends each chunk when it is ready, and `[DONE]` at the end. An error is the last event.

    Args:
        running: cancelled when the client closes the connection.
        drain_s: seconds that a stream may take to end when the server stops.
    """

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            async for chunk in chunks:
                yield ServerSentEvent(chunk.model_dump_json(by_alias=True), event=getattr(chunk, "type", None))
            yield ServerSentEvent("[DONE]")
        except ApiError as error:
            yield ServerSentEvent(json.dumps(error.body()))
        finally:
            running.cancel()

    return EventSourceResponse(
        events(),
        sep="\n",
        ping=_PING_S,
        ping_message_factory=lambda: ServerSentEvent(comment="still working", sep="\n"),
        shutdown_grace_period=drain_s,
    )
