"""Answers that clients fetch later. A request is answered at once with an id, and the client asks for its result until
it is there, also after a lost connection or a restart of the client."""

import asyncio
import concurrent.futures
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, failed

log = logging.getLogger(__name__)

_POLL_S = 20.0  # that one request waits for a result; the client waits up to 45
_KEPT = 2048  # of one client
_BYTES = 256 << 20  # of requests and results of one client


class Future:
    """The result of one request. Set by any thread, once. `size`: bytes that the request and its result take."""

    def __init__(self, id: str, size: int) -> None:
        self.id, self.size = id, size
        self.cancel: Callable[[], None] = lambda: None
        self.task: asyncio.Task[None] | None = None  # otherwise nobody refers to it
        self.result: concurrent.futures.Future[Response] = concurrent.futures.Future()

    def set(self, result: bytes | dict[str, Any]) -> None:
        """Set the result: a protocol buffer, or a JSON object."""
        binary = "application/x-protobuf"
        answer = Response(result, media_type=binary) if isinstance(result, bytes) else JSONResponse(result)
        with suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            self.result.set_result(answer)
            self.size = len(answer.body)

    def fail(self, error: Exception) -> None:
        """Set the error, as a status and a text. Messages of other libraries may quote data, so only the type of their
        errors is reported."""
        if isinstance(error, SymbiosisError):
            log.error("request %s failed: %s", self.id, error)
            error = failed(error)
        elif not isinstance(error, ApiError):
            name, where = type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s failed: %s\n%s", self.id, name, where)
            error = ApiError(500, f"the model failed on this request ({name}); see the log of the endpoint")
        self.set({"error": f"{error.status}: {error}", "category": "user" if error.status < 500 else "server"})

    async def wait(self) -> Response:
        """Return the result, or an answer that says that the client should ask again."""
        await asyncio.wait([asyncio.wrap_future(self.result)], timeout=_POLL_S)
        if self.result.done():
            return self.result.result()
        return JSONResponse({"type": "try_again", "request_id": self.id, "queue_state": "active"}, status_code=408)


class Futures:
    """The futures of all clients, used by the event loop."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Future]] = {}

    def find(self, client: str, id: str) -> Future | None:
        return self._of.get(client, {}).get(id)

    def cancel(self, client: str, prefix: str) -> None:
        """Cancel the requests whose ids begin with `prefix`."""
        for id, one in self._of.get(client, {}).items():
            if id.startswith(prefix):
                one.cancel()

    def new(self, client: str, id: str, size: int) -> Future:
        """Return a future, which `keep` adds. Old results are dropped, as many as its `size` needs. Raises `ApiError`
        if requests without a result leave no room."""
        if size > _BYTES:
            raise ApiError(413, f"a request and its result would take {size:,} bytes, more than {_BYTES:,}")
        kept = self._of.setdefault(client, {})
        left = sum(one.size for one in kept.values())
        for one in list(kept.values()):
            if (len(kept) >= _KEPT or left + size > _BYTES) and one.result.done():
                left -= kept.pop(one.id).size
        if len(kept) >= _KEPT or left + size > _BYTES:
            raise ApiError(429, f"{len(kept):,} requests of this key have no result yet", code="overloaded")
        return Future(id, size)

    def keep(self, client: str, future: Future) -> None:
        self._of[client][future.id] = future
