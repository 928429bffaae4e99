"""Answers that clients fetch later. A request is answered at once with an id, and the client asks for its result until
it is there, also after a lost connection or a restart of the client."""

import asyncio
import concurrent.futures
import logging
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response

from symbiosis_priv import errors
from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, public
from tenant.endpoint.tinker.wire import PROTOBUF

log = logging.getLogger(__name__)

_POLL_S = 20.0  # that one request waits for a result; the client waits up to 45
_KEPT = 2048  # of one client
_KEPT_S = 900.0  # after the result was there
_OF_USERS = (
    *(ApiError, errors.ConfigError, errors.TaskError, errors.CheckpointError, errors.NonFiniteError),
    *(errors.UnsupportedMethodError, errors.UnsupportedModelError),
)


class Future:
    """The result of one request. Set by any thread, once."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.cancel: Callable[[], None] = lambda: None
        self.ended: float | None = None
        self._result: concurrent.futures.Future[Response] = concurrent.futures.Future()

    def set(self, result: bytes | dict[str, Any]) -> None:
        """Set the result: a protocol buffer, or a JSON object."""
        answer = Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)
        with suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            self._result.set_result(answer)
            self.ended = time.monotonic()

    def fail(self, error: Exception) -> None:
        """Set the error. Messages of other libraries may quote data, so only the type of their errors is reported."""
        if isinstance(error, SymbiosisError | ApiError):
            text = public(str(error))
        else:
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s failed: %s\n%s", self.id, type(error).__name__, where)
            text = f"the model failed on this request ({type(error).__name__}); see the log of the endpoint"
        self.set({"error": text, "category": "user" if isinstance(error, _OF_USERS) else "server"})

    async def wait(self) -> Response:
        """Return the result, or an answer that says that the client should ask again."""
        await asyncio.wait([asyncio.wrap_future(self._result)], timeout=_POLL_S)
        if self._result.done():
            return self._result.result()
        return JSONResponse({"type": "try_again", "request_id": self.id, "queue_state": "active"}, status_code=408)


class Futures:
    """The futures of all clients, used by the event loop."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Future]] = {}

    def room(self, client: str) -> dict[str, Future]:
        """Return the futures of a client, by id, to which one may be added. Results that are old are dropped first.
        Raises `ApiError` if too many requests have none."""
        kept, now = self._of.setdefault(client, {}), time.monotonic()
        for id, one in list(kept.items()):
            if one.ended is not None and (len(kept) >= _KEPT or now - one.ended > _KEPT_S):
                del kept[id]
        if len(kept) >= _KEPT:
            raise ApiError(429, f"{len(kept):,} requests of this key have no result yet", code="overloaded")
        return kept

    def find(self, client: str, id: str) -> Future | None:
        return self._of.get(client, {}).get(id)
