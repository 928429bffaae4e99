"""TLS over a socket: many records per system call, and frames of exact sizes, with deadlines that no peer can extend.

`ssl.SSLSocket` makes two system calls for every record that it reads and one for every record that it writes. A record
carries 16 KiB, so one step of fine-tuning has tens of thousands of records. This module keeps records in memory between
TLS and the socket, and sends all of them with one system call. Errors are those of `ssl.SSLSocket`.

The kernel enforces the timeout of the blocking socket. (Python's own timeout needs one system call to wait and another
one to read.) The TLS object is read only if it may have bytes, a request's prefix, header and first rows are read with
one call, and while frames of few rows follow each other, the thread polls for the next one before it sleeps
(docs/adr/9-lane.md says what each of these costs).
"""

import contextlib
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Final

import numpy as np

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire

SLICE_S: Final = 2.0
"""Seconds of one wait, before `waiting` is called."""
_CHUNK: Final = 1 << 18  # bytes of one system call: more would leave the cache before they are decrypted
_CHUNK_SERVER: Final = 1 << 17  # a server has many connections, and TLS keeps memory of this size for each
_PARTIAL_RECORD: Final = 1 << 15  # larger than the part of an incomplete record that TLS may hold
_GATHER_S: Final = 0.02  # the longest wait for a full read while fewer bytes have arrived
_BUSY_POLL_S: Final = 0.002 if (os.cpu_count() or 1) > 1 else 0.0
_YIELD_S: Final = 5e-5  # a longer yield has let another thread run
_TIMEVAL: Final = struct.Struct("@ll")
_RECORD: Final = 1 << 14  # the most plaintext that a TLS record carries
_AHEAD: Final = 1 << 16  # bytes that are read ahead: one row of most models, and a few rows of small ones
_SCRAP: Final = 1 << 16
_SCRAP_RECORD: Final = 1 << 10
_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # POLLRDHUP exists on Linux only
NOTHING: Final = memoryview(b"")

Waiting = Callable[[float, str], None]
"""Called with (end of the wait, what the wait is for) after every slice of a wait. It may raise."""


class _Arrived(threading.local):
    """Each thread's memory for bytes that have arrived and are fed to TLS at once."""

    def __init__(self) -> None:
        self.buffer = np.empty(_CHUNK, dtype=np.uint8).data  # not cleared, as a bytearray would be


_arrived = _Arrived()


class FrameStream:
    """A TLS connection over a connected socket, for one thread at a time. `host` is the name that the server's
    certificate must carry; None on the server's side. Deadlines are in seconds on the clock of `time.monotonic`.
    Methods raise ConnectionLostError if the peer leaves within a frame, TimeoutError if the deadline passes, and
    OSError, as `ssl.SSLSocket` does, if the connection fails."""

    waiting: Waiting | None = None
    """Called after every slice of a wait."""
    on_scraps: Callable[[int], None] | None = None
    """Called with the number of scraps of a read: records that carried less than 1 KiB each, on average."""
    free_scraps = 0
    """Number of scraps before `on_scraps` is called."""
    arrived = NOTHING
    """The bytes that were read ahead. They are valid until more is read."""
    arrived_end = 0
    """The address after the last of them."""
    few_rows = False
    """True while frames carry few rows and have known headers: the next one may come at once."""
    _came_soon = False  # the latest frame that was waited for
    _busy = threading.Lock()  # one thread of a process polls, and leaves the other cores to products
    _received = 0
    _flags = 0  # of system calls
    _timeout = -1.0  # of the socket
    _awaited = 1  # number of bytes for which the socket waits
    _to_send = b""  # encrypted bytes
    _exhausted = False  # TLS has returned all bytes that can be decrypted so far

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> None:
        raw.settimeout(None)
        self.raw = raw
        self._chunk = _CHUNK_SERVER if host is None else _CHUNK
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        """The negotiated TLS parameters; not for reading or writing."""
        self._arrival = select.poll()
        self._arrival.register(raw, select.POLLIN)

    def handshake(self, deadline: float | None) -> None:
        """Make the TLS handshake. With None the call does not wait: it raises TimeoutError if the peer must send or
        read more, and another call continues the handshake."""
        self._flags = socket.MSG_DONTWAIT if deadline is None else 0
        until, why = math.inf if deadline is None else deadline, "it has not finished the TLS handshake"
        try:
            while True:
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush(until, why)
                    if not self._take_in(until, why=why):
                        self._incoming.write_eof()  # the next attempt raises the error
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._flush(until, why)  # the alert that tells the other side the reason
            raise
        self._flush(until, why)
        self._flags = 0

    def recv_into(self, buffer: memoryview, deadline: float) -> int:
        """Read at least one byte, and all that have arrived. Returns the number of bytes; 0 at the end of the stream.
        After a TimeoutError no byte is lost."""
        size, done, records = len(buffer), 0, 0
        while done < size:
            if self._exhausted:
                if done or not self._take_in(deadline, promised=size):
                    break
                self._exhausted = False
            try:
                count: int = self.tls.read(size - done, buffer[done:])  # type: ignore[assignment]  # with a buffer
            except ssl.SSLWantReadError:
                self._exhausted = True
                continue
            if not count:
                break
            done += count
            records += 1
            self._exhausted = done < size and not self._incoming.pending  # one read returns a whole record
        self._received += done
        if self.on_scraps is not None and (scraps := records - done // _SCRAP_RECORD) > 0:
            self.free_scraps -= scraps
            if self.free_scraps < 0:
                self.on_scraps(min(scraps, -self.free_scraps))
        return done

    @property
    def unsent(self) -> bool:
        """True if encrypted bytes wait to be sent."""
        return bool(self._to_send or self._outgoing.pending)

    def close(self) -> None:
        """Send close_notify without waiting for the peer's, and close the socket."""
        self._flags = socket.MSG_DONTWAIT
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.unwrap()
            self._flush(math.inf)
        self.raw.close()

    def _take_in(self, deadline: float, *, promised: int = 1, why: str = "it has not answered yet") -> int:
        """Wait for bytes and feed them to TLS. Returns their number; 0 at the end of the stream. If many are
        `promised`, wait up to `_GATHER_S` for a full read: waking the thread for a few bytes costs more."""
        # a peer whose window is full sends no more before a read makes room: so the wait for a full read is short
        if promised - self._incoming.pending - _PARTIAL_RECORD >= self._chunk:
            self._await(self._chunk)
            if not self._arrival.poll(1e3 * _GATHER_S):
                self._await(1)
        elif self._awaited > 1:
            self._await(1)
        buffer = _arrived.buffer
        count = self._transfer(deadline, why, self.raw.recv_into, buffer, self._chunk)
        self._incoming.write(buffer[:count])
        return count

    def _await(self, size: int) -> None:
        """Make the socket readable only after `size` bytes, or the end of the stream, have arrived."""
        self._awaited = size
        with contextlib.suppress(OSError):  # not supported by this system
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _flush(self, deadline: float, why: str = "it does not take the request") -> None:
        """Send all encrypted bytes."""
        while data := self._to_send or self._outgoing.read():
            self._to_send = data  # to go on with after a TimeoutError
            self._to_send = data[self._transfer(deadline, why, self.raw.send, data) :]

    def _transfer(self, deadline: float, why: str, call: Callable[..., int], *arguments: object) -> int:
        """Make a system call that waits for the peer until the deadline. Most calls have the same timeout, because
        changing it takes a system call too. Without `waiting`, a second attempt has all the time that is left."""
        most = SLICE_S
        while (timeout := min(deadline - time.monotonic(), most)) > 0:
            if timeout != self._timeout:
                self._timeout = timeout
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    # a `struct timeval` of at least one microsecond: the kernel reads 0 as no timeout
                    timeval = _TIMEVAL.pack(*divmod(max(1, int(1e6 * timeout)), 1_000_000))
                    self.raw.setsockopt(socket.SOL_SOCKET, option, timeval)
            try:
                return call(*arguments, self._flags)
            except BlockingIOError:
                if self._flags:
                    break
                if self.waiting is None:
                    most = math.inf
                else:
                    self.waiting(deadline, why)
        raise TimeoutError(why)

    # Frames

    @property
    def consumed(self) -> int:
        """Number of bytes that the methods below have returned."""
        return self._received - len(self.arrived)

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
        if not self.arrived:
            until = min(deadline, time.monotonic() + _BUSY_POLL_S)
            if self.few_rows and self._came_soon:
                self._poll(until)
            count = self.recv_into(self._ahead, deadline)
            self._came_soon = time.monotonic() < until
            self.arrived, self.arrived_end = self._ahead[:count], self._ahead_begin + count
        return bool(self.arrived)

    def _poll(self, until: float) -> None:
        """Wait for bytes without sleeping, unless another thread does so or wants the core."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            while now < until and not self._arrival.poll(0):
                os.sched_yield()
                before, now = now, time.monotonic()
                if now - before > _YIELD_S:
                    break
        finally:
            self._busy.release()

    def gather(self, size: int, *, deadline: float) -> bool:
        """Read ahead until `size` bytes have arrived. Returns False if they exceed the memory for that.
        After an error, those that came stay `arrived`."""
        if (done := len(self.arrived)) < size <= _AHEAD:
            self._ahead[:done], self.arrived = self.arrived, NOTHING
            try:
                while done < size:
                    if not (count := self.recv_into(self._ahead[done:], deadline)):
                        raise ConnectionLostError("the other side closed the connection")
                    done += count
            finally:
                self.arrived, self.arrived_end = self._ahead[:done], self._ahead_begin + done
        return size <= done

    def receive_head(self, *, max_payload: int, deadline: float) -> tuple[memoryview, int]:
        """Read the prefix and the header of a frame. Returns the header's bytes, valid until the next call, and the
        number of payload bytes that follow, `max_payload` at most. Raises `ProtocolError`: not a frame, or a size
        exceeds its limit. The stream cannot be used again."""
        self.few_rows = False
        prefix = self._next(wire.PREFIX.size, deadline)
        header_size, payload_size = wire.decode_prefix(prefix, max_payload=max_payload)
        return self._next(header_size, deadline), payload_size

    def receive(self, view: memoryview, *, deadline: float) -> None:
        """Read exactly the bytes that fill `view`."""
        while view:
            if not self.arrived and len(view) >= _RECORD:
                count = self.recv_into(view, deadline)
            elif self.arrived or self.begin(deadline=deadline):
                count = min(len(view), len(self.arrived))
                view[:count] = self.arrived[:count]
                self.arrived = self.arrived[count:]
            else:
                count = 0
            if not count:
                raise ConnectionLostError("the other side closed the connection")
            view = view[count:]

    def receive_known(self, head: bytes, payload: memoryview, *, deadline: float) -> bool:
        """Read a frame whose prefix and header are `head` into `payload`. Returns False, and takes nothing, if it is
        another."""
        size, self.few_rows = len(head), True
        if not (self.arrived or self.begin(deadline=deadline)) or self.arrived[:size] != head:
            return False
        self.arrived = self.arrived[size:]
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
        """Send a frame. The head shares a record with the start of the payload, which is copied for it. A frame that
        was sent in one system call is received in one."""
        beside, size = _RECORD - len(head), self._chunk // 2
        self._encrypt(head + payload[:beside])
        for start in range(beside, len(payload), size):
            self._encrypt(payload[start : start + size])
            self._flush(deadline)
        self._flush(deadline)

    def _encrypt(self, data: bytes | memoryview) -> None:
        while data:
            data = data[self.tls.write(data) :]

    def _next(self, size: int, deadline: float) -> memoryview:
        """The next `size` bytes. They are not copied if they have arrived together."""
        if (self.arrived or self.begin(deadline=deadline)) and len(self.arrived) >= size:
            part, self.arrived = self.arrived[:size], self.arrived[size:]
            return part
        part = memoryview(bytearray(size))
        self.receive(part, deadline=deadline)
        return part

    @cached_property
    def _ahead(self) -> memoryview:
        memory = np.empty(_AHEAD, dtype=np.uint8)
        self._ahead_begin = memory.ctypes.data
        return memory.data


def shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a socket from any thread, and wake the thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
