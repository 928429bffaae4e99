"""The operator's address: what Prometheus reads, health and readiness, and the live view."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

from provider import top
from provider.cli import app
from provider.config import MetricsConfig
from provider.metrics import is_public
from provider.server import Provider
from provider.status import Status
from symbiosis_priv.addresses import parse_address
from symbiosis_priv.errors import ConfigError, ConnectionLostError

if TYPE_CHECKING:
    from tests.provider.conftest import Configure, Connect, Requests

WIDTH = 64


def get(address: str, path: str) -> tuple[int, str]:
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_operators_address(configure: Configure, connect: Connect, requests: Requests) -> None:
    execute, effect = requests
    config = msgspec.structs.replace(configure(), metrics=MetricsConfig(listen="127.0.0.1:0"))
    with Provider(config) as provider:
        address = provider.metrics_address
        assert address is not None
        client, helper = connect("alice", to=provider), connect(role="helper", to=provider)
        for _ in range(3):
            client.product(execute(0, 5), torch.full((5, WIDTH), 0x53454352, dtype=torch.int32))
        helper.product(effect(0, 2, seed=b"S" * 32))
        before = top.ask(address)
        client.product(execute(0, 5), torch.ones((5, WIDTH), dtype=torch.int32))

        status, text = get(address, "/metrics")
        assert status == 200
        samples = {
            (s.name, *sorted(s.labels.values())): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        alice = next(t.tenant for t in top.ask(address).tenants if t.tenant.startswith("alice@"))
        assert samples["symbiosis_provider_tenant_requests_total", alice, "executor"] == 4
        assert samples["symbiosis_provider_tenant_rows_total", alice, "executor"] == 20
        assert samples["symbiosis_provider_group_rows_total", "0"] == 22
        assert samples["symbiosis_provider_batch_rows_sum",] == 22
        assert samples["symbiosis_provider_batch_rows_bucket", "+Inf"] == 5
        assert samples["symbiosis_provider_ready",] == 1
        names = {label for family in text_string_to_metric_families(text) for s in family.samples for label in s.labels}
        assert names == {"tenant", "role", "stage", "reason", "outcome", "group", "le"}  # who and where, never what
        assert "SECR" not in text
        assert str(0x53454352) not in text

        assert get(address, "/healthz") == (200, "alive\n")
        assert get(address, "/readyz") == (200, "ready\n")
        assert get(address, "/elsewhere")[0] == 404
        now = msgspec.json.decode(get(address, "/status")[1], type=Status)
        console = Console(width=200)
        with console.capture() as captured:
            console.print(top.render(now, before, 0.5))
        shown = captured.get()
        assert alice in shown
        assert "2.0" in shown  # requests a second
        result = CliRunner().invoke(app, ["top", "--address", address, "--once"])
        assert result.exit_code == 0, result.output

        provider.executor.stop(5.0)  # as if it had hung: alive, but not ready
        assert get(address, "/healthz")[0] == 200
        assert get(address, "/readyz") == (503, "not ready\n")
        assert top.ask(address).executor is None
    with pytest.raises(ConnectionLostError, match="metrics"):
        top.ask(address)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_it_listens_where_it_is_told_to(configure: Configure, listen: str) -> None:
    with Provider(msgspec.structs.replace(configure(), metrics=MetricsConfig(listen=listen))) as provider:
        assert provider.metrics_address is not None
        assert provider.metrics_address.startswith(listen.removesuffix("0"))
        assert get(provider.metrics_address, "/healthz") == (200, "alive\n")


def test_who_listens_to_everybody_is_told_so() -> None:
    assert all(map(is_public, ["0.0.0.0", "::", "8.8.8.8", "2001:4860::1"]))
    assert not any(map(is_public, ["127.0.0.1", "10.1.2.3", "192.168.0.1", "::1", "fd00::1", "metrics.internal"]))


def test_a_taken_address_is_named(configure: Configure, provider: Provider) -> None:
    taken = msgspec.structs.replace(configure(), metrics=MetricsConfig(listen=provider.address))
    with pytest.raises(ConfigError, match="metrics"):
        Provider(taken).start()
    assert isinstance(CliRunner().invoke(app, ["top"]).exception, ConfigError)
