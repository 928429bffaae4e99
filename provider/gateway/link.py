"""Reads and writes of exact sizes on a TLS socket, with deadlines that a slow peer cannot extend.

Every call of the socket releases the GIL, and with many connections the thread waits to get the GIL back. So a
request's prefix, header and first rows, which arrive as one TLS record, are read with one call.
"""

import contextlib
import select
import socket
import ssl
import time

from symbiosis_priv.errors import ConfigError, ConnectionLostError, DeadlineExceededError
from symbiosis_priv.network.addresses import parse_address

_RECORD = 16_384  # the most plaintext that a TLS record carries
_SCRAP = 65_536
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # POLLRDHUP exists on Linux only
_SLICE_S = 1.0  # the deadline is checked after each attempt of this duration


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError("the peer is too slow (frame_timeout_s)")
    return left


class Link:
    """A TLS connection after its handshake.

    Methods raise ConnectionLostError if the peer leaves within a frame, DeadlineExceededError (or the socket's own
    TimeoutError) if the peer is too slow, and OSError if the connection fails.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection
        self._timeout: float | None = None  # of the socket; cached, because setting it is a system call
        self._ahead = memoryview(bytearray(_RECORD))
        self._unread = self._ahead[:0]  # bytes that were read ahead

    def peer_left(self) -> bool:
        """True if the peer has closed the connection, also if its last bytes are unread. Does not wait. Thread-safe."""
        poll = select.poll()
        try:
            poll.register(self._socket, _GONE)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed on this side
            return True

    def begin(self, view: memoryview, *, timeout: float) -> int:
        """Wait for the first bytes of a frame. Returns the number of bytes read to `view`, 0 if the peer has left."""
        try:
            self._wait_up_to(min(timeout, _SLICE_S))
            return self._take(view)
        except TimeoutError:  # the connection is idle: now a longer timeout is worth a system call
            self._wait_up_to(timeout)
            return self._take(view)

    def receive(self, view: memoryview, *, deadline: float) -> None:
        """Read exactly the bytes that fill `view`."""
        while view:
            if not self._unread:
                self._wait_up_to(min(_remaining(deadline), _SLICE_S))
            try:
                count = self._take(view)
            except TimeoutError:
                continue
            if not count:
                raise ConnectionLostError("the peer left within a frame")
            view = view[count:]

    def discard(self, size: int, *, deadline: float) -> None:
        """Read and drop `size` bytes, in constant memory."""
        scrap = memoryview(bytearray(min(size, _SCRAP)))
        while size:
            part = scrap[: min(size, len(scrap))]
            self.receive(part, deadline=deadline)
            size -= len(part)

    def send(self, head: bytes, payload: memoryview, *, deadline: float) -> None:
        """Send a frame. The head and the start of the payload form one TLS record; the rest is sent without a copy."""
        beside = _RECORD - len(head)
        self._write(memoryview(head + payload[:beside]), deadline)
        if len(payload) > beside:
            self._write(payload[beside:], deadline)

    def close(self) -> None:
        """Send close_notify without waiting for the peer's, and close."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(0)
            self._socket.unwrap()  # sends close_notify, then raises because it would wait
        self._socket.close()

    def _take(self, view: memoryview) -> int:
        """Fill the start of `view` with bytes read ahead or from the socket. Returns their number; 0 at the end."""
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
    """Open a listening socket at `host:port`. Raises `ConfigError`."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)[0][4]
        return socket.create_server(found, family=family, backlog=backlog)
    except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"listen = {address!r}: {reason}; choose another address") from error


def bound_address(listener: socket.socket) -> str:
    """Address of a listening socket, as `host:port`."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hang_up(connection: socket.socket, how: int) -> None:
    """Shut a socket from any thread, and wake its thread. (`SSLSocket.shutdown` would drop the TLS state.)"""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)
