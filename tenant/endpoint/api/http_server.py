"""Runs the application on a listening socket, with uvicorn."""

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

_HEAD_BYTES = 32 << 10
_HEAD_S = 10.0  # seconds in which the head of a request must arrive
_SEND_BYTES = 64 << 10
_READ_S = 60.0  # seconds in which a client must read what was sent
CONNECTIONS = 512
"""Limit of connections. A further connection closes the one that has waited longest for its client."""


class _Connection(H11Protocol):
    """Closes connections that send no request or do not read the answer, for which uvicorn waits without a limit."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, _Connection) and one._late is not None]
            min(waiting, key=lambda one: one._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(_READ_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._watch()

    def _watch(self) -> None:
        if self.flow.write_paused:
            return  # data from the client does not end the wait for the client to read
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._late is None and not self.transport.is_closing():
            self._wait(_HEAD_S)

    def _wait(self, seconds: float) -> None:
        self._stop_watching()
        self._since = self.loop.time()
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """One endpoint's server. `drain_s`: seconds that answers may take to end after SIGTERM."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, drain_s: float) -> None:
        self._listener = listener
        # The kernel would grow the buffer to 4 MiB, and a client that does not read would be noticed so much later.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,  # query strings would be logged
                log_config=None,
                log_level="warning",
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=_HEAD_BYTES,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until SIGTERM or Ctrl-C, which uvicorn raises again at the end."""
        try:
            super().run(sockets=[self._listener])
        finally:
            # a signal sets it for all servers of this process, and it would end their streams
            AppStatus.should_exit = False
