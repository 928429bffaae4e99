"""The floor of a round trip: TLS 1.3 with the same certificates, the same bytes each way, and nothing else.

Run as a process of its own, `python -m tenant.bench.echo CERTIFICATE KEY TENANT_AUTHORITY`, it prints its port and
serves one connection at a time: twelve bytes of header (bytes up, bytes down, repetitions), then that many exchanges.
"""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from symbiosis_priv.errors import ConfigError, ConnectionLostError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network.tls import check_pin, client_context, server_context
from symbiosis_priv.system import processes as start

_HEADER = struct.Struct("<III")
_TIMEOUT_S = 60.0


def serve(certificate: Path, key: Path, tenant_authority: Path) -> None:
    """Answer until the process is stopped."""
    context = server_context(certificate=certificate, key=key, tenant_authority=tenant_authority)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            raw, _ = listener.accept()
            raw.settimeout(_TIMEOUT_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with context.wrap_socket(raw, server_side=True) as connection:
                _answer(connection)


def _answer(connection: ssl.SSLSocket) -> None:
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


class EchoServer:
    """The echo as a child process. A context manager.

    Args:
        directory: with `keys/` as `LocalFederation` writes them.
        peer: the provider whose certificate it shows.
    """

    def __init__(self, directory: Path, peer: Peer) -> None:
        keys = directory / "keys"
        assert isinstance(peer.certificate, Path), "LocalFederation's are in files"
        files = (peer.certificate, peer.certificate.with_suffix(".key"), keys / "authority.pem")
        self._command = start.command("tenant.bench.echo", *map(str, files))

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the echo server did not start; its reason is above")
        self.port = int(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class EchoClient:
    """The tenant's end: `up` bytes out, `down` bytes back. A context manager.

    Args:
        federation: whose certificates to use.
        peer: the provider whose certificate the server shows.
        port: of the server.
        up, down: bytes of one exchange.
        repetitions: exchanges to come.
    """

    def __init__(self, federation: Federation, peer: Peer, *, port: int, up: int, down: int, repetitions: int) -> None:
        context = client_context(
            certificate=federation.tenant_certificate,
            key=federation.tenant_key,
            pins=peer.pins,
        )
        raw = socket.create_connection((peer.host, port), timeout=_TIMEOUT_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = context.wrap_socket(raw, server_hostname=peer.host)
        check_pin(self._connection, pins=peer.pins)
        self._connection.sendall(_HEADER.pack(up, down, repetitions))
        self._request, self._reply = bytes(up), bytearray(down)

    def exchange(self) -> None:
        """One round trip."""
        self._connection.sendall(self._request)
        _fill(self._connection, self._reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:4]))
