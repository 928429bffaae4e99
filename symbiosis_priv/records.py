"""TLS over a socket, many records to a system call.

`ssl.SSLSocket` asks the system twice for every record it reads and once for every record it writes, and a record
carries 16 KiB: a step of fine-tuning has tens of thousands. Here records lie in memory between TLS and the socket, and
whatever is there travels at once. Errors and timeouts are those of `ssl.SSLSocket`, and so is what may follow a
timeout: the same call again, which goes on where it was.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

_READ: Final = 1 << 18  # bytes asked of the system at once: more would leave the cache before it is decrypted
_WRITE: Final = 1 << 17  # bytes encrypted before they are sent


class RecordStream:
    """A client's TLS connection. For one thread at a time.

    Args:
        raw: a connected socket; closing it is its owner's business. Its timeout is that of every call here.
        context: of a client.
        host: whose certificate is expected.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, host: str) -> None:
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        """What has been agreed; not for reading or writing."""
        self._arrived = bytearray(_READ)
        self._to_send = memoryview(b"")
        self._encrypted = 0  # bytes of the caller's that wait in `_to_send`

    def handshake(self) -> None:
        """Shake hands.

        Raises:
            OSError: as `ssl.SSLSocket.do_handshake`; after a TimeoutError, again goes on.
        """
        try:
            while not self._try_handshake():
                self._flush()
                if not self._take_in():
                    self._incoming.write_eof()  # the next try says so
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._flush()  # the alert that tells the other side why
            raise
        self._flush()

    def recv_into(self, buffer: memoryview) -> int:
        """Read some bytes, at least one, and whatever else of them is here; 0 at the end.

        Raises:
            OSError: as `ssl.SSLSocket.recv_into`; nothing is lost by a TimeoutError.
        """
        read, size, done = self.tls.read, len(buffer), 0
        while True:
            try:
                while done < size:
                    if not (count := read(size - done, buffer[done:])):
                        return done
                    done += count  # type: ignore[operator]  # with a buffer it is a number
                return done
            except ssl.SSLWantReadError:
                if done:
                    return done
                if not self._take_in():
                    return 0

    def send(self, data: memoryview) -> int:
        """Send some of the bytes, and how many.

        Raises:
            OSError: as `ssl.SSLSocket.send`. After a TimeoutError the same bytes have to be offered again.
        """
        if not self._encrypted:
            part = data[:_WRITE]
            while self._encrypted < len(part):
                self._encrypted += self.tls.write(part[self._encrypted :])
        self._flush()
        sent, self._encrypted = self._encrypted, 0
        return sent

    def _try_handshake(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _take_in(self) -> int:
        """What has arrived, waiting for something; how many bytes of it, 0 at the end."""
        count = self._raw.recv_into(self._arrived)
        self._incoming.write(memoryview(self._arrived)[:count])
        return count

    def _flush(self) -> None:
        while self._to_send or self._outgoing.pending:
            if not self._to_send:
                self._to_send = memoryview(self._outgoing.read())
            self._to_send = self._to_send[self._raw.send(self._to_send) :]
