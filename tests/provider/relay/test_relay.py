"""A helper relays effects to an executor over real connections, and everything that must not work does not."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from provider.config.schema import QuotaConfig, RelayConfig, RelayTarget
from provider.gateway.credentials import Credentials
from provider.gateway.quota import QuotaGate
from provider.relay import links
from provider.scheduler.scheduler import Scheduler
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind, fingerprint, is_signed, load_certificates, sign
from symbiosis_priv.certificates.revocation import mark_of
from symbiosis_priv.errors import CertificateError, SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import listen
from symbiosis_priv.network.block_statement import block_id, statement
from symbiosis_priv.network.tls import TenantIdentity, client_context
from tests.provider.clients import TIMEOUT_S, Client, failure
from tests.provider.relay.conftest import configured
from tests.waiting import beside, until

Patch = pytest.MonkeyPatch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.provider.conftest import Configure, Keys
    from tests.provider.relay.conftest import NewTenant, Pair, Tenant

GROUP = 1


def ring_rows(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**31), 2**31, (rows, width), generator=generator, dtype=torch.int32, device="cpu")


def low(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    return matrix & ((1 << bits) - 1)


@pytest.mark.parametrize("ring_bits", [32, 24])
def test_an_answer_without_blocks_is_opened_with_the_second_keystream(
    new_tenant: NewTenant, ring_bits: wire.RingBits
) -> None:
    tenant = new_tenant()
    for direction in DIRECTIONS:
        effect = tenant.relay(1, 5, first_row=7, direction=direction, ring_bits=ring_bits)
        e, m = tenant.matrices(effect)
        rows = ring_rows(5, tenant.width(effect))
        reply, answer = tenant.product(rows, effect)
        assert reply.relayed
        opened = answer + m
        assert torch.equal(low(opened, ring_bits), low(tenant.times(rows, effect) - e, ring_bits))


@pytest.fixture
def impatient(monkeypatch: Patch) -> None:
    """The executor waits for missing blocks only briefly."""
    monkeypatch.setattr("provider.gateway.connection._BLOCK_WAIT_S", 0.02)


def part_of(effect: wire.Effect, *, start: int = 0, first: int = 0, rows: int) -> wire.BlockRows:
    return wire.BlockRows(block=block_id(effect), start=start, first=first, rows=rows)


def test_rows_of_several_blocks_meet_in_one_answer_and_each_is_used_once(new_tenant: NewTenant) -> None:
    tenant = new_tenant()
    one, other = (tenant.relay(GROUP, 3, first_row=first, seed=secrets.token_bytes(32)) for first in (0, 10))
    rows = ring_rows(4, tenant.width(one))
    parts = (part_of(one, start=1, rows=2), part_of(other, first=2, rows=2))
    reply, answer = tenant.product(rows, one, blocks=parts)
    assert reply.relayed
    (e_one, m_one), (e_other, m_other) = tenant.matrices(one), tenant.matrices(other)
    blocks = torch.cat([(e_one + m_one)[1:3], (e_other + m_other)[:2]])
    assert torch.equal(answer, tenant.times(rows, one) - blocks)
    for again in (parts, parts[:1]):
        reply, answer = tenant.product(rows, one, blocks=again)
        assert not reply.relayed
        assert torch.equal(answer, tenant.times(rows, one))
    reply, answer = tenant.product(rows[:1], one, blocks=(part_of(one, rows=1), part_of(other, start=2, rows=1)))
    assert reply.relayed  # two helpers' blocks cover one row
    assert torch.equal(answer, tenant.times(rows[:1], one) - (e_one + m_one)[:1] - (e_other + m_other)[2:])


def test_a_tenant_reaches_only_its_own_blocks(new_tenant: NewTenant, impatient: None) -> None:
    alice, bob = new_tenant("alice"), new_tenant("bob")
    effect = alice.relay(GROUP, 2)
    rows = ring_rows(2, alice.width(effect))
    reply, answer = bob.product(rows, effect)
    assert not reply.relayed
    assert torch.equal(answer, alice.times(rows, effect))
    assert failure(bob.executor.ask(wire.FetchBlock(block=block_id(effect)))) == wire.ErrorCode.REFUSED
    assert alice.product(rows, effect)[0].relayed


def test_blocks_are_billed(new_tenant: NewTenant, pair: Pair) -> None:
    """At the helper that sends them, at the executor that receives them, and when it hands them out."""

    def total(provider: Provider) -> tuple[int, int]:
        assert provider._gateway is not None
        counts = provider._gateway.state.usage.totals().values()
        return sum(one.bytes_received for one in counts), sum(one.bytes_sent for one in counts)

    def billed(provider: Provider) -> tuple[int, int]:
        return total(provider)[0] - before[provider][0], total(provider)[1] - before[provider][1]

    tenant = new_tenant()
    before = {provider: total(provider) for provider in (pair.helper, pair.executor)}
    effect = tenant.relay(GROUP, 3, ring_bits=24)
    size = wire.RING24.size(3, tenant.matrices(effect)[0].shape[1])
    assert billed(pair.helper) == (0, size)
    assert billed(pair.executor) == (size, 0)
    for number in range(1, 3):
        tenant.executor.send(wire.FetchBlock(block=block_id(effect)))
        tenant.executor.receive()
        assert billed(pair.executor) == (size, number * size)


def test_the_second_keystream_is_charged_and_billed(new_tenant: NewTenant, pair: Pair, monkeypatch: Patch) -> None:
    """The helper's second keystream has the columns of the product, as its first one has the columns of the rows."""
    tenant, put, charged = new_tenant(), Scheduler.put, list[int]()

    def record(scheduler: Any, job: Any) -> None:
        charged.append(job.rows * (job.row_cost - job.row_work))
        put(scheduler, job)

    def billed() -> int:
        assert pair.helper._gateway is not None
        return sum(one.work for one in pair.helper._gateway.state.usage.totals().values())

    monkeypatch.setattr(Scheduler, "put", record)
    before = billed()
    effect = tenant.relay(GROUP, 3)
    relayed = billed() - before
    tenant.helper.send(msgspec.structs.replace(effect, nonce=bytes(16), relay=None))
    tenant.helper.receive()
    inputs, outputs = tenant.store.manifest().groups[GROUP].columns("forward")
    assert charged[0] * inputs == charged[1] * (inputs + outputs)
    assert 2 * relayed - (billed() - before) == charged[0] - charged[1]


def test_evidence_is_kept_until_the_answer_is_confirmed(new_tenant: NewTenant, pair: Pair) -> None:
    tenant = new_tenant()
    effect = tenant.relay(GROUP, 2, ring_bits=24)
    rows = ring_rows(2, tenant.width(effect))
    reply, _ = tenant.product(rows, effect)
    tenant.executor.send(wire.FetchBlock(block=block_id(effect)))
    block, payload = tenant.executor.receive()
    assert isinstance(block, wire.Block)
    assert block.helper == pair.helper_certificate
    key = load_certificates(pair.helper_identity.certificate)[0].public_key()
    message = statement(block, permit=tenant.permit, executor=pair.executor_certificate, payload=payload)
    assert is_signed(key, message, block.signature)
    e, m = tenant.matrices(effect)
    assert torch.equal(low(wire.RING24.unpack(payload, rows=2), 24), low(e + m, 24))
    other = tenant.relay(GROUP, 2, first_row=100)
    tenant.product(rows, other, confirms=(reply.nonce,))
    assert isinstance(tenant.executor.ask(wire.FetchBlock(block=block_id(effect))), wire.Failure)
    assert isinstance(tenant.executor.ask(wire.FetchBlock(block=block_id(other))), wire.Block)
    kept = pair.executor.status().blocks.blocks
    tenant.executor.close()  # no answer on this connection is open to dispute any more
    until(lambda: pair.executor.status().blocks.blocks < kept)


def test_a_missing_block_gives_the_plain_product(new_tenant: NewTenant, pair: Pair, impatient: None) -> None:
    tenant = new_tenant()
    effect = tenant.order(GROUP, 2, first_row=12345)
    rows = ring_rows(2, tenant.width(effect))
    reply, answer = tenant.product(rows, effect)
    assert not reply.relayed
    assert torch.equal(answer, tenant.times(rows, effect))
    unknown, known = (wire.PermitRequest(helpers=(name,)) for name in ("sha256:" + 64 * "0", pair.helper_certificate))
    assert failure(tenant.executor.ask(unknown)) == wire.ErrorCode.NOT_SERVED
    assert failure(tenant.helper.ask(known)) == wire.ErrorCode.ROLE_REFUSED


def test_a_block_that_arrives_after_the_request_is_waited_for(new_tenant: NewTenant, monkeypatch: Patch) -> None:
    monkeypatch.setattr("provider.gateway.connection._BLOCK_WAIT_S", 20.0)
    tenant = new_tenant()
    effect = tenant.order(GROUP, 2, first_row=54321)
    late = threading.Thread(target=lambda: tenant.helper.ask(effect))
    rows = ring_rows(2, tenant.width(effect))
    late.start()  # before or after the request: both must give the same answer
    reply, answer = tenant.product(rows, effect)
    late.join()
    assert reply.relayed
    e, m = tenant.matrices(effect)
    assert torch.equal(answer, tenant.times(rows, effect) - e - m)


# A helper that misbehaves


class Link(Client):
    """A connection with the helper's certificate."""

    def __init__(self, pair: Pair, keys: Keys, identity: Identity | None = None) -> None:
        self.identity = identity or pair.helper_identity
        pins = [keys.provider.certificate]
        own = self.identity
        context = client_context(certificate=own.certificate, key=own.key, pins=pins, kind=Kind.PROVIDER)
        super().__init__(pair.executor.address, context)
        self._executor = pair.executor_certificate

    def deposit(
        self, tenant: Tenant, *, size: int | None = None, signed: bool = True, cut: int = 0, **fields: Any
    ) -> wire.LinkReply:
        """Send a block, with faults. `cut` bytes of its payload are not sent."""
        values: dict[str, Any] = {
            "nonce": secrets.token_bytes(16),
            "group": GROUP,
            "direction": "forward",
            "arithmetic": "ring",
        }
        values |= {"rows": 2, "permit": tenant.permit} | fields
        width = tenant.store.manifest().groups[GROUP].columns("forward")[1]
        payload = secrets.token_bytes(wire.RING32.size(values["rows"], width) if size is None else size)
        block = wire.Deposit(**values, signature=b"-")
        message = statement(block, permit=block.permit, executor=self._executor, payload=payload)
        signature = sign(self.identity.private_key(), message if signed else message + b"?")
        block = msgspec.structs.replace(block, signature=signature)
        self.send(block, payload[: len(payload) - cut], announced=len(payload))
        if cut:
            raise EOFError
        header, _ = self.line.receive_header(max_payload=0, deadline=time.monotonic() + TIMEOUT_S)
        return wire.decode_link_reply(header)


def is_turned_away(link: Link, tenant: Tenant) -> bool:
    """True if the connection ends, by an alert or a reset, before a block was answered."""
    with closing(link):
        try:
            link.deposit(tenant)
        except SymbiosisError:
            return True
        return False


@pytest.fixture
def link(pair: Pair, keys: Keys) -> Any:
    with closing(Link(pair, keys)) as link:
        yield link


def test_bad_deposits_are_refused_and_the_link_stays_open(new_tenant: NewTenant, link: Link, pair: Pair) -> None:
    tenant = new_tenant()
    before = pair.executor.status().blocks
    huge = tenant.store.manifest()
    wrong: list[tuple[dict[str, Any], wire.ErrorCode]] = [
        ({"permit": secrets.token_bytes(32)}, wire.ErrorCode.REFUSED),
        ({"signed": False}, wire.ErrorCode.REFUSED),
        ({"size": 7}, wire.ErrorCode.BAD_REQUEST),
        ({"size": 0}, wire.ErrorCode.BAD_REQUEST),
        ({"rows": 0, "size": 0}, wire.ErrorCode.BAD_REQUEST),
        ({"group": len(huge.groups)}, wire.ErrorCode.BAD_REQUEST),
        ({"counts": (1, 1)}, wire.ErrorCode.BAD_REQUEST),
        ({"arithmetic": "float"}, wire.ErrorCode.BAD_REQUEST),
        ({"rows": wire.MAX_ROWS, "size": 0}, wire.ErrorCode.TOO_LARGE),
        ({"rows": 10_000}, wire.ErrorCode.BUSY),  # over the tenant's share of the memory
    ]
    for fields, code in wrong:
        assert failure(link.deposit(tenant, **fields)) == code, fields
    assert pair.executor.status().blocks == before
    block = secrets.token_bytes(16)
    assert link.deposit(tenant, nonce=block) == wire.Deposited(block=block)
    assert failure(link.deposit(tenant, nonce=block)) == wire.ErrorCode.REFUSED
    assert link.deposit(new_tenant("bob"), nonce=block) == wire.Deposited(block=block)  # ids are each tenant's own


def test_a_block_with_a_wrong_signature_is_paid_for_and_billed(
    new_tenant: NewTenant, link: Link, pair: Pair, monkeypatch: Patch
) -> None:
    """Its bytes count against the helper's rate, and are on the bill of the tenant that has chosen the helper."""
    tenant, paid, pause = new_tenant(), list[int](), QuotaGate.pause

    def noted(gate: QuotaGate, party: Any, *, size: int) -> float:
        paid.append(size)
        return pause(gate, party, size=size)

    def billed() -> tuple[int, int]:
        assert pair.executor._gateway is not None
        counts = pair.executor._gateway.state.usage.totals().values()
        return sum(one.refused for one in counts), sum(one.bytes_received for one in counts)

    before = billed()
    monkeypatch.setattr(QuotaGate, "pause", noted)
    assert failure(link.deposit(tenant, signed=False)) == wire.ErrorCode.REFUSED
    size = wire.RING32.size(2, tenant.store.manifest().groups[GROUP].columns("forward")[1])
    until(lambda: paid == [size])
    assert billed() == (before[0] + 1, before[1] + size)
    assert isinstance(link.deposit(tenant, size=7), wire.Failure)
    assert billed() == (before[0] + 2, before[1] + size + 7)


def test_blocks_count_against_the_tenants_quota_and_not_against_its_requests(
    new_tenant: NewTenant, link: Link, pair: Pair
) -> None:
    """A helper that floods is refused at once. Requests of the tenant and blocks of others are not."""
    alice, bob = new_tenant("alice"), new_tenant("bob")
    assert pair.executor._gateway is not None
    gate, quotas = pair.executor._gateway.state.quotas, pair.executor.config.quota_of
    gate.renew(lambda tenant: QuotaConfig(rows_per_s=0.1) if tenant.name == "alice" else quotas(tenant))
    try:
        replies = [link.deposit(alice) for _ in range(5)]
        assert isinstance(replies[0], wire.Deposited)
        for reply in replies[1:]:
            assert isinstance(reply, wire.Failure)
            assert (reply.code, str(reply.limit)) == (wire.ErrorCode.BUSY, "0.1 rows/s")
        assert isinstance(link.deposit(bob), wire.Deposited)
        rows = ring_rows(1, alice.width(alice.order(GROUP, 1)))
        answer, _ = alice.product(rows, alice.order(GROUP, 1), blocks=())
        assert answer.limit is None
    finally:
        gate.renew(quotas)


def test_blocks_that_a_tenant_fetches_count_against_its_quota(new_tenant: NewTenant, pair: Pair) -> None:
    """A request for a block has 70 bytes, and the answer may have hundreds of megabytes."""
    tenant = new_tenant("bob")
    effect = tenant.relay(GROUP, 3)
    assert pair.executor._gateway is not None
    gate, quotas = pair.executor._gateway.state.quotas, pair.executor.config.quota_of
    gate.renew(lambda _: QuotaConfig(rows_per_s=0.1))
    try:
        tenant.product(ring_rows(1, tenant.width(effect)), effect, blocks=())  # leaves no rows for another product
        tenant.executor.send(wire.FetchBlock(block=block_id(effect)))
        assert isinstance(tenant.executor.receive()[0], wire.Block)
        refused = tenant.executor.ask(wire.FetchBlock(block=block_id(effect)))
        assert isinstance(refused, wire.Failure)
        assert (refused.code, str(refused.limit)) == (wire.ErrorCode.BUSY, "0.1 rows/s")
    finally:
        gate.renew(quotas)


def test_a_helper_that_leaves_within_a_block_holds_no_memory(
    new_tenant: NewTenant, link: Link, pair: Pair, keys: Keys
) -> None:
    tenant, block = new_tenant(), secrets.token_bytes(16)
    before = pair.executor.status().blocks
    with closing(Link(pair, keys)) as leaving:
        with pytest.raises(EOFError):
            leaving.deposit(tenant, nonce=block, cut=1)
        until(lambda: pair.executor.status().blocks.blocks > before.blocks)  # taken before the payload is complete
        assert isinstance(link.deposit(tenant, nonce=block), wire.Failure)
    until(lambda: pair.executor.status().blocks == before)
    assert isinstance(link.deposit(tenant, nonce=block), wire.Deposited)


def test_a_tenant_that_has_not_named_the_helper_gets_no_blocks(
    new_tenant: NewTenant, link: Link, pair: Pair, keys: Keys, tmp_path: Path
) -> None:
    """The operator allows another helper, too. Its permit is of no use to this one, and the other way round."""
    tenant, other = new_tenant(), issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="gamma")
    with allowed(pair, (pair.helper_identity.certificate, other.certificate)):
        permit = tenant.executor.ask(wire.PermitRequest(helpers=(fingerprint(other.certificate),)))
        assert isinstance(permit, wire.Permit)
        assert isinstance(link.deposit(tenant, permit=permit.token), wire.Failure)
        with closing(Link(pair, keys, other)) as gamma:
            assert isinstance(gamma.deposit(tenant), wire.Failure)
            assert isinstance(gamma.deposit(tenant, permit=permit.token), wire.Deposited)
    assert is_turned_away(Link(pair, keys, other), tenant)


class allowed:
    """The executor's operator allows these helpers, for the duration of the context."""

    def __init__(self, pair: Pair, certificates: tuple[Path, ...]) -> None:
        self._pair, self._certificates = pair, certificates

    def __enter__(self) -> None:
        self._renew(self._certificates)

    def __exit__(self, *_: object) -> None:
        self._renew((self._pair.helper_identity.certificate,))

    def _renew(self, certificates: tuple[Path, ...]) -> None:
        executor = self._pair.executor
        relay = msgspec.structs.replace(executor.config.relay, helpers=certificates)
        executor.config = msgspec.structs.replace(executor.config, relay=relay)
        executor._reload()


def test_a_link_that_is_not_allowed_any_more_is_closed(
    new_tenant: NewTenant, link: Link, pair: Pair, tmp_path: Path
) -> None:
    tenant, other = new_tenant(), issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="gamma")
    assert isinstance(link.deposit(tenant), wire.Deposited)
    with allowed(pair, (other.certificate,)):
        assert link.at_end()


def test_a_helper_brings_no_blocks_for_a_tenant_whose_certificate_was_revoked(
    new_tenant: NewTenant, link: Link, pair: Pair, keys: Keys, monkeypatch: Patch
) -> None:
    """The helper may not have the list yet, and the tenant's permit lasts for an hour."""
    tenant = new_tenant("alice")
    assert isinstance(link.deposit(tenant), wire.Deposited)
    gateway = pair.executor._gateway
    assert gateway is not None
    mark = mark_of(load_certificates(keys.tenants["alice"].certificate)[0])
    monkeypatch.setattr(gateway, "_credentials", replace(gateway._credentials, revoked=frozenset({mark})))
    refused = link.deposit(tenant)
    assert isinstance(refused, wire.Failure)
    assert "permit" in refused.detail


def test_a_link_carries_nothing_but_blocks(link: Link, pair: Pair, new_tenant: NewTenant) -> None:
    hello = wire.Hello(version=wire.RELAY_VERSION, role="executor", model_digest=pair.executor.model_digest)
    assert failure(link.ask(hello)) == wire.ErrorCode.BAD_FRAME
    assert link.at_end()
    tenant = new_tenant()
    binding: dict[str, Any] = {"nonce": bytes(16), "group": 0, "direction": "forward", "arithmetic": "ring", "rows": 1}
    deposit = wire.Deposit(**binding, permit=tenant.permit, signature=b"-")
    assert failure(tenant.executor.ask(deposit)) == wire.ErrorCode.BAD_FRAME  # a tenant is not a helper either
    assert tenant.executor.at_end()


def test_only_listed_providers_may_connect(pair: Pair, keys: Keys, tmp_path: Path, new_tenant: NewTenant) -> None:
    """Neither a certificate of the same name, nor one that the tenants' authority has issued."""
    tenant = new_tenant()
    strangers = [
        issuing.issue(tmp_path / "a", authority=None, kind=Kind.PROVIDER, name="beta"),
        issuing.issue(tmp_path / "b", authority=keys.authority, kind=Kind.PROVIDER, name="beta"),
    ]
    for stranger in strangers:
        assert is_turned_away(Link(pair, keys, stranger), tenant)


def test_a_tenants_certificate_is_no_helpers(pair: Pair, keys: Keys) -> None:
    with pytest.raises(CertificateError, match="provider certificate"):
        Credentials.load(pair.executor.config.tls, helpers=[keys.tenants["alice"].certificate])


# A helper's links


def test_a_helper_sends_blocks_to_listed_executors_only(new_tenant: NewTenant, pair: Pair) -> None:
    tenant = new_tenant()
    effect = tenant.order(GROUP, 2)
    elsewhere = wire.RelayOrder(permit=tenant.permit, executor="sha256:" + 64 * "0")
    request = msgspec.structs.replace(effect, relay=elsewhere)
    direct = tenant.helper.product(request)
    assert torch.equal(direct, tenant.matrices(effect)[0])
    assert [link.up for link in pair.helper.status().relay_to] == [True]


def test_a_refused_block_gives_the_effect_and_delays_no_other_tenant(new_tenant: NewTenant, pair: Pair) -> None:
    alice, bob = new_tenant("alice"), new_tenant("bob")
    effect = alice.order(GROUP, 2, first_row=777)
    before = pair.helper.status().relay_to[0]
    for _ in range(20):
        order = wire.RelayOrder(permit=secrets.token_bytes(32), executor=pair.executor_certificate)
        direct = alice.helper.product(msgspec.structs.replace(effect, relay=order))
        assert torch.equal(direct, alice.matrices(effect)[0])
    after = pair.helper.status().relay_to[0]
    assert after.refused - before.refused + after.failed - before.failed == 20
    assert after.failed > before.failed  # later ones were not even sent
    bob.relay(GROUP, 2, first_row=778)


def an_effect(order: wire.RelayOrder) -> wire.Effect:
    return wire.Effect(
        nonce=bytes(16),
        group=0,
        rows=1,
        direction="forward",
        arithmetic="ring",
        seed=Seed(bytes(32)),
        first_row=0,
        relay=order,
    )


def test_a_tenant_does_not_take_all_connections_to_an_executor(keys: Keys, pair: Pair, monkeypatch: Patch) -> None:
    """A tenant with many large blocks, or an executor that takes long with them, delays no other tenant's block."""
    sent, let_go = threading.Semaphore(0), threading.Event()

    def send(link: Any, deposit: wire.Deposit, payload: memoryview, deadline: float) -> str:
        if bytes(payload) == b"large":
            sent.release()
            assert let_go.wait(60)
        return "deposits"

    monkeypatch.setattr(links._Link, "_send", send)
    order = wire.RelayOrder(permit=bytes(32), executor=pair.executor_certificate)
    effect = an_effect(order)
    to = RelayTarget(address="127.0.0.1:1", certificate=keys.provider.certificate)
    config = msgspec.structs.replace(pair.helper.config, relay=RelayConfig(to=(to,)))
    own = links.Links(config)

    def deposit(name: str, payload: bytes) -> bool:
        return own.deposit(TenantIdentity(name, "authority"), effect, order, memoryview(payload))

    assert deposit("greedy", b"small")
    greedy = [threading.Thread(target=deposit, args=("greedy", b"large")) for _ in range(links._CONNECTIONS)]
    for thread in greedy:
        thread.start()
    assert all(sent.acquire(timeout=60) for _ in range(links._CONNECTIONS // 2))
    assert deposit("modest", b"small")
    let_go.set()
    for thread in greedy:
        thread.join()


def test_a_block_that_is_too_large_for_the_executor_costs_no_other_tenant_the_link(
    new_tenant: NewTenant, pair: Pair, configure: Configure, keys: Keys
) -> None:
    """The executor closes the connection, because it reads no frame over its limit."""
    to = RelayTarget(address=pair.executor.address, certificate=keys.provider.certificate)
    relay, limits = RelayConfig(to=(to,)), {"max_payload_mib": 16}
    with Provider(configured(configure, pair.helper_identity, role="helper", relay=relay, **limits)) as helper:
        alice, bob = (new_tenant(name, helper=helper) for name in ("alice", "bob"))
        large = alice.order(2, 9500)
        assert wire.RING32.size(large.rows, alice.matrices(alice.order(2, 1))[0].shape[1]) > 8 << 20
        for tenant in (alice, bob):  # each has a connection in use, and one is idle
            tenant.relay(GROUP, 2)
        alice.helper.product(large)
        bob.relay(GROUP, 2, first_row=10)
        counts = helper.status().relay_to[0]
        assert (counts.up, counts.deposits, counts.refused, counts.failed) == (True, 3, 1, 0)


def test_blocks_that_are_refused_do_not_fill_the_line(pair: Pair, monkeypatch: Patch) -> None:
    """A tenant without a permit asks for blocks over many connections. They are sent before the executor refuses them:
    only one at a time, and no more during the pause that follows."""
    sending, let_go = threading.Semaphore(0), threading.Event()

    def send(*_: Any) -> str:
        sending.release()
        assert let_go.wait(60)
        return "refused"

    monkeypatch.setattr(links._Link, "_send", send)
    monkeypatch.setattr(links, "_REFUSED_S", 3600.0)
    monkeypatch.setattr(links, "_LAST_PAUSE_S", 3600.0)
    config = msgspec.structs.replace(pair.helper.config, relay=RelayConfig(to=pair.helper.config.relay.to))
    own, outcomes = links.Links(config), list[bool]()
    order = wire.RelayOrder(permit=bytes(32), executor=pair.executor_certificate)
    effect = an_effect(order)

    def deposit() -> None:
        outcomes.append(own.deposit(TenantIdentity("greedy", "authority"), effect, order, memoryview(b"block")))

    with beside(*[deposit] * 8, over=let_go):
        assert sending.acquire(timeout=60)
    assert outcomes == 8 * [False]
    assert not sending.acquire(blocking=False)
    counts = own.counts()[0]
    assert (counts.refused, counts.failed, counts.up) == (1, 7, True)


@pytest.mark.parametrize("fault", ["nothing listens", "no handshake", "another certificate"])
def test_an_executor_that_cannot_be_reached_gives_the_effect_and_the_link_comes_back(
    fault: str, new_tenant: NewTenant, configure: Configure, keys: Keys, pair: Pair, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(links, "_CONNECT_S", 0.3)
    monkeypatch.setattr(links, "_FIRST_PAUSE_S", 0.01)
    silent = listen("127.0.0.1:0", backlog=8)
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    certificate = keys.provider.certificate
    if fault == "nothing listens":
        silent.close()
    if fault == "another certificate":
        address, certificate = pair.executor.address, pair.helper_identity.certificate
    to = RelayTarget(address=address, certificate=certificate)
    config = configured(configure, pair.helper_identity, role="helper", relay=RelayConfig(to=(to,)))
    with Provider(config) as helper, closing(silent):
        tenant = new_tenant(helper=helper)
        order = wire.RelayOrder(permit=tenant.permit, executor=fingerprint(certificate))
        for first in range(3):
            effect = msgspec.structs.replace(tenant.order(GROUP, 2, first_row=first), relay=order)
            assert torch.equal(tenant.helper.product(effect), tenant.matrices(effect)[0])
        counts = helper.status().relay_to[0]
        assert not counts.up
        assert counts.failed == 3
        good = RelayTarget(address=pair.executor.address, certificate=keys.provider.certificate)
        helper.config = msgspec.structs.replace(config, relay=RelayConfig(to=(good,)))
        helper._reload()  # the operator corrects the file
        tenant.relay(GROUP, 2, first_row=900)
