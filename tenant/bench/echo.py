"""The lower bound of a round trip: TLS 1.3 with the same certificates and the same bytes, without any computation."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network.tls import check_pin, server_context

_HEADER = struct.Struct("<III")  # bytes up, bytes down, repetitions
_TIMEOUT_S = 60.0


@contextmanager
def serve_echo(certificate: Path, key: Path, tenant_authority: Path) -> Iterator[Callable[[None], int]]:
    """For `Child`: serves one connection at a time, and answers with its port."""
    context = server_context(certificate=certificate, key=key, tenant_authority=tenant_authority)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context), daemon=True).start()
        yield lambda _: int(listener.getsockname()[1])


def _accept(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        raw, _ = listener.accept()
        raw.settimeout(_TIMEOUT_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(raw, server_side=True) as connection:
            header = bytearray(_HEADER.size)
            _fill(connection, header)
            up, down, repetitions = _HEADER.unpack(header)
            request, reply = bytearray(up), bytes(down)
            for _ in range(repetitions):
                _fill(connection, request)
                connection.sendall(reply)


def _fill(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionLostError("the other side of the echo closed the connection")
        view = view[count:]


@contextmanager
def echo_connection(
    federation: Federation, peer: Peer, *, port: int, up: int, down: int, repetitions: int
) -> Iterator[Callable[[], None]]:
    """Open a connection to the echo server. Yields a function that makes one round trip.

    Args:
        peer: the provider whose certificate the server shows.
        up, down: bytes of one exchange in each direction.
    """
    context = federation.tls_context(peer)
    raw = socket.create_connection((peer.host, port), timeout=_TIMEOUT_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(raw, server_hostname=peer.host) as connection:
        check_pin(connection, pins=peer.pins)
        connection.sendall(_HEADER.pack(up, down, repetitions))
        request, reply = bytes(up), bytearray(down)

        def exchange() -> None:
            connection.sendall(request)
            _fill(connection, reply)

        yield exchange
