"""Quotas, bills, revocation, and files that are read again while the provider runs."""

import contextlib
import json
import resource
import signal
import ssl
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from provider.cli import app
from provider.config.schema import MIB, QuotaConfig, UsageConfig
from provider.executor.client import ExecutorRequester
from provider.gateway import quota, usage
from provider.gateway.credentials import AuthenticatedPeer, Credentials
from provider.gateway.quota import QuotaGate, QuotaMeter
from provider.gateway.usage import UsageCounters, UsageCounts, read
from provider.products.model import ServedModel
from provider.refusal import Refusal
from provider.serve import Provider
from symbiosis_priv.certificates import issuing, keys_cli, reading
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.certificates.revocation import load_revoked, mark_of, revoke
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity, client_context
from tests.provider.clients import effect, execute, failure, toml_of
from tests.provider.conftest import Configure, Connect, Hold, Keys, Launch
from tests.waiting import until
from threat_model.active.registries import twin_of

WIDTH = 64
ALICE, BOB = (TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob"))


def ones(rows: int) -> torch.Tensor:
    return torch.ones(rows, WIDTH, dtype=torch.int32)


# Quotas


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 32)), min_size=1, max_size=60), st.sampled_from((8.0, 128.0))
)
def test_the_average_rate_stays_within_the_quota(asked: list[tuple[int, int]], rate: float) -> None:
    """One second's tokens at once, then the rate; the last request may be larger than the tokens that were left. All
    times are multiples of 1/128 s and exact in floating point."""
    quota, now, admitted = QuotaConfig(rows_per_s=rate), 0.0, 0
    meter = QuotaMeter(now)
    for rows, pause in asked:
        now += pause / 64
        delay = meter.delay(quota, now)
        if delay:
            assert meter.delay(quota, now + delay / 2) == delay / 2
            now += delay  # no longer than `delay` states
            assert not meter.delay(quota, now)
        assert admitted <= rate * (now + 1)
        meter.take(rows=rows, work=0)
        admitted += rows


def test_quotas_are_each_tenants_own() -> None:
    quotas = {ALICE: QuotaConfig(requests_per_s=0.1), BOB: QuotaConfig()}
    gate = QuotaGate(quotas.__getitem__)
    for _ in range(100):
        gate.admit(BOB, rows=10**6, work=10**12)
    for _ in range(2):  # the first request leaves the bucket in debt
        with contextlib.suppress(Refusal):
            gate.admit(ALICE, rows=1, work=1)
    with pytest.raises(Refusal) as refused:
        gate.admit(ALICE, rows=1, work=1)
    assert refused.value.code == wire.ErrorCode.BUSY
    gate.renew(lambda _: QuotaConfig(requests_per_s=0.1))
    gate.admit(BOB, rows=1, work=1)  # the same quota, and Alice has used hers
    gate.renew(lambda _: QuotaConfig(giga_multiply_adds_per_s=1.0))
    gate.admit(BOB, rows=1, work=10 * 10**9)
    with pytest.raises(Refusal):
        gate.admit(BOB, rows=1, work=1)


@pytest.mark.parametrize("digits", [16, 64])
def test_a_tenants_own_quota_overrides_the_default(digits: int, configure: Configure) -> None:
    """The log shows 16 digits of an authority, and `provider usage` all of them."""
    bob = TenantIdentity("bob", authority=f"sha256:{'b' * 64}")
    named = f"bob@sha256:{'b' * digits}"
    config = configure(
        quota=QuotaConfig(rows_per_s=5.0, weight=1.0),
        tenants={"alice": QuotaConfig(weight=2.0), named: QuotaConfig(rows_per_s=7.0)},
    )
    assert config.quota_of(ALICE) == QuotaConfig(rows_per_s=5.0, weight=2.0)
    assert config.quota_of(bob) == QuotaConfig(rows_per_s=7.0, weight=1.0)
    assert config.quota_of(TenantIdentity("bob", authority=f"sha256:{'c' * 64}")) == config.quota


def test_a_tenant_over_its_quota_is_told_which_one(
    configure: Configure, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that waited and the refusal name the limit, and so do the log and the metrics."""
    quota = QuotaConfig(rows_per_s=10.0, requests_per_s=1000.0)
    with Provider(configure(tenants={"alice": quota})) as provider:
        alice, bob = connect("alice", to=provider), connect("bob", to=provider)
        limits = []
        for rows in (19, 300, 1):  # the second waits for 0.9 s, the third would wait for 30 s
            alice.send(execute(0, rows), bytes(4 * WIDTH * rows))
            reply, _ = alice.receive()
            assert isinstance(reply, wire.Result | wire.Failure)
            limits.append(reply.limit and str(reply.limit))
        assert isinstance(reply, wire.Failure)
        assert limits == [None, "10 rows/s", "10 rows/s"]
        bob.product(execute(0, 1), ones(1))
        assert [(name.partition("@")[0], count) for name, count in provider.status().over_quota.items()] == [
            ("alice", 2)
        ]
    assert caplog.messages.count("over_quota") == 1


def test_refusals_and_reports_have_a_rate_of_their_own() -> None:
    """A tenant that sends only such requests gets a thousand answers a second, with one second's worth at once."""
    gate = QuotaGate(lambda _: QuotaConfig())
    assert [gate.pause(ALICE, size=0) for _ in range(1000)] == [0.0] * 1000
    assert 0.5 < [gate.pause(ALICE, size=0) for _ in range(1000)][-1] <= 1.0
    assert not gate.pause(BOB, size=0)
    assert gate.pause(BOB, size=512 * MIB) > 3.0
    gate.admit(ALICE, rows=1, work=1)  # products do not wait for this rate


def test_refused_requests_have_a_limited_rate_and_are_billed(
    configure: Configure, connect: Connect, tmp_path: Path
) -> None:
    """The rate also holds before the hello, which needs no role. Refused requests take time from all tenants."""
    database, matrix = tmp_path / "usage.sqlite", bytes(8 * MIB)
    with Provider(configure(usage=UsageConfig(database=database))) as provider:
        alice, begun = connect("alice", to=provider, role=None), time.monotonic()
        for _ in range(20):
            assert isinstance(alice.ask(execute(0, 0), matrix), wire.Failure)
        assert isinstance(alice.ask(wire.FetchHealth()), wire.HealthReport)
        assert time.monotonic() - begun > 0.5
        broken = connect("bob", to=provider)
        broken.send_bytes(b"HTTP" + bytes(8))
        assert isinstance(broken.receive()[0], wire.Failure)
    bill = {(row["tenant"], row["role"]): row["refused"] for row in read(database)}
    assert bill == {("alice", "none"): 20, ("bob", "executor"): 1}


def test_requests_of_zero_rows_take_no_executor_time_and_have_a_rate(configure: Configure, connect: Connect) -> None:
    """Requests of zero rows have no work to charge, so the scheduler would serve their tenant before all others."""
    with Provider(configure()) as provider:
        alice, carol = connect("alice", to=provider), connect("carol", to=provider, role="helper")
        alice.product(execute(0, 1), ones(1))
        carol.product(effect(0, 0, seed=bytes(32)))
        begun = time.monotonic()
        for _ in range(1200):  # one second's worth at once, and then the rate
            assert alice.product(execute(0, 0), ones(0)).shape[0] == 0
        assert time.monotonic() - begun > 0.15
        executor = provider.status().executor
        assert executor is not None
        assert sum(executor.batch_requests.counts) == 1
        carol.product(effect(0, 1, seed=bytes(32)))
        bill = {tenant.tenant.partition("@")[0]: tenant.counts for tenant in provider.status().tenants}
    assert (bill["alice"].requests, bill["alice"].rows, bill["carol"].requests, bill["carol"].rows) == (1201, 1, 2, 1)
    assert bill["carol"].work > bill["alice"].work > 0  # the keystream is charged, too


# Stages


def test_a_tenant_that_trains_on_one_connection_trains_on_all(configure: Configure, connect: Connect) -> None:
    """Otherwise small forward requests on another connection would get inference's priority."""
    with Provider(configure()) as provider:
        backward, forward = connect(to=provider), connect(to=provider)
        backward.product(execute(1, 1, direction="backward"), ones(1))
        forward.product(execute(0, 1), ones(1))
        connect("bob", to=provider).product(execute(0, 1), ones(1))
        executor = provider.status().executor
    assert executor is not None
    assert {stage: sum(wait.counts) for stage, wait in executor.waits.items()} == {"fine_tuning": 2, "inference": 1}


# Bills


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Says that the executor has been told of a tenant that left."""
    event, cancel = threading.Event(), ExecutorRequester.cancel

    def noted(self: ExecutorRequester) -> None:
        cancel(self)
        event.set()

    monkeypatch.setattr(ExecutorRequester, "cancel", noted)
    return event


def test_refused_and_abandoned_requests_are_counted_apart(
    configure: Configure, connect: Connect, tmp_path: Path, hold: Hold, cancelled: threading.Event
) -> None:
    """Alice leaves while bob's product runs: her request is not computed, and not billed as answered."""
    database = tmp_path / "usage.sqlite"
    with Provider(configure(usage=UsageConfig(database=database))) as provider:
        alice, bob = connect("alice", to=provider), connect("bob", to=provider)
        assert isinstance(alice.ask(execute(0, 1), b"too little"), wire.Failure)
        alice.product(execute(0, 1), ones(1))
        carol = connect("carol", to=provider)
        carol.send(execute(0, 1), b"half of it", announced=4 * WIDTH)
        carol.close()
        begun, go_on = hold()
        bob.send(execute(0, 3), wire.RING32.pack(ones(3)))
        assert begun.wait(20)
        alice.send(execute(1, 1), wire.RING32.pack(ones(1)))
        alice.close()
        assert cancelled.wait(20)
        until(lambda: provider.status().connections == 2)
        counts = {str(tenant): counts.requests for (tenant, _), counts in provider._usage.totals().items()}
        assert sorted(counts.values()) == [0, 1]  # carol's and alice's, not bob's
        go_on.set()
        assert isinstance(bob.receive()[0], wire.Result)
        until(lambda: provider.status().connections == 1)
        report = provider.status().executor
        assert report is not None
        assert (report.cancelled, sum(report.rows_by_group)) == (1, 4)
    bill = {row["tenant"]: row for row in read(database)}
    counted = ("requests", "rows", "refused", "abandoned")
    assert [bill["alice"][name] for name in counted] == [1, 1, 1, 1]
    assert [bill["bob"][name] for name in counted] == [1, 3, 0, 0]
    assert [bill["carol"][name] for name in counted] == [0, 0, 0, 1]


def test_a_tenant_that_leaves_is_billed_for_its_multiplied_rows(
    configure: Configure,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
    cancelled: threading.Event,
) -> None:
    """Alice leaves after the first slice of her request: she is billed for that slice, and no other is multiplied."""
    database = tmp_path / "usage.sqlite"
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", 5)
    with Provider(configure(usage=UsageConfig(database=database))) as provider:
        connect("bob", to=provider).product(execute(0, 5), ones(5))
        alice = connect("alice", to=provider)
        begun, go_on = hold()
        alice.send(execute(0, 20), wire.RING32.pack(ones(20)))
        assert begun.wait(20)
        cancelled.clear()
        alice.close()
        assert cancelled.wait(20)
        go_on.set()
        until(lambda: provider.status().connections == 1)
    bill = {row["tenant"]: row for row in read(database)}
    counted = ("requests", "rows", "abandoned", "failed", "bytes_sent")
    assert [bill["alice"][name] for name in counted] == [0, 5, 1, 0, 0]
    assert bill["alice"]["work"] == bill["bob"]["work"]
    assert database.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("answers", ["late", "after the gateway has given up"])
def test_rows_multiplied_for_a_late_request_are_billed(
    answers: str, configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late after the first slice: that slice has taken the time of all tenants."""
    refused, product = threading.Event(), ServedModel.product

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        refused.wait(0.3 if answers == "late" else 20)
        return product(*args, **kwargs)

    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", 5)
    monkeypatch.setattr("provider.gateway.connection.REQUEST_TIMEOUT_S", 0.1)
    with Provider(configure()) as provider:
        alice = connect("alice", to=provider)
        monkeypatch.setattr(ServedModel, "product", slow)
        assert failure(alice.ask(execute(0, 20), wire.RING32.pack(ones(20)))) == wire.ErrorCode.BUSY
        refused.set()

        def billed() -> tuple[int, ...]:
            (one,) = provider.status().tenants
            return one.counts.requests, one.counts.failed, one.counts.rows, one.counts.bytes_received

        until(lambda: billed() == (0, 1, 5, 20 * 4 * WIDTH))
        assert provider.status().tenants[0].counts.work > 0


def test_a_refused_payload_is_paid_for_while_it_is_read(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving before its end saves nothing: the tenant's next connection waits."""
    payload, left = 8 * MIB, 3
    monkeypatch.setattr(quota, "_NO_PRODUCT", QuotaConfig(requests_per_s=1000.0, rows_per_s=8.0 * MIB))
    with Provider(configure()) as provider:
        begun = time.monotonic()
        for _ in range(left):
            alice = connect("alice", to=provider, role=None)
            alice.send(execute(0, 0), bytes(payload - 1), announced=payload)
            alice.close()
        until(lambda: [one.counts.refused for one in provider.status().tenants] == [left], within_s=20)
        assert isinstance(connect("alice", to=provider, role=None).ask(wire.FetchHealth()), wire.HealthReport)
        assert time.monotonic() - begun > 1.0  # 24 MiB at 8 MiB/s, of which 8 MiB are free
        (one,) = provider.status().tenants
    assert (one.counts.refused, one.counts.bytes_received) == (left, left * (payload - 1))


def test_tiny_records_are_paid_for(configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of one byte takes more than half of the time of a full one."""
    rows, paid, pause = ones(4), list[int](), QuotaGate.pause

    def noted(gate: QuotaGate, party: Any, *, size: int) -> float:
        paid.append(size)
        return pause(gate, party, size=size)

    with Provider(configure()) as provider:
        alice, request = connect("alice", to=provider), execute(0, 4)
        payload = bytes(request.encoding.pack(rows))
        monkeypatch.setattr(QuotaGate, "pause", noted)
        alice.product(request, rows)
        assert not paid
        alice.send(request, announced=len(payload))
        for byte in payload:
            alice.send_bytes(bytes([byte]))
        assert isinstance(alice.receive()[0], wire.Result)
        assert sum(paid) >= (len(payload) - 16) << 16


def test_unwritten_usage_is_reported_and_tolerated_for_a_limited_time(
    configure: Configure, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that time tenants are refused with BUSY, and their usage is on the bill once there is room."""
    database = tmp_path / "usage.sqlite"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(usage, "_MAX_UNWRITTEN_S", 0.5)
    with Provider(configure(usage=UsageConfig(database=database))) as provider:
        alice = connect("alice", to=provider)
        alice.product(execute(0, 1), ones(1))
        assert provider.status().usage_unwritten_s == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            alice.product(execute(0, 2), ones(2))
            until(lambda: provider.status().usage_unwritten_s > 0.5)
            assert failure(alice.ask(execute(0, 4), bytes(4 * 4 * WIDTH))) == wire.ErrorCode.BUSY
            assert not provider.status().ready
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        alice.until_served(execute(0, 8), ones(8), within=20)
        assert provider.status().usage_unwritten_s == 0
    (bill,) = read(database)
    assert bill["rows"] == 1 + 2 + 8
    assert bill["requests"] == 3


def test_export(tmp_path: Path, configure: Configure) -> None:
    path = tmp_path / "provider.toml"
    path.write_text(toml_of(configure()))
    run = CliRunner()
    assert isinstance(run.invoke(app, ["usage", "-c", str(path)]).exception, ConfigError)
    usage = UsageCounters(tmp_path / "provider.usage.sqlite")
    usage.count(ALICE, "executor", UsageCounts(requests=2, rows=5))
    usage.count(ALICE, "executor", UsageCounts(requests=1, rows=1))
    usage.settle()
    rows = json.loads(run.invoke(app, ["usage", "-c", str(path)]).stdout)
    assert [(r["tenant"], r["requests"], r["rows"]) for r in rows] == [("alice", 3, 6)]
    usage.close()


# Revocation


@pytest.fixture
def dora(keys: Keys, tmp_path: Path) -> Identity:
    """A separate tenant that the tests revoke."""
    return issuing.issue(tmp_path, authority=keys.authority, kind=Kind.TENANT, name="dora")


def test_a_revoked_tenants_connection_is_closed_during_a_request(
    configure: Configure, connect: Connect, keys: Keys, tmp_path: Path, dora: Identity
) -> None:
    """Revocation needs no new authority, affects no other tenant, and is reported when the tenant connects again."""
    listed = tmp_path / "revoked.txt"
    listed.touch()
    context = client_context(certificate=dora.certificate, key=dora.key, pins=(keys.provider.certificate,))
    with Provider(configure(revoked=listed)) as provider:
        alice = connect("alice", to=provider)
        revoked = connect(context=context, to=provider)
        revoked.product(execute(0, 1), ones(1))
        revoked.send(execute(0, 100), announced=100 * WIDTH * 4)  # a request whose payload is being sent
        result = CliRunner().invoke(keys_cli.app, ["revoke", "--name", "dora", "--directory", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert revoked.at_end()
        alice.product(execute(0, 1), ones(1))
        again = connect(context=context, role=None, to=provider)
        assert failure(again.receive()[0]) == wire.ErrorCode.REVOKED
        assert again.at_end()


def test_requests_are_refused_once_the_certificate_has_expired(
    configure: Configure, connect: Connect, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake checks the lifetime once, but a connection may be open for months."""
    erin = issuing.issue(tmp_path, authority=keys.authority, kind=Kind.TENANT, name="erin", days=1)
    context = client_context(certificate=erin.certificate, key=erin.key, pins=(keys.provider.certificate,))
    real_now = reading.now
    with Provider(configure()) as provider:
        alice, open_one = connect("alice", to=provider), connect(context=context, to=provider)
        open_one.product(execute(0, 1), ones(1))
        monkeypatch.setattr(reading, "now", lambda: real_now() + timedelta(days=2))
        monkeypatch.setattr(time, "time", lambda: reading.now().timestamp())
        open_one.send(execute(0, 1), bytes(4 * WIDTH))
        reply, _ = open_one.receive()
        assert failure(reply) == wire.ErrorCode.REVOKED
        assert "expired" in str(reply)
        assert open_one.at_end()
        alice.product(execute(0, 1), ones(1))
        peer = AuthenticatedPeer(ALICE, "mark", not_after=real_now() + timedelta(days=9))
        authorities = {ALICE.authority: real_now() + timedelta(days=1)}
        assert Credentials(context, authorities=authorities, revoked=frozenset()).refusal(peer) is not None


def test_a_revoked_certificate_with_the_other_signature_is_refused(
    configure: Configure, connect: Connect, keys: Keys, tmp_path: Path, dora: Identity
) -> None:
    """(r, n - s) is as valid a signature as (r, s), and everybody who has one can write the other."""
    listed = tmp_path / "revoked.txt"
    listed.touch()
    twin = twin_of(dora, tmp_path / "twin")
    context = client_context(certificate=twin.certificate, key=twin.key, pins=(keys.provider.certificate,))
    with Provider(configure(revoked=listed)) as provider:
        before = connect(context=context, to=provider)  # otherwise this test would prove nothing
        revoke(listed, [dora.certificate])
        provider.reload()
        assert before.at_end()
        assert failure(connect(context=context, role=None, to=provider).receive()[0]) == wire.ErrorCode.REVOKED


def test_a_missing_or_malformed_revocation_list_prevents_a_start(configure: Configure, tmp_path: Path) -> None:
    """`test_reload.py` tries one in a running provider."""
    listed = tmp_path / "revoked.txt"
    config = configure(revoked=listed)
    with pytest.raises(CertificateError, match="keys revoke"):
        Provider(config).start()
    listed.write_text("everybody\n")
    with pytest.raises(CertificateError, match="line 1"):
        Provider(config).start()


def test_the_revocation_list(keys: Keys, tmp_path: Path, dora: Identity) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("# who left\n")
    first = revoke(listed, [dora.certificate, dora.certificate])
    assert first == [mark_of(reading.load_certificates(dora.certificate)[0])]
    assert revoke(listed, [dora.certificate]) == []
    assert load_revoked(listed) == frozenset(first)
    assert listed.read_text().startswith("# who left\n")
    listed.write_text("# being copied\n")
    assert load_revoked(listed, known=frozenset(first)) == frozenset(first)
    with pytest.raises(CertificateError, match="neither a tenant's nor a provider's"):
        revoke(listed, [keys.authority.certificate])


# Reload


def test_a_new_certificate_and_new_quotas_are_taken_over(
    launch: Launch, configure: Configure, connect: Connect, keys: Keys, tmp_path: Path
) -> None:
    """After SIGHUP, existing connections stay open, and new connections see the new certificate."""
    own = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="turning")
    service = launch(configure(certificate=own.certificate, key=own.key))
    identity = keys.tenants["alice"]

    def context() -> ssl.SSLContext:
        return client_context(certificate=identity.certificate, key=identity.key, pins=(own.certificate,))

    client = connect(context=context(), to=service)
    issuing.rotate(own.certificate)
    text = service.config_file.read_text()
    service.config_file.write_text(text.replace("[tenants]", "[tenants.alice]\nrows_per_s = 1.0\n"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: any(line["event"] == "reloaded" for line in service.logged()))
    client.product(execute(0, 50), ones(50))
    assert isinstance(client.ask(execute(0, 1), bytes(4 * WIDTH)), wire.Failure)
    fresh = connect(context=context(), role=None, to=service)
    assert isinstance(fresh.ask(wire.FetchHealth()), wire.HealthReport)
