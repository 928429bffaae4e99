"""Ask a provider how it is, as a tenant would."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from provider.link import Link
from symbiosis_priv import wire
from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError, ProtocolError
from symbiosis_priv.federation import parse_address
from symbiosis_priv.tls import check_pin, client_context, handshake_error

DEFAULT_TIMEOUT_S = 10.0


def ask_health(
    address: str,
    *,
    provider_certificate: Path,
    tenant_certificate: Path,
    tenant_key: Path,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> wire.HealthReport:
    """The provider's report.

    Raises:
        CertificateError: either side's certificate is not the right one.
        TransportError: nobody answers there, or not in time.
        ProtocolError: what answers is not a healthy provider.
    """
    context = client_context(certificate=tenant_certificate, key=tenant_key, pins=[provider_certificate])
    host, port = parse_address(address)
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as raw:
            connection = context.wrap_socket(raw, server_hostname=host)
            check_pin(connection, pins=[provider_certificate])
            link = Link(connection)
            try:
                link.send(wire.encode(wire.Health()), b"", deadline=deadline)
                reply = _receive(link, deadline)
            finally:
                link.close()
    except TimeoutError as error:
        raise DeadlineExceededError(f"{address} gave no report within {timeout:g} s") from error
    except ConnectionRefusedError as error:
        raise ConnectionLostError(f"nobody listens at {address}; is the provider running?") from error
    except OSError as error:
        raise handshake_error(error, peer=address) from error
    if isinstance(reply, wire.Failure):
        raise ProtocolError(f"{address} answered {reply.code}: {reply.detail}")
    if not isinstance(reply, wire.HealthReport):
        raise ProtocolError(f"{address} answered with something else than a health report")
    return reply


def _receive(link: Link, deadline: float) -> wire.Reply:
    prefix = memoryview(bytearray(wire.PREFIX.size))
    link.receive(prefix, deadline=deadline)
    length, _ = wire.decode_prefix(prefix, max_payload=0)
    header = memoryview(bytearray(length))
    link.receive(header, deadline=deadline)
    return wire.decode_reply(header)
