"""Exact reads and whole writes on a TLS socket, under deadlines that a trickle of bytes cannot extend.

Every call of the socket lets go of the interpreter's lock, and beside many other connections it takes a while to get it
back. So a request's prefix, header and first rows, which come as one TLS record, are read at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time

from symbiosis_priv.errors import ConfigError, ConnectionLostError, DeadlineExceededError
from symbiosis_priv.network.addresses import parse_address

_RECORD = 16_384  # the most plaintext that a TLS record carries
_SCRAP = 65_536
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last one where there is one
_SLICE_S = 1.0  # a read or a write is tried for so long before the deadline is looked at


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError("the peer is too slow (frame_timeout_s)")
    return left


class Link:
    """A TLS connection after its handshake.

    Methods raise ConnectionLostError when the peer leaves in the middle of something, DeadlineExceededError (or the
    socket's own TimeoutError) when it is too slow, OSError when the network breaks.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection
        self._timeout: float | None = None  # the socket's; setting it is a system call, and there are many records
        self._ahead = memoryview(bytearray(_RECORD))
        self._unread = self._ahead[:0]  # what has been read ahead

    def peer_left(self) -> bool:
        """Whether the peer has closed the connection, whatever it sent before. Without waiting, from any thread."""
        poll = select.poll()
        try:
            poll.register(self._socket, _GONE)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed on this side
            return True

    def begin(self, view: memoryview, *, timeout: float) -> int:
        """Wait for the first bytes of a frame; returns how many of `view` were filled, 0 if the peer has left."""
        try:
            self._wait_up_to(min(timeout, _SLICE_S))
            return self._take(view)
        except TimeoutError:  # it is idle, and only then the socket's timeout is worth changing
            self._wait_up_to(timeout)
            return self._take(view)

    def receive(self, view: memoryview, *, deadline: float) -> None:
        """Fill `view`."""
        while view:
            if not self._unread:
                self._wait_up_to(min(_remaining(deadline), _SLICE_S))
            try:
                count = self._take(view)
            except TimeoutError:
                continue
            if not count:
                raise ConnectionLostError("the peer left in the middle of a frame")
            view = view[count:]

    def discard(self, size: int, *, deadline: float) -> None:
        """Read and forget `size` bytes, in constant memory."""
        scrap = memoryview(bytearray(min(size, _SCRAP)))
        while size:
            part = scrap[: min(size, len(scrap))]
            self.receive(part, deadline=deadline)
            size -= len(part)

    def send(self, head: bytes, payload: memoryview, *, deadline: float) -> None:
        """Send a frame: the head and what fits beside it as one TLS record, the rest from where it lies."""
        beside = _RECORD - len(head)
        self._write(memoryview(head + payload[:beside]), deadline)
        if len(payload) > beside:
            self._write(payload[beside:], deadline)

    def close(self) -> None:
        """Say goodbye without waiting for the peer's, and close."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(0)
            self._socket.unwrap()  # sends close_notify, then finds that it would have to wait
        self._socket.close()

    def _take(self, view: memoryview) -> int:
        """Fill the beginning of `view`, with what was read ahead or from the socket; returns how much, 0 at the end."""
        if not self._unread:
            if len(view) >= len(self._ahead):
                return self._socket.recv_into(view)
            self._unread = self._ahead[: self._socket.recv_into(self._ahead)]
        part = self._unread[: len(view)]
        view[: len(part)] = part
        self._unread = self._unread[len(part) :]
        return len(part)

    def _write(self, view: memoryview, deadline: float) -> None:
        while view:
            self._wait_up_to(min(_remaining(deadline), _SLICE_S))
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:
                continue

    def _wait_up_to(self, timeout: float) -> None:
        if timeout != self._timeout:
            self._timeout = timeout
            self._socket.settimeout(timeout)


def listen(address: str, *, backlog: int) -> socket.socket:
    """A listening socket at `host:port`. Raises `ConfigError`."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)[0][4]
        return socket.create_server(found, family=family, backlog=backlog)
    except (OSError, ValueError) as error:  # the latter for hosts that are no names at all
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"listen = {address!r}: {reason}; choose another address") from error


def bound_address(listener: socket.socket) -> str:
    """`host:port` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hang_up(connection: socket.socket, how: int) -> None:
    """Wake a thread that waits on a socket of another thread (`SSLSocket.shutdown` would drop the TLS state)."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)
