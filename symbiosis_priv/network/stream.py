"""Reads and writes of exact sizes over TLS, with deadlines that a slow peer cannot extend, for clients and servers.

Every read of TLS releases the GIL, and with many connections the thread waits to get the GIL back. So a request's
prefix, header and first rows, which arrive as one TLS record, are read with one call.
"""

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Final, TypeVar

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire
from symbiosis_priv.network.records import RecordStream

T = TypeVar("T")
SLICE_S: Final = 2.0
"""Seconds of one wait, before `waiting` is called."""
_RECORD: Final = 1 << 14  # the most plaintext that a TLS record carries
_SCRAP: Final = 1 << 16
_SCRAP_RECORD: Final = 1 << 10
_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # POLLRDHUP exists on Linux only

Waiting = Callable[[float, str], None]
"""Called with (end of the wait, what the wait is for) after every slice of a wait."""


def within(deadline: float, operation: Callable[[float], T], why: str, *, waiting: Waiting | None = None) -> T:
    """Repeat an operation with a timeout until it succeeds.

    The timeout stays the same, because changing it takes a system call. Without `waiting`, a second attempt has all the
    time that is left.

    Args:
        deadline: time on the clock of `time.monotonic`.
        operation: called with a timeout in seconds.
        why: what the wait is for.
        waiting: called after every slice of the wait; may raise.

    Raises:
        TimeoutError: the deadline has passed.
    """
    most = SLICE_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            return operation(min(left, most))
        except TimeoutError:
            if waiting is None:
                most = math.inf
            else:
                waiting(deadline, why)
    raise TimeoutError(why)


class FrameStream(RecordStream):
    """A `RecordStream` with deadlines, in seconds on the clock of `time.monotonic`.

    Methods raise ConnectionLostError if the peer leaves within a frame, TimeoutError if the peer is too slow, and
    OSError if the connection fails.
    """

    waiting: Waiting | None = None
    """Called after every slice of a wait; see `within`."""
    on_scraps: Callable[[int], None] | None = None
    """Called with the number of scraps of a read: records that carried less than 1 KiB each, on average."""
    free_scraps = 0
    """Number of scraps before `on_scraps` is called."""
    _received = 0
    _unread = memoryview(b"")  # bytes that were read ahead

    @property
    def consumed(self) -> int:
        """Number of bytes that the methods below have returned."""
        return self._received - len(self._unread)

    def peer_left(self) -> bool:
        """True if the peer has closed the connection, also if its last bytes are unread. Does not wait. Thread-safe."""
        poll = select.poll()
        try:
            poll.register(self.raw, _GONE)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed on this side
            return True

    def begin(self, *, deadline: float) -> bool:
        """Wait for the first bytes of a frame. Returns False if the peer has left."""
        if not self._unread:
            self._unread = self._ahead[: self._read(self._ahead, deadline)]
        return bool(self._unread)

    def receive_head(self, *, max_payload: int, deadline: float) -> tuple[memoryview, int]:
        """Read the prefix and the header of a frame.

        Args:
            max_payload: limit of the payload that follows, in bytes.

        Returns:
            The header's bytes, valid until the next call, and the number of payload bytes that follow.

        Raises:
            ProtocolError: not a frame, or a size exceeds its limit. The stream cannot be used again.
        """
        prefix = self._next(wire.PREFIX.size, deadline)
        header_size, payload_size = wire.decode_prefix(prefix, max_payload=max_payload)
        return self._next(header_size, deadline), payload_size

    def receive(self, view: memoryview, *, deadline: float) -> None:
        """Read exactly the bytes that fill `view`."""
        while view:
            if self._unread:
                count = self._copy_unread(view)
            elif len(view) < _RECORD:
                count = self._copy_unread(view) if self.begin(deadline=deadline) else 0
            else:
                count = self._read(view, deadline)
            if not count:
                raise ConnectionLostError("the other side closed the connection")
            view = view[count:]

    def discard(self, size: int, *, deadline: float) -> None:
        """Read and drop `size` bytes, in constant memory."""
        scrap = memoryview(bytearray(min(size, _SCRAP)))
        while size:
            part = scrap[: min(size, len(scrap))]
            self.receive(part, deadline=deadline)
            size -= len(part)

    def send_frame(self, head: bytes, payload: memoryview, *, deadline: float) -> None:
        """Send a frame. The head and the start of the payload form one TLS record; the rest is sent without a copy."""
        beside = _RECORD - len(head)
        for view in (memoryview(head + payload[:beside]), payload[beside:]):
            while view:
                sent = within(deadline, partial(self.send, view), "it does not take the request", waiting=self.waiting)
                view = view[sent:]

    def _next(self, size: int, deadline: float) -> memoryview:
        """The next `size` bytes. They are not copied if they have arrived together."""
        if (self._unread or self.begin(deadline=deadline)) and len(self._unread) >= size:
            part, self._unread = self._unread[:size], self._unread[size:]
            return part
        part = memoryview(bytearray(size))
        self.receive(part, deadline=deadline)
        return part

    def _copy_unread(self, view: memoryview) -> int:
        count = min(len(view), len(self._unread))
        view[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count

    @cached_property
    def _ahead(self) -> memoryview:
        return memoryview(bytearray(_RECORD))

    def _read(self, view: memoryview, deadline: float) -> int:
        before = self.records
        count = within(deadline, partial(self.recv_into, view), "it has not answered yet", waiting=self.waiting)
        self._received += count
        if self.on_scraps is not None and (scraps := self.records - before - count // _SCRAP_RECORD) > 0:
            self.free_scraps -= scraps
            if self.free_scraps < 0:
                self.on_scraps(min(scraps, -self.free_scraps))
        return count


def shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a socket from any thread, and wake the thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
