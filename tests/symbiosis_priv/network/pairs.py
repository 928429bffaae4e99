"""Pairs of connected sockets, and TLS contexts for them."""

import socket
import ssl
from typing import NamedTuple

TIMEOUT_S = 20.0
LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB: more than sockets and streams hold


class Contexts(NamedTuple):
    """TLS contexts of a server, of a client that trusts it, and of a client that does not."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    stranger: ssl.SSLContext


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        return ours, listener.accept()[0]
