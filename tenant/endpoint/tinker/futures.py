"""Answers that clients fetch later. A request is answered at once with an id, and the client asks for its result until
it is there, also after a lost connection or a restart of the client."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any

from starlette.responses import JSONResponse, Response

from tenant.endpoint.api.errors import ApiError, shown

Result = bytes | dict[str, Any]
"""The result of a request: a protocol buffer, or a JSON object."""

_POLL_S = 20.0  # that one request waits for a result; the client waits up to 45
_KEPT = 2048  # of one client
_BYTES = 256 << 20  # of requests and results of one client


class Future:
    """One request, whose `work` returns its result. `size`: bytes that the request and its result take."""

    def __init__(self, work: Awaitable[Result], size: int) -> None:
        self.size = size
        self.task = asyncio.get_running_loop().create_task(self._answered(work))

    async def answer(self) -> Response:
        """Return the result, or an answer that says that the client should ask again."""
        await asyncio.wait([self.task], timeout=_POLL_S)
        if not self.task.done():
            return JSONResponse({"type": "try_again", "queue_state": "active"}, status_code=408)
        return _failed(ApiError(499, "the request was cancelled")) if self.task.cancelled() else self.task.result()

    async def _answered(self, work: Awaitable[Result]) -> Response:
        try:
            result = await work
            binary = isinstance(result, bytes)
            answer = Response(result, media_type="application/x-protobuf") if binary else JSONResponse(result)
        except Exception as error:
            answer = _failed(shown(error))
        self.size = len(answer.body)
        return answer


class Futures:
    """The futures of all clients, used by the event loop."""

    def __init__(self) -> None:
        self._of = defaultdict[str, dict[str, Future]](dict)

    def find(self, client: str, id: str) -> Future | None:
        return self._of[client].get(id)

    def make_room(self, client: str, size: int) -> None:
        """Forget old results, as many as a request of `size` bytes needs. Raises `ApiError` if requests without a
        result leave no room."""
        if size > _BYTES:
            raise ApiError(413, f"a request and its result would take {size:,} bytes, more than {_BYTES:,}")
        kept = self._of[client]
        left = _BYTES - size - sum(one.size for one in kept.values())
        for id, one in list(kept.items()):
            if (left < 0 or len(kept) >= _KEPT) and one.task.done():
                left += kept.pop(id).size
        if left < 0 or len(kept) >= _KEPT:
            raise ApiError(429, f"{len(kept):,} requests of this key have no result yet", code="overloaded")

    def start(self, client: str, id: str, work: Awaitable[Result], size: int) -> Future:
        future = self._of[client][id] = Future(work, size)
        return future

    def cancel(self, client: str, prefix: str) -> None:
        """Cancel the requests whose ids begin with `prefix`."""
        for id, one in self._of[client].items():
            if id.startswith(prefix):
                one.task.cancel()


def _failed(error: ApiError) -> Response:
    return JSONResponse({"error": f"{error.status}: {error}", "category": "user" if error.status < 500 else "server"})
