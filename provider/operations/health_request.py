"""Asks a provider for its health report, as a tenant does."""

import time
from pathlib import Path

from symbiosis_priv.errors import DeadlineExceededError, ProtocolError, TransportError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context

DEFAULT_TIMEOUT_S = 10.0


def ask_health(
    address: str,
    *,
    provider_certificate: Path,
    tenant_certificate: Path,
    tenant_key: Path,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> wire.HealthReport:
    """Ask a provider for its health report.

    Raises:
        CertificateError: a certificate of either side is not accepted.
        TransportError: no answer in time.
        ProtocolError: the answer is not a provider's health report.
    """
    host, port = parse_address(address)
    pins = [provider_certificate]
    context = client_context(certificate=tenant_certificate, key=tenant_key, pins=pins)
    deadline = time.monotonic() + timeout
    connection = ClientConnection(address, host=host, port=port, pins=pins, context=context)
    try:
        connection.open(deadline)
        connection.send(wire.FetchHealth(), deadline=deadline)
        reply, _ = connection.receive(max_payload=0, deadline=deadline)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(f"{address} gave no report within {timeout:g} s; is it running?") from error
    except TransportError as error:
        raise type(error)(f"{error}; is it running?") from error
    finally:
        connection.close()
    if isinstance(reply, wire.Failure):
        raise ProtocolError(f"{address} answered {reply.code}: {reply.detail}")
    if not isinstance(reply, wire.HealthReport):
        raise ProtocolError(f"{address} did not answer with a health report")
    return reply
