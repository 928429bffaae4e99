"""The operator's address: Prometheus' metrics, health, readiness, and the live view."""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from logging import LogRecord
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

from provider.cli import app
from provider.config.provider_toml import load
from provider.config.schema import MetricsConfig
from provider.executor.client import ExecutorRequester
from provider.operations import top
from provider.operations.metrics import MetricsServer
from provider.operations.status import Status
from provider.refusal import Refusal
from provider.serve import Provider
from symbiosis_priv import __version__
from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.errors import ConfigError, ConnectionLostError, ProtocolError
from symbiosis_priv.network.addresses import parse_address
from tests.provider.clients import effect, execute
from tests.provider.conftest import Configure, Connect
from tests.waiting import until

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


def test_the_operators_address(configure: Configure, connect: Connect) -> None:
    config = configure(metrics=MetricsConfig(listen="127.0.0.1:0"))
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
        # names and places, never content
        assert names == {"tenant", "role", "stage", "reason", "outcome", "group", "le", "version", "file"}
        assert samples["symbiosis_provider_build_info", __version__] == 1
        for file in (config.tls.certificate, config.tls.tenant_authority):
            (found,) = load_certificates(file)
            expiry = samples["symbiosis_provider_certificate_expiry_timestamp_seconds", str(file)]
            assert expiry == found.not_valid_after_utc.timestamp()
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
        assert re.search(rf"{re.escape(str(config.tls.certificate))} expires in \d+ days", re.sub(r"\s+", " ", shown))
        assert re.search(rf"│ {re.escape(now.groups[0])} +│ 10 +│", shown), shown  # rows a second of a layer group
        result = CliRunner().invoke(app, ["top", "--address", address, "--once"])
        assert result.exit_code == 0, result.output

        provider.executor.stop(5.0)  # like an executor that hangs: alive, but not ready
        assert get(address, "/healthz")[0] == 200
        assert get(address, "/readyz") == (503, "not ready\n")
        assert top.ask(address).executor is None
        begun = time.monotonic()
        with ExecutorRequester(provider.executor) as asker, pytest.raises(Refusal):
            asker.report(deadline=begun)
        assert time.monotonic() - begun < 1.0  # no extra time for a late answer
    with pytest.raises(ConnectionLostError, match="metrics"):
        top.ask(address)


def test_a_taken_address_is_named_before_the_model_is_read(
    configure: Configure, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantising a large model takes minutes."""
    monkeypatch.setattr("provider.serve.open_store", lambda _: pytest.fail("the model was read"))
    free, taken = "127.0.0.1:0", provider.address
    for listen, metrics, named in ((free, taken, r"^\[metrics\] listen = "), (taken, free, "^listen = ")):
        config = msgspec.structs.replace(configure(metrics=MetricsConfig(listen=metrics)), listen=listen)
        with pytest.raises(ConfigError, match=named):
            Provider(config).start()


def test_certificates_are_looked_at_daily(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were looked at when the provider started: after a year it refused all tenants without a word."""

    config = configure()

    def warnings() -> list[str]:  # of this provider: others of this process may run in other threads
        records = (record for record in caplog.records if getattr(record, "event", None) == "certificate_expires")
        return [text for text in map(LogRecord.getMessage, records) if text.startswith(str(config.tls.certificate))]

    (found,) = load_certificates(config.tls.certificate)
    with Provider(config) as provider:
        assert warnings() == []
        monkeypatch.setattr(reading, "now", lambda: found.not_valid_after_utc - timedelta(days=9, hours=1))
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 86_401)
        monkeypatch.setattr("provider.config.reload.time", later)
        until(warnings)
        assert provider.status().reloaded
    assert all(f"{config.tls.certificate} expires in 9 days" in each and "keys rotate" in each for each in warnings())


def test_top_says_what_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "provider.toml"
    assert CliRunner().invoke(app, ["init", str(config), "--listen", "127.0.0.1:7402"]).exit_code == 0
    assert load(config).metrics.listen == "127.0.0.1:9465"  # on from the start
    config.write_text(config.read_text().replace('listen = "127.0.0.1:9465"', ""))
    for options, message in (
        (["--config", str(config)], r"under \[metrics\], and restart"),
        ([], "--config provider.toml"),
    ):
        error = CliRunner().invoke(app, ["top", *options]).exception
        assert isinstance(error, ConfigError)
        assert re.search(message, str(error))
    assert "[metrics] listen" in " ".join(
        CliRunner().invoke(app, ["top", "--help"], env={"COLUMNS": "200"}).output.split()
    )


# What comes from elsewhere


@contextlib.contextmanager
def answering(*parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """The address of a server that sends these parts to every request, repeatedly."""
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(parts[0])
                    while not closed.wait(pause_s) and parts[1:]:
                        connection.sendall(b"".join(parts[1:]))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def test_top_reads_no_more_than_a_status_and_no_longer_than_its_deadline() -> None:
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    with answering(head, b"x" * (1 << 20)) as endless, pytest.raises((ProtocolError, ConnectionLostError)):
        top.ask(endless, timeout_s=20.0)
    for begin in (b"HTTP/1.0 200 OK\r\nX-Slow: ", head):
        began = time.monotonic()
        with answering(begin, b".", pause_s=0.05) as slow, pytest.raises((ProtocolError, ConnectionLostError)):
            top.ask(slow, timeout_s=0.3)
        assert time.monotonic() - began < 10


def test_tenants_names_cannot_control_the_terminal(provider: Provider) -> None:
    """Neither escape sequences nor rich's markup."""
    status = msgspec.json.decode(msgspec.json.encode(provider.status()))
    status["provider"] = "evil\x1b[2J\x9b2J"
    nothing = dict.fromkeys(("requests", "rows", "work"), 0)
    status["tenants"] = [{"tenant": "\x1b]0;evil\x07[blink]alice", "role": "executor", "counts": nothing}]
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(top.render(msgspec.convert(status, Status), None, 0.0))
    assert "[blink]alice" in captured.get()
    assert all(letter.isprintable() or letter == "\n" for letter in captured.get())


def test_the_operators_address_has_a_limited_number_of_threads(provider: Provider) -> None:
    """Every user of this machine can connect to loopback: a silent client blocks no other one, and no thread for
    long."""
    others = set(threading.enumerate())
    server = MetricsServer("127.0.0.1:0", status=None)  # type: ignore[arg-type]
    try:
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                crowd.enter_context(socket.create_connection(parse_address(server.address), timeout=20))
            assert get(server.address, "/healthz") == (200, "alive\n")
            new = {*threading.enumerate()} - others
            # a thread that has closed its connection may take a moment to end
            until(lambda: sum(thread.name == "connection" and thread.is_alive() for thread in new) <= 16, within_s=4)
    finally:
        server.close()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0"])
def test_metrics_and_status_are_for_hosts_that_the_operator_names(provider: Provider, listen: str) -> None:
    """Otherwise a web page could read tenants' names through a host name that resolves to loopback."""
    server = MetricsServer(listen, provider.status, hosts=["GPU1.internal"])
    port = parse_address(server.address)[1]

    def status(path: str, *hosts: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.putrequest("GET", path, skip_host=True)
            for host in hosts:
                connection.putheader("Host", host)
            connection.endheaders()
            return connection.getresponse().status
        finally:
            connection.close()

    try:
        for path in ("/status", "/metrics", "/metrics?name[]=x"):
            for good in (f"127.0.0.1:{port}", "LOCALHOST:1", "gpu1.internal:9"):
                assert status(path, good) == 200, good
            for bad in (f"rebound.example:{port}", "localhost.example", "127.0.0.1.example", "", "["):
                assert status(path, bad) == 421, bad
            assert status(path) == 421
            assert status(path, "localhost", "rebound.example") == 421
        assert status("/healthz") == status("/readyz", "probe.example") == 200  # these two name no tenant
    finally:
        server.close()
