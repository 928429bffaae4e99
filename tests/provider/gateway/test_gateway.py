"""Access to the gateway, valid requests, and clients that are slow, many or malformed."""

import contextlib
import secrets
import socket
import ssl
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.config.schema import MIB, Limits, UsageConfig
from provider.executor.client import ExecutorRequester
from provider.gateway.admission import MAX_REQUEST_ROWS, ByteBudget
from provider.gateway.connection import Connection
from provider.gateway.frames import Frames
from provider.gateway.usage import read
from provider.refusal import Refusal
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.hybrid import KeyOffer
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.clients import Client, effect, execute, failure
from tests.provider.conftest import Configure, Connect, Hold, Keys
from tests.waiting import until
from threat_model.conformance.frames import MalformedFrame, malformed_frames

WIDTH = 64  # layer groups of the tiny Llama


def works(client: Client) -> bool:
    return client.product(execute(0, 2), torch.ones(2, WIDTH, dtype=torch.int32)).shape[0] == 2


# Certificates


def open_tcp(provider: Provider, *, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(parse_address(provider.address), timeout=20, source_address=(source, 0))


def refused(connection: socket.socket, context: ssl.SSLContext) -> bool:
    """Returns True if the provider refuses the client. In TLS 1.3 a client learns of a refusal at its first read."""
    with connection, context.wrap_socket(connection, server_hostname="127.0.0.1") as tls:
        try:
            tls.sendall(wire.encode(wire.FetchHealth()))
            return tls.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            return True


def test_clients_without_a_certificate_of_the_authority(provider: Provider, connect: Connect, keys: Keys) -> None:
    none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    none.load_verify_locations(keys.provider.certificate)
    for context in (none, keys.context("stranger")):
        assert refused(open_tcp(provider), context)
    assert works(connect())


# Requests


def test_hello_is_checked(connect: Connect, provider: Provider) -> None:
    client = connect(role=None)
    wrong = wire.Hello(version=99, role="executor", model_digest=provider.model_digest)
    assert failure(client.ask(wrong)) == wire.ErrorCode.BAD_REQUEST
    assert failure(client.hello("sha256:other")) == wire.ErrorCode.WRONG_MODEL
    welcome = client.hello(provider.model_digest)
    assert isinstance(welcome, wire.Welcome)
    assert welcome.max_payload == provider.config.limits.max_payload_mib * MIB
    assert failure(client.hello(provider.model_digest)) == wire.ErrorCode.BAD_REQUEST


def test_a_part_of_the_layers(configure: Configure, connect: Connect, provider: Provider) -> None:
    """A provider of layer 1 alone states the whole model's digest, and returns the same bits as a provider of all
    layers."""
    with Provider(configure(layers="1")) as one:
        assert one.model_digest == provider.model_digest
        client, everything = connect(to=one), connect("bob")
        reply = connect("dave", role=None, to=one).hello(one.model_digest)
        assert isinstance(reply, wire.Welcome)
        assert reply.groups == range(4, 9)  # the LM head belongs to the last layer
        for group in range(9):
            request, rows = execute(group, 3), None
            columns = {True: WIDTH, False: 112}[group % 4 != 3]
            rows = torch.arange(3 * columns, dtype=torch.int32).reshape(3, columns)
            if group in reply.groups:
                assert torch.equal(client.product(request, rows), everything.product(execute(group, 3), rows))
            else:
                assert failure(client.ask(request, wire.RING32.pack(rows))) == wire.ErrorCode.NOT_SERVED
        helper = connect("carol", role="helper", to=one)
        assert failure(helper.ask(effect(3, 2, seed=bytes(32)))) == wire.ErrorCode.NOT_SERVED
        assert len(helper.product(effect(4, 2, seed=bytes(32)))) == 2
        assert failure(client.ask(execute(9, 0))) == wire.ErrorCode.BAD_REQUEST
        report = client.ask(wire.FetchHealth())
        assert isinstance(report, wire.HealthReport)
        assert report.groups == 5
        assert abs(report.time - time.time()) < 60
        status = one.status().executor
        assert status is not None
        assert (status.first_group, len(status.rows_by_group)) == (4, 5)
        assert status.rows_by_group == [5, 3, 3, 3, 3]


def test_the_health_of_an_executor_that_is_late_is_not_reported(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard asks every second; reports for tenants take no time of the executor."""
    client = connect(role=None)
    assert isinstance(client.ask(wire.FetchHealth()), wire.HealthReport)
    monkeypatch.setattr("provider.executor.client._RECENT_S", -1.0)
    assert failure(client.ask(wire.FetchHealth())) == wire.ErrorCode.BUSY


def test_a_health_report_counts_only_the_tenant_that_asks(configure: Configure, connect: Connect) -> None:
    with Provider(configure()) as provider:
        alice, bob = connect("alice", to=provider), connect("bob", to=provider)
        neighbour = connect("alice", to=provider)

        def counted(client: Client) -> tuple[int, int]:
            report = client.ask(wire.FetchHealth())
            assert isinstance(report, wire.HealthReport)
            return report.requests, report.connections

        assert works(alice)
        assert works(neighbour)
        assert counted(alice) == (2, 2)
        assert counted(bob) == (0, 1)
        assert works(bob)
        assert counted(alice) == (2, 2)
        assert counted(bob) == (1, 1)


def test_tenants_with_one_name_from_two_authorities_are_separate(
    configure: Configure, connect: Connect, keys: Keys, tmp_path: Path
) -> None:
    both = tmp_path / "tenants.pem"
    both.write_bytes(keys.authority.certificate.read_bytes() + keys.other_authority.certificate.read_bytes())
    with Provider(configure(max_connections_per_tenant=1, tenant_authority=both)) as provider:
        alice = connect("alice", to=provider)
        assert works(alice)
        namesake = connect("namesake", role=None, to=provider)  # not alice's only connection
        report = namesake.ask(wire.FetchHealth())
        assert isinstance(report, wire.HealthReport)
        assert (report.requests, report.connections) == (0, 1)
        assert isinstance(namesake.hello(provider.model_digest, "helper"), wire.Welcome)  # nor alice's role


def test_refused_requests_leave_the_connection_usable(connect: Connect, provider: Provider) -> None:
    code = wire.ErrorCode
    client = connect()
    seed = Seed(secrets.token_bytes(32))
    too_many = MAX_REQUEST_ROWS + 1
    for request, payload, expected in [
        (execute(9, 1), b"\0" * 4 * WIDTH, code.BAD_REQUEST),  # no such group
        (execute(0, 1), b"\0" * 4 * (WIDTH + 1), code.BAD_REQUEST),
        (execute(0, 2), b"\0" * 4 * WIDTH, code.BAD_REQUEST),
        (execute(0, 1), b"", code.BAD_REQUEST),
        (execute(0, 0), b"\0" * 4, code.BAD_REQUEST),
        (execute(0, 1, direction="backward"), b"\0" * 4 * WIDTH, code.BAD_REQUEST),  # backward rows are wider
        (execute(0, too_many), b"\0" * 4 * WIDTH * too_many, code.TOO_LARGE),
        (effect(0, 1, seed=seed), b"", code.ROLE_REFUSED),
        (wire.FetchHealth(), b"\0", code.BAD_REQUEST),
    ]:
        assert failure(client.ask(request, payload)) == expected, request
        assert works(client)
    helper = connect(role="helper")
    assert failure(helper.ask(execute(0, 1), b"\0" * 4 * WIDTH)) == code.ROLE_REFUSED
    assert failure(helper.ask(effect(0, 1, seed=seed), b"\0" * 4)) == code.BAD_REQUEST
    float_effect = wire.Effect(
        nonce=bytes(16), group=0, direction="forward", arithmetic="float", rows=1, seed=seed, first_row=0
    )
    assert failure(helper.ask(float_effect)) == code.BAD_REQUEST
    assert failure(connect(role=None).ask(execute(0, 0))) == code.BAD_REQUEST  # no hello


def test_seeds_are_taken_under_a_key_of_ml_kem_only(connect: Connect, provider: Provider) -> None:
    """A helper refuses older tenants, bare seeds, a second exchange, and an exchange in the other role."""
    bad = wire.ErrorCode.BAD_REQUEST
    for version in (wire.VERSION, wire.NARROW_VERSION):
        client = connect("carol", role=None)
        older = wire.Hello(version=version, role="helper", model_digest=provider.model_digest)
        reply = client.ask(older)
        assert failure(reply) == bad
        assert isinstance(reply, wire.Failure)
        assert "ML-KEM-768" in reply.detail
        assert "upgrade the tenant" in reply.detail
    offer = KeyOffer().message
    assert failure(client.ask(offer)) == bad  # before the hello
    hello = wire.Hello(version=wire.HYBRID_VERSION, role="helper", model_digest=provider.model_digest)
    assert isinstance(client.ask(hello), wire.Welcome)
    assert failure(client.ask(effect(0, 1, seed=bytes(32)))) == bad  # before the keys
    assert failure(client.ask(wire.KeyShare(share=bytes(1216)))) == bad  # no keys
    assert isinstance(client.ask(offer), wire.KeyAnswer)
    for seed in (bytes(32), bytes(48)):  # bare, and under another key
        assert failure(client.ask(effect(0, 1, seed=seed))) == bad
    assert failure(client.ask(offer)) == bad
    assert failure(connect().ask(offer)) == bad


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_requests_of_too_many_rows_are_refused(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch, role: wire.Role
) -> None:
    """The limit of rows on its own: the matrices are far smaller than the largest payload."""
    monkeypatch.setattr("provider.gateway.admission.MAX_REQUEST_ROWS", 4)
    with Provider(configure()) as provider:
        client = connect(role=role, to=provider)
        for rows in (4, 5):
            request = execute(0, rows) if role == "executor" else effect(0, rows, seed=bytes(32))
            reply = client.ask(request, bytes(4 * WIDTH * rows if role == "executor" else 0))
            assert isinstance(reply, wire.Result) if rows == 4 else failure(reply) == wire.ErrorCode.TOO_LARGE


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_bytes_are_held_from_the_header_on(configure: Configure, connect: Connect, hold: Hold, role: wire.Role) -> None:
    """A tenant that announces rows and sends none of them holds their bytes, and those of their products. So does a
    tenant that orders an effect with a hundred bytes."""
    rows = 1000
    _, go_on = hold()
    with Provider(configure()) as provider:
        client = connect(role=role, to=provider)
        if role == "executor":
            client.send(execute(0, rows), announced=4 * WIDTH * rows)
        else:
            client.send(effect(0, rows, seed=bytes(32)))
        until(lambda: provider.status().bytes_held >= 2 * 4 * WIDTH * rows, within_s=30)
        client.close()
        go_on.set()
        until(lambda: not provider.status().bytes_held, within_s=30)


def test_broken_frames_end_the_connection(connect: Connect, provider: Provider) -> None:
    limit = provider.config.limits.max_payload_mib * MIB
    too_large = MalformedFrame("", wire.PREFIX.pack(wire.MAGIC, 10, limit + 1), wire.ErrorCode.TOO_LARGE)
    for frame in (too_large, *malformed_frames()):
        client = connect()
        client.send_bytes(frame.data)
        assert failure(client.receive()[0]) == frame.code, frame.name
        assert client.at_end()
        client.close()


# Roles (rule 8)


def test_a_tenant_has_one_role_at_a_time(configure: Configure, connect: Connect) -> None:
    with Provider(configure()) as provider:
        first, second = connect("alice", to=provider), connect("alice", to=provider)
        other = connect("alice", role=None, to=provider)
        assert failure(other.hello(provider.model_digest, "helper")) == wire.ErrorCode.ROLE_REFUSED
        connect("bob", role="helper", to=provider)
        first.close()
        assert failure(other.hello(provider.model_digest, "helper")) == wire.ErrorCode.ROLE_REFUSED
        second.close()
        # the end of another connection is noticed after a moment
        until(lambda: isinstance(other.hello(provider.model_digest, "helper"), wire.Welcome))
        late = connect("alice", role=None, to=provider)
        assert failure(late.hello(provider.model_digest, "executor")) == wire.ErrorCode.ROLE_REFUSED


def test_a_provider_serves_only_its_roles(configure: Configure, connect: Connect) -> None:
    with Provider(configure(roles=("helper",))) as provider:
        client = connect(role=None, to=provider)
        assert failure(client.hello(provider.model_digest, "executor")) == wire.ErrorCode.ROLE_REFUSED


# Slow, silent and many clients


def test_silent_and_slow_clients_are_dropped(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.gateway.gateway.HANDSHAKE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("provider.gateway.connection.IDLE_TIMEOUT_S", 0.3)
    with Provider(configure(frame_timeout_s=0.3)) as provider:
        silent = open_tcp(provider)
        idle = connect(to=provider)
        trickle = connect(to=provider)
        frame = wire.encode(wire.FetchHealth())
        ended = False
        for byte in frame * 100:  # each byte in time, but the frame never completes
            try:
                trickle.send_bytes(bytes([byte]))
                ended = trickle.at_end(within=0.05)
            except TimeoutError:
                assert works(connect("bob", to=provider))  # meanwhile
                continue
            except SymbiosisError:
                ended = True
            if ended:
                break
        assert ended
        assert silent.recv(1) == b""
        silent.close()
        assert idle.at_end()


def test_a_client_that_does_not_read_is_dropped(
    configure: Configure, keys: Keys, connect: Connect, tmp_path: Path
) -> None:
    """Its bill has its rows once."""
    bills = tmp_path / "usage.sqlite"
    with Provider(configure(frame_timeout_s=0.5, usage=UsageConfig(database=bills))) as provider:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect(parse_address(provider.address))
        with keys.context("bob").wrap_socket(raw, server_hostname="127.0.0.1") as deaf:
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=provider.model_digest)
            deaf.sendall(wire.encode(hello))
            rows = MAX_REQUEST_ROWS
            deaf.sendall(wire.encode(execute(0, rows), payload_bytes=rows * WIDTH * 4) + bytes(rows * WIDTH * 4))
            client = connect("bob", role=None, to=provider)

            def alone() -> bool:
                """The client has been dropped, and only this connection of its tenant is left."""
                report = client.ask(wire.FetchHealth())
                assert isinstance(report, wire.HealthReport)
                return report.connections == report.requests == 1

            until(alone)
    row = next(row for row in read(bills) if row["role"] == "executor")
    assert (row["requests"], row["bytes_received"], row["slow"]) == (1, rows * WIDTH * 4, 1)


def tenants(*names: str) -> list[TenantIdentity]:
    return [TenantIdentity(name, authority="sha256:a") for name in names]


# 12 bytes for large requests
LARGE = Limits(max_payload_mib=3, max_inflight_mib=16, max_connections=4)


def test_bytes_are_taken_before_memory_is() -> None:
    budget = ByteBudget(LARGE)
    alice, bob = tenants("alice", "bob")
    with pytest.raises(Refusal, match="at most"), budget.taken(alice, 9 * MIB, timeout=0):
        pass
    with budget.taken(alice, 8 * MIB, timeout=0):
        with pytest.raises(Refusal, match="in flight"), budget.taken(alice, 2 * MIB, timeout=0):
            pass
        with budget.taken(bob, 4 * MIB, timeout=0), pytest.raises(Refusal), budget.taken(bob, 2 * MIB, timeout=0):
            pass
        assert budget.used == 8 * MIB
    assert budget.used == 0


def test_tenants_take_turns_for_bytes() -> None:
    """The tenant that got bytes least recently is next, and smaller requests do not overtake it."""
    budget = ByteBudget(LARGE)
    alice, bob, carol = tenants("alice", "bob", "carol")
    order: list[str] = []
    lock = threading.Lock()

    def claim(tenant: TenantIdentity, size: int) -> None:
        with budget.taken(tenant, size, timeout=20), lock:
            order.append(tenant.name)

    with budget.taken(carol, 2 * MIB, timeout=0):
        pass
    with budget.taken(alice, 8 * MIB, timeout=0), budget.taken(bob, 4 * MIB, timeout=0):
        waiters = []
        for number, (tenant, size) in enumerate([(bob, 7 * MIB), (alice, 7 * MIB), (carol, 7 * MIB)], start=1):
            waiters.append(threading.Thread(target=claim, args=(tenant, size)))
            waiters[-1].start()
            while budget.waiting < number:
                time.sleep(0.001)
        assert order == []
    for waiter in waiters:
        waiter.join(20)
    assert order == ["carol", "alice", "bob"]


def test_a_tenant_leaves_room_for_another() -> None:
    budget = ByteBudget(LARGE)
    alice, bob = tenants("alice", "bob")
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # half of the 12, so that one more tenant finds room
            stack.enter_context(budget.taken(alice, 2 * MIB, timeout=0))
        with pytest.raises(Refusal), budget.taken(alice, 2 * MIB, timeout=0):
            pass
        with budget.taken(bob, 6 * MIB, timeout=0):
            pass


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_no_copy_of_an_answer_and_no_rows_are_kept_while_it_is_sent(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, role: wire.Role
) -> None:
    made, send = list[weakref.ref[object]](), Frames.send
    owner, name = (Connection, "_read_payload") if role == "executor" else (ExecutorRequester, "receive")
    usual = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        found = usual(*arguments, **options)
        made.append(weakref.ref((found if role == "executor" else found.payload).obj))
        return found

    def sending(self: Frames, *parts: Any) -> None:
        until(lambda: all(memory() is None for memory in made), within_s=5.0)
        send(self, *parts)

    client = connect(role=role)
    monkeypatch.setattr(owner, name, watched)
    monkeypatch.setattr(Frames, "send", sending)
    rows = torch.ones(20, WIDTH, dtype=torch.int32) if role == "executor" else None
    client.product(execute(0, 20) if role == "executor" else effect(0, 20, seed=secrets.token_bytes(32)), rows)
    assert made


# Stopping


def test_stop_answers_requests_in_flight(configure: Configure, connect: Connect, hold: Hold) -> None:
    begun, go_on = hold()
    provider = Provider(configure()).start()
    idle, busy = connect("bob", to=provider), connect(to=provider)
    busy.send(execute(0, 1), bytes(4 * WIDTH))
    assert begun.wait(20)
    busy.send(execute(0, 1), bytes(4 * WIDTH))  # one more request, too late
    address = parse_address(provider.address)
    stopper = threading.Thread(target=provider.stop)
    stopper.start()
    assert idle.at_end()
    with pytest.raises(ConnectionRefusedError):  # after a moment
        until(lambda: socket.create_connection(address, timeout=5).close())
    go_on.set()
    assert isinstance(busy.receive()[0], wire.Result)
    assert busy.at_end()
    stopper.join(20)
    assert not stopper.is_alive()
    provider.stop()  # stopping twice does nothing
