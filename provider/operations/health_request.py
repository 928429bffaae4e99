"""Asks a provider for its health report, as a tenant does."""

import time
from pathlib import Path

from symbiosis_priv.errors import DeadlineExceededError, TransportError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context


def ask_health(
    address: str,
    *,
    provider_certificate: Path,
    tenant_certificate: Path,
    tenant_key: Path,
    timeout: float = 10.0,
) -> wire.HealthReport:
    """Ask a provider for its health report. Raises `CertificateError`: a certificate of either side is not accepted;
    `TransportError`: no answer in time; `ProviderError`, `ProtocolError`: the answer is not a provider's health
    report."""
    host, port = parse_address(address)
    pins = [provider_certificate]
    context = client_context(certificate=tenant_certificate, key=tenant_key, pins=pins)
    deadline = time.monotonic() + timeout
    with ClientConnection(address, host=host, port=port, pins=pins, context=context) as connection:
        try:
            connection.open(deadline)
            return connection.expect(wire.HealthReport, wire.FetchHealth(), deadline=deadline)[0]
        except DeadlineExceededError as error:
            raise DeadlineExceededError(f"{address} gave no report within {timeout:g} s; is it running?") from error
        except TransportError as error:
            raise type(error)(f"{error}; is it running?") from error
