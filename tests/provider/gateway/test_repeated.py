"""The provider's fast lane: which headers it takes for known, and that no tenant gains anything by it."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from provider.config.schema import QuotaConfig, UsageConfig
from provider.executor.client import ExecutorHandle
from provider.executor.executor import Executor
from provider.gateway.connection import Connection
from provider.gateway.credentials import Credentials
from provider.gateway.repeated import parts_of
from provider.gateway.usage import UsageCounters, read
from provider.serve import Provider
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.network import wire
from symbiosis_priv.network.stream import FrameStream
from tests.provider.clients import Client, execute, failure
from tests.provider.conftest import Configure, Connect
from tests.waiting import until

WIDTH = 64
CODE = wire.ErrorCode

NONCES = st.binary(min_size=wire.NONCE_BYTES, max_size=wire.NONCE_BYTES)
REQUESTS = st.builds(
    wire.Execute,
    nonce=NONCES,
    group=st.integers(0, 300),
    direction=st.sampled_from(DIRECTIONS),
    arithmetic=st.sampled_from(["ring", "float", "float_bias_free"]),
    rows=st.integers(0, 300),
    ring_bits=st.sampled_from([32, 24]),
    counts=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
PLAIN = REQUESTS.filter(lambda request: request.counts is None)


def known_parts(frame: wire.Buffer) -> tuple[bytes, bytes]:
    parts = parts_of(frame)
    assert parts is not None
    return parts


def like(request: wire.Execute) -> wire.Execute:
    return msgspec.structs.replace(request, nonce=bytes(wire.NONCE_BYTES))


@given(request=PLAIN, other=REQUESTS, sizes=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_a_header_that_differs_in_its_nonce_only_is_the_same_request(
    request: wire.Execute, other: wire.Execute, sizes: tuple[int, int]
) -> None:
    """A connection knows headers of plain requests. Nothing else that a tenant can send has such a key."""
    first, second = (wire.encode(r, payload_bytes=size) for r, size in zip((request, other), sizes, strict=True))
    same = like(request) == like(other) and sizes[0] == sizes[1]
    (key, nonce), others = known_parts(first + b"rows"), parts_of(second + b"other rows")
    assert (others is not None and key == others[0]) == same
    assert nonce == request.nonce


@given(request=PLAIN, change=st.integers(1, 255))
def test_a_header_with_another_byte_is_not_known(request: wire.Execute, change: int) -> None:
    """Unless the byte belongs to the nonce: then the parser reads the request with that nonce."""
    frame = wire.encode(request, payload_bytes=8)
    known, _ = known_parts(frame)
    for at in range(len(frame)):
        assert parts_of(frame[:at]) is None
        other = bytearray(frame)
        other[at] ^= change
        if (parts := parts_of(other)) is not None and parts[0] == known:
            assert wire.decode_request(other[wire.PREFIX.size :]) == msgspec.structs.replace(request, nonce=parts[1])
            assert parts[1] != request.nonce


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each repeated request that was not refused: whether its product was computed at once."""
    answered: list[bool] = []
    multiply = Executor.multiply_at_once

    def observed(self: Executor, *arguments: Any) -> bool:
        answered.append(multiply(self, *arguments))
        return answered[-1]

    monkeypatch.setattr(Executor, "multiply_at_once", observed)
    return answered


@pytest.fixture
def served(configure: Configure, tmp_path: Path) -> Iterator[Provider]:
    with Provider(configure(usage=UsageConfig(database=tmp_path / "usage.sqlite"))) as provider:
        yield provider


def ones(rows: int) -> Tensor:
    return torch.ones(rows, WIDTH, dtype=torch.int32)


def has_no_connections(provider: Provider) -> bool:
    return not provider.status().connections


def in_lane(client: Client, at_once: list[bool]) -> None:
    """Repeat a request until it is answered at once."""

    def answered() -> bool:
        client.product(execute(0, 1), ones(1))
        return at_once[-1:] == [True]

    until(answered)


@pytest.mark.parametrize("ring_bits", [32, 24])
def test_repeated_requests_have_the_same_products_bills_and_records(
    ring_bits: wire.RingBits,
    configure: Configure,
    connect: Connect,
    store: WeightStore,
    tmp_path: Path,
    at_once: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = [(group, rows) for group, rows in itertools.product((0, 1), (1, 3, 8, 9)) for _ in range(4)]
    bills, records, products = [], [], []
    for lane in (True, False):
        database = tmp_path / f"{lane}.sqlite"
        with monkeypatch.context() as patch, Provider(configure(usage=UsageConfig(database=database))) as provider:
            if not lane:
                patch.setattr(Connection, "_learn", lambda *_: None)
            client = connect("alice", to=provider)
            generator = torch.Generator().manual_seed(0)
            for group, rows in sent:
                x = torch.randint(-(1 << 23), 1 << 23, (rows, WIDTH), dtype=torch.int32, generator=generator)
                request = msgspec.structs.replace(execute(group, rows), ring_bits=ring_bits)
                products.append(client.product(request, x))
                assert torch.equal(products[-1] << 32 - ring_bits, store.matrix(group).product(x) << 32 - ring_bits)
            client.close()
            until(partial(has_no_connections, provider))
            report = provider.status().executor
            assert report is not None
            waits = {stage: sum(histogram.counts) for stage, histogram in report.waits.items()}
            counted = report.rows_by_group, report.batch_rows, report.batch_requests, report.late, report.failed
            records.append((counted, waits))
            assert report.seconds > 0
        bills.append(list(read(database)))
    assert bills[0] == bills[1]
    assert bills[0][0]["requests"] == len(sent)
    assert records[0] == records[1]
    assert all(map(torch.equal, products[: len(sent)], products[len(sent) :]))
    assert at_once.count(True) >= len(sent) // 2  # all but the first of each kind, and those of nine rows


def test_a_tenant_has_its_new_weight_after_a_reload(
    served: Provider, connect: Connect, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect("alice", to=served)
    in_lane(client, at_once)
    weights, make = list[float](), Executor._job_of

    def noted(self: Executor, *arguments: Any) -> Any:
        job = make(self, *arguments)
        weights.append(job.weight)
        return job

    monkeypatch.setattr(Executor, "_job_of", noted)
    assert served._gateway is not None
    served._gateway.state.quotas.renew(lambda _: QuotaConfig(weight=7.0))
    client.product(execute(0, 1), ones(1))
    assert weights[-1] == 7.0


def without_authorities(provider: Provider) -> Credentials:
    assert provider._gateway is not None
    return dataclasses.replace(provider._gateway._credentials, authorities={})


def over_quota(patch: pytest.MonkeyPatch, provider: Provider) -> None:
    """A quota that the tenants have used for the next minute."""
    assert provider._gateway is not None
    quotas = provider._gateway.state.quotas
    quotas.renew(lambda _: QuotaConfig(rows_per_s=1.0))
    for tenant, _ in provider._usage.totals():
        quotas.admit(tenant, rows=100, work=0)


Break = Callable[[pytest.MonkeyPatch, Provider], None]
REASONS: dict[str, tuple[Break, wire.ErrorCode]] = {
    "revoked": (lambda patch, p: patch.setattr(p._gateway, "_credentials", without_authorities(p)), CODE.REVOKED),
    "unbilled": (lambda patch, _: patch.setattr(UsageCounters, "unwritten_s", 1e9), CODE.BUSY),
    "no executor": (lambda patch, _: patch.setattr(ExecutorHandle, "present", False), CODE.BUSY),
    "quota": (over_quota, CODE.BUSY),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_repeated_request_is_refused_for_every_reason_that_may_arise_meanwhile(
    reason: str, served: Provider, connect: Connect, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile tenant first earns the lane, and then goes on although it may not."""
    client = connect("alice", to=served)
    in_lane(client, at_once)
    count, (arise, code) = len(at_once), REASONS[reason]
    with monkeypatch.context() as patch:
        arise(patch, served)
        for _ in range(1 if code is CODE.REVOKED else 3):
            assert failure(client.ask(execute(0, 1), wire.RING32.pack(ones(1)))) == code
    assert len(at_once) == count  # refused before the executor was asked
    until(lambda: sum(each.refused for each in served._usage.totals().values()) == (1 if code is CODE.REVOKED else 3))


def test_rows_that_arrive_late_are_waited_for(
    served: Provider, connect: Connect, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the lane: rows of several records arrive in parts. A tenant that leaves meanwhile is billed for it."""
    client, waits, gather = connect("alice", to=served), threading.Event(), FrameStream.gather
    in_lane(client, at_once)

    def spied(stream: FrameStream, size: int, *, deadline: float) -> bool:
        waits.set()
        return gather(stream, size, deadline=deadline)

    monkeypatch.setattr(FrameStream, "gather", spied)
    request, rows, count = execute(0, 1), bytes(wire.RING32.pack(ones(1))), len(at_once)
    client.send(request, rows[:100], announced=len(rows))
    assert waits.wait(20)
    client.send_bytes(rows[100:])
    reply, _ = client.receive()
    until(lambda: at_once[count:] == [True])
    assert isinstance(reply, wire.Result)
    assert reply.answers(request)
    waits.clear()
    client.send(request, rows[:100], announced=len(rows))
    assert waits.wait(20)
    client.close()
    until(lambda: sum(each.abandoned for each in served._usage.totals().values()) == 1)
    ((_, counts),) = served._usage.totals().items()
    assert counts.bytes_received == counts.requests * len(rows) + 100


def test_nobody_is_overtaken(
    served: Provider, connect: Connect, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the executor is busy, or another tenant is expected, a repeated request is queued as any other."""
    alice, bob = connect("alice", to=served), connect("bob", to=served)
    in_lane(alice, at_once)
    bob.product(execute(0, 1), ones(1))  # and is expected again
    begun, go_on = threading.Event(), threading.Event()
    run = Executor._run_batch

    def slow(self: Executor, *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(20)
        run(self, *arguments)

    monkeypatch.setattr(Executor, "_run_batch", slow)
    bob.send(execute(0, 20), wire.RING32.pack(ones(20)))
    assert begun.wait(20)
    count = len(at_once)
    alice.send(execute(0, 1), wire.RING32.pack(ones(1)))
    until(lambda: len(at_once) > count)
    assert at_once[-1] is False
    go_on.set()
    assert isinstance(bob.receive()[0], wire.Result)
    assert isinstance(alice.receive()[0], wire.Result)


@pytest.mark.parametrize("reason", ["has a quota", "trains on another connection"])
def test_a_tenant_that_is_limited_or_trains_is_queued(
    reason: str, served: Provider, connect: Connect, store: WeightStore, at_once: list[bool]
) -> None:
    """Fine-tuning must not take the turn of inference."""
    client, other = connect("alice", to=served), connect("alice", to=served)
    in_lane(client, at_once)
    assert served._gateway is not None
    if reason == "has a quota":
        served._gateway.state.quotas.renew(lambda _: QuotaConfig(rows_per_s=1e6))
    else:
        outputs, _ = store.manifest().groups[0].columns("backward")
        other.product(execute(0, 1, direction="backward"), torch.ones(1, outputs, dtype=torch.int32))
    count = len(at_once)
    for _ in range(5):  # a reload ends the lane for the first one in any case
        client.product(execute(0, 1), ones(1))
    assert len(at_once) == count
