"""A connection whose host another party has named: the resolved address is checked when the connection is made."""

import socket
import ssl
import time

import pytest

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network.dial import ClientConnection


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "rebound.example"])
def test_a_remote_only_connection_does_not_reach_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """No byte arrives, even if a name resolves to this machine only when the connection is made."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
        service.setblocking(False)
        for remote_only in (True, False):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            line = ClientConnection("gamma", host=host, port=port, pins=None, context=context, remote_only=remote_only)
            expected = "not an address" if remote_only else "TLS"
            with pytest.raises(Exception, match=expected) as caught:
                line.open(time.monotonic() + 0.3)
            line.close()
            if remote_only:
                assert isinstance(caught.value, ConnectionLostError)
                with pytest.raises(BlockingIOError):
                    service.accept()
        service.accept()[0].close()
