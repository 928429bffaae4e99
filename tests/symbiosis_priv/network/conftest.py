"""Pairs of connected sockets, and TLS contexts for them."""

import socket
import ssl
from typing import Any, NamedTuple

import pytest

from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.network import tls

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


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    keys = tmp_path_factory.mktemp("keys")
    authority = create_authority(keys)
    server, other = (
        issue(keys, authority=authority, kind=Kind.PROVIDER, name=name, hosts=["localhost"])
        for name in ("server", "other")
    )
    tenant = issue(keys, authority=authority, kind=Kind.TENANT, name="tenant")

    def client(pin: Any) -> ssl.SSLContext:
        return tls.client_context(certificate=tenant.certificate, key=tenant.key, pins=[pin.certificate])

    return Contexts(
        tls.server_context(certificate=server.certificate, key=server.key, tenant_authority=authority.certificate),
        client(server),
        client(other),
    )
