"""TLS over a socket, for clients and servers: many records per system call (`RecordStream`), and frames of exact sizes
with deadlines that a slow peer cannot extend (`FrameStream`).

`ssl.SSLSocket` makes two system calls for every record that it reads and one for every record that it writes. A record
carries 16 KiB, so one step of fine-tuning has tens of thousands of records. This module keeps records in memory between
TLS and the socket, and sends all of them with one system call. Errors and timeouts are those of `ssl.SSLSocket`. After
a timeout the same call may be repeated, and continues where it stopped.

The kernel enforces the timeout of the blocking socket. (Python's own timeout needs one system call to wait and another
one to read.) The TLS object is read only if it may have bytes: otherwise it raises an error, and raising the error
takes longer than decrypting a row. Every read of TLS releases the GIL, and with many connections the thread waits to
get the GIL back. So a request's prefix, header and first rows, which arrive as one TLS record, are read with one call.
"""

import contextlib
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Final, TypeVar

import numpy as np

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire

_CHUNK: Final = 1 << 18  # bytes of one system call: more would leave the cache before they are decrypted
_CHUNK_SERVER: Final = 1 << 16  # a server has many connections, and TLS keeps memory of this size for each
_PARTIAL_RECORD: Final = 1 << 15  # larger than the part of an incomplete record that TLS may hold
_GATHER_S: Final = 0.02  # the longest wait for a full read while fewer bytes have arrived
_TIMEVAL: Final = struct.Struct("@ll")
_TIMED_OUT: Final = "timed out"


class _Arrived(threading.local):
    """Each thread's memory for bytes that have arrived and are fed to TLS at once."""

    def __init__(self) -> None:
        self.buffer = np.empty(_CHUNK, dtype=np.uint8).data  # not cleared, as a bytearray would be


_arrived = _Arrived()


class RecordStream:
    """A TLS connection over a connected socket, for one thread at a time. The timeout of a call, in seconds, covers the
    whole call. With a timeout of 0, a call does not wait. `host` is the name that the server's certificate must carry;
    None on the server's side."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> None:
        raw.settimeout(None)
        self.raw = raw
        self._timeout = -1.0  # timeout of the socket
        self._flags = 0
        self._chunk = _CHUNK_SERVER if host is None else _CHUNK
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        """The negotiated TLS parameters; not for reading or writing."""
        self._arrival = select.poll()
        self._arrival.register(raw, select.POLLIN)
        self._to_send = memoryview(b"")
        self._awaited = 1  # number of bytes for which the socket waits
        self._encrypted = 0  # the caller's bytes in `_to_send`
        self._exhausted = False  # TLS has returned all bytes that can be decrypted so far
        self.records = 0
        """Number of records that were read."""

    def handshake(self, timeout: float) -> None:
        """Make the TLS handshake. Raises `OSError`: as `ssl.SSLSocket.do_handshake`. After a TimeoutError, another call
        continues the handshake."""
        until = self._begin(timeout)
        try:
            while True:
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush(until)
                    _check_time(until)
                    if not self._take_in():
                        self._incoming.write_eof()  # the next attempt raises the error
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._flush(until)  # the alert that tells the other side the reason
            raise
        self._flush(until)

    def recv_into(self, buffer: memoryview, timeout: float) -> int:
        """Read at least one byte, and all that have arrived. Returns the number of bytes; 0 at the end of the stream.
        Raises `OSError`: as `ssl.SSLSocket.recv_into`; after a TimeoutError no byte is lost."""
        size, done, until = len(buffer), 0, self._begin(timeout)
        if self._exhausted and not self._take_in(promised=size):
            return 0
        while True:
            try:
                self._exhausted = False
                while done < size and (count := self.tls.read(size - done, buffer[done:])):
                    done += count  # type: ignore[operator]  # with a buffer it is a number
                    self.records += 1
                    if done < size and not self._incoming.pending:  # one read returns a whole record
                        self._exhausted = True
                        break
                return done
            except ssl.SSLWantReadError:
                self._exhausted = True
                if done:
                    return done
                _check_time(until)
                if not self._take_in(promised=size):
                    return 0

    def send(self, data: memoryview, timeout: float) -> int:
        """Send some of the bytes. Returns their number. Raises `OSError`: as `ssl.SSLSocket.send`. After a TimeoutError
        the same bytes must be passed again."""
        until = self._begin(timeout)
        if not self._encrypted:
            part = data[: self._chunk // 2]
            while self._encrypted < len(part):
                self._encrypted += self.tls.write(part[self._encrypted :])
        self._flush(until)
        sent, self._encrypted = self._encrypted, 0
        return sent

    @property
    def unsent(self) -> bool:
        """True if encrypted bytes wait to be sent."""
        return bool(self._to_send or self._outgoing.pending)

    def close(self) -> None:
        """Send close_notify without waiting for the peer's, and close the socket."""
        with contextlib.suppress(OSError, ValueError):
            self._begin(0.0)
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.unwrap()
            self._flush(math.inf)
        self.raw.close()

    def _begin(self, timeout: float) -> float:
        """The deadline of a call that begins now. The timeout covers the whole call, not each byte."""
        if not timeout:
            self._timeout, self._flags = timeout, socket.MSG_DONTWAIT
            return math.inf
        if self._timeout != timeout:  # setting it is a system call, and there are thousands of records
            self._timeout, self._flags = timeout, 0
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                # a `struct timeval` of at least one microsecond: the kernel reads 0 as no timeout
                timeval = _TIMEVAL.pack(*divmod(max(1, int(1e6 * timeout)), 1_000_000))
                self.raw.setsockopt(socket.SOL_SOCKET, option, timeval)
        return time.monotonic() + timeout

    def _take_in(self, *, promised: int = 1) -> int:
        """Wait for bytes and feed them to TLS. Returns their number; 0 at the end of the stream. If many bytes are
        `promised`, the call waits up to `_GATHER_S` until a full read has arrived: waking the thread for a few bytes
        costs more than the wait."""
        to_arrive = promised - self._incoming.pending - _PARTIAL_RECORD
        much = to_arrive >= self._chunk
        if (size := self._chunk if much else 1) != self._awaited:
            # Make the socket readable only after `size` bytes, or the end of the stream, have arrived.
            self._awaited = size
            with contextlib.suppress(OSError):  # not supported by this system
                self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        # After a partial read, the kernel waits for `size` bytes again, which may never come. So wait here until all
        # have arrived, but not for long: a peer whose window is full sends no more before a read makes room.
        until = time.monotonic() + self._timeout
        while much and not self._arrival.poll(1e3 * min(_GATHER_S, self._timeout)):
            with contextlib.suppress(BlockingIOError):
                return self._feed(socket.MSG_DONTWAIT)
            _check_time(until)
        try:
            return self._feed(self._flags)
        except BlockingIOError as error:
            raise TimeoutError(_TIMED_OUT) from error

    def _feed(self, flags: int) -> int:
        count = self.raw.recv_into(_arrived.buffer, self._chunk, flags)
        self._incoming.write(_arrived.buffer[:count])
        return count

    def _flush(self, until: float) -> None:
        while self.unsent:
            if not self._to_send:
                self._to_send = memoryview(self._outgoing.read())
            try:
                self._to_send = self._to_send[self.raw.send(self._to_send, self._flags) :]
            except BlockingIOError as error:
                raise TimeoutError(_TIMED_OUT) from error
            if self._to_send:
                _check_time(until)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(_TIMED_OUT)


T = TypeVar("T")
SLICE_S: Final = 2.0
"""Seconds of one wait, before `waiting` is called."""
_RECORD: Final = 1 << 14  # the most plaintext that a TLS record carries
_AHEAD: Final = 1 << 16  # bytes that are read ahead: one row of most models, and a few rows of small ones
_TOGETHER: Final = 1 << 15  # the most that is copied so that head and payload take one system call
_SCRAP: Final = 1 << 16
_SCRAP_RECORD: Final = 1 << 10
_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # POLLRDHUP exists on Linux only

Waiting = Callable[[float, str], None]
"""Called with (end of the wait, what the wait is for) after every slice of a wait."""


def within(deadline: float, operation: Callable[[float], T], why: str, *, waiting: Waiting | None = None) -> T:
    """Repeat an operation, called with a timeout in seconds, until it succeeds. Raises `TimeoutError`: the deadline, on
    the clock of `time.monotonic`, has passed. The timeout stays the same, because changing it takes a system call.
    `waiting` is called after every slice of the wait, and may raise; without it, a second attempt has all the time that
    is left."""
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
    """A `RecordStream` with deadlines, in seconds on the clock of `time.monotonic`. Methods raise ConnectionLostError
    if the peer leaves within a frame, TimeoutError if the peer is too slow, and OSError if the connection fails."""

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

    @property
    def arrived(self) -> memoryview:
        """The bytes that were read ahead. They are valid until more is read."""
        return self._unread

    def skip(self, size: int) -> None:
        """Take `size` of the bytes that have `arrived`."""
        self._unread = self._unread[size:]

    def begin(self, *, deadline: float) -> bool:
        """Wait for the first bytes of a frame. Returns False if the peer has left."""
        if not self._unread:
            self._unread = self._ahead[: self._read(self._ahead, deadline)]
        return bool(self._unread)

    def receive_head(self, *, max_payload: int, deadline: float) -> tuple[memoryview, int]:
        """Read the prefix and the header of a frame. Returns the header's bytes, valid until the next call, and the
        number of payload bytes that follow, `max_payload` at most. Raises `ProtocolError`: not a frame, or a size
        exceeds its limit. The stream cannot be used again."""
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

    def receive_known(self, head: bytes, payload: memoryview, *, deadline: float) -> bool:
        """Read a frame whose prefix and header are `head`, and fill `payload`. If another frame comes, return False and
        take no byte of it."""
        size = len(head)
        if not (self._unread or self.begin(deadline=deadline)) or self._unread[:size] != head:
            return False
        self._unread = self._unread[size:]
        self.receive(payload, deadline=deadline)
        return True

    def discard(self, size: int, *, deadline: float) -> None:
        """Read and drop `size` bytes, in constant memory."""
        scrap = memoryview(bytearray(min(size, _SCRAP)))
        while size:
            part = scrap[: min(size, len(scrap))]
            self.receive(part, deadline=deadline)
            size -= len(part)

    def send_frame(self, head: bytes, payload: memoryview, *, deadline: float) -> None:
        """Send a frame. The head and the start of the payload go out together, all of it if it is small; the rest is
        sent without a copy."""
        beside = (_TOGETHER if len(head) + len(payload) <= _TOGETHER else _RECORD) - len(head)
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
        return memoryview(bytearray(_AHEAD))

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
