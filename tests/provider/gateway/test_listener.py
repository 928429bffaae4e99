"""Handshakes take their share of one core at most, and no network can lock out another one."""

import contextlib
import logging
import math
import signal
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from provider import logs
from provider.config.schema import MetricsConfig
from provider.gateway.listener import Listener, UnauthenticatedConnection, UnauthenticatedConnections, network_of
from provider.operations import top
from provider.serve import Provider
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.provider.clients import execute
from tests.provider.conftest import Configure, Connect, Keys, Launch
from tests.waiting import beside, until

SHARE = 0.02  # share for about twenty handshakes a second
# A step of a handshake starts while there is time left, and may exceed it by its own time: 5 ms, and some tens of
# milliseconds on a loaded machine. With a share of 1, the crowds below take half a second and more.
STEP_S = 0.1


@contextlib.contextmanager
def crowd(address: str, keys: Keys, *, source: str, threads: int) -> Iterator[None]:
    """Tenants that connect and disconnect repeatedly."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # the provider may close before the handshake has ended
                raw = socket.create_connection(parse_address(address), timeout=20, source_address=(source, 0))
                with raw, keys.context("bob").wrap_socket(raw, server_hostname="127.0.0.1"):
                    pass

    with beside(*[come_and_go] * threads, over=over):
        yield


def test_many_handshakes_take_their_share_and_delay_no_other_network(
    configure: Configure, connect: Connect, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(handshake_share=SHARE, handshake_timeout_s=1.5)
    with caplog.at_level(logging.INFO, logger="provider"), Provider(config) as provider:
        begun = time.monotonic()
        with crowd(provider.address, keys, source="127.0.0.9", threads=16):
            while provider.status().handshakes.waiting < 10:
                assert time.monotonic() - begun < 20
                time.sleep(0.01)
            came = time.monotonic()
            # a client with another address waits for one step of the crowd's handshakes, twice
            client = connect(to=provider)
            assert time.monotonic() - came < 10.0
            assert isinstance(client.ask(wire.FetchHealth()), wire.HealthReport)
            neighbour = connect(to=provider, source="127.0.0.9")  # it waited in the queue for longer than its timeout
            assert isinstance(neighbour.ask(wire.FetchHealth()), wire.HealthReport)
            assert provider.status().handshakes.late == 0
        elapsed, status = time.monotonic() - begun, provider.status()
        assert status.handshakes.seconds <= SHARE * (elapsed + 1) + STEP_S
        assert status.handshakes.seconds < 0.03 * status.handshakes.accepted  # the share is not used up by waking up
        assert status.handshakes.waited_s > 0
        assert next(count for name, count in status.visits.items() if name.startswith("bob@")) > 10
        named = [getattr(r, logs._FIELDS) for r in caplog.records if r.getMessage() == "handshakes_wait"]
        assert "127.0.0.9" in {fields["address"] for fields in named}


def test_handshakes_have_a_smaller_share_while_products_are_answered(
    configure: Configure, connect: Connect, keys: Keys
) -> None:
    row = torch.ones(1, 64, dtype=torch.int32)
    with Provider(configure(handshake_share=1.0, handshake_share_serving=SHARE)) as provider:
        client = connect(to=provider)
        client.product(execute(0, 1), row)

        def larger_share() -> bool:
            """More processor time than the smaller share allows since products are no longer answered."""
            seconds = provider.status().handshakes.seconds - serving.seconds
            return seconds > SHARE * (time.monotonic() - resting + 1) + STEP_S

        with crowd(provider.address, keys, source="127.0.0.9", threads=8):
            begun, before = time.monotonic(), provider.status().handshakes
            while time.monotonic() < begun + 1.5 or not provider.status().handshakes.waiting:
                assert time.monotonic() < begun + 20
                client.product(execute(0, 1), row)
            elapsed, serving = time.monotonic() - begun, provider.status().handshakes
            assert serving.seconds - before.seconds <= SHARE * (elapsed + 1) + STEP_S
            resting = time.monotonic()
            until(larger_share, within_s=60)


def test_a_new_share_applies_while_the_provider_runs(configure: Configure, launch: Launch, keys: Keys) -> None:
    config = configure(handshake_share=0.01)
    service = launch(msgspec.structs.replace(config, metrics=MetricsConfig(listen="127.0.0.1:0")))

    def accepted() -> int:
        return top.ask(service.ready["metrics"]).handshakes.accepted

    with crowd(service.address, keys, source="127.0.0.9", threads=8):
        text = service.config_file.read_text()
        text = text.replace("handshake_share_serving = 0.05", "handshake_share_serving = 0.2")
        service.config_file.write_text(text.replace("handshake_share = 0.01", "handshake_share = 1.0"))
        service.process.send_signal(signal.SIGHUP)
        before = accepted()
        until(lambda: accepted() >= before + 200, within_s=20)  # the previous share would take twenty seconds
    (reloaded,) = (line for line in service.logged() if line["event"] == "reloaded")
    assert reloaded["needs_restart"] is None


def test_a_slow_handshake_has_one_deadline_and_no_thread(configure: Configure, connect: Connect, keys: Keys) -> None:
    """Each byte of a handshake comes in time, but its end never comes."""
    hello, nothing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        keys.context("alice").wrap_bio(nothing, hello, server_hostname="127.0.0.1").do_handshake()
    said = hello.read()
    with Provider(configure(handshake_timeout_s=1.0)) as provider, contextlib.ExitStack() as stack:
        threads, address = threading.active_count(), parse_address(provider.address)
        slow = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(20)]
        begun = time.monotonic()
        for byte in said:
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(bytes([byte]))
            assert threading.active_count() == threads
            if provider.status().handshakes.late == len(slow):
                break
            time.sleep(0.05)
        assert 1.0 <= time.monotonic() - begun < 10.0
        assert provider.status().handshakes.present == 0
        assert isinstance(connect(to=provider).ask(wire.FetchHealth()), wire.HealthReport)


def test_a_listener_whose_thread_has_ended_can_be_stopped() -> None:
    """The listener's thread may end before it is woken."""
    listener = Listener("127.0.0.1:0", limit=8, greeting_s=1.0, greet=lambda _: None, serve=lambda *_: None)
    listener.start()
    assert listener.stop(10.0)
    assert listener.stop(10.0)


def test_many_networks_do_not_delay_one_that_has_authenticated(
    configure: Configure, connect: Connect, keys: Keys
) -> None:
    """A stranger with many addresses replays one ClientHello from each. Every step of their handshakes takes as long as
    one of a tenant's."""
    hello, nothing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        keys.context("alice").wrap_bio(nothing, hello, server_hostname="127.0.0.1").do_handshake()
    said, strangers = hello.read(), 400
    config = configure(handshake_share=SHARE, handshake_timeout_s=60.0)
    with Provider(config) as provider, contextlib.ExitStack() as crowd:
        connect(to=provider).close()
        for number in range(strangers):
            source = (f"127.1.{number // 200}.{1 + number % 200}", 0)
            stranger = socket.create_connection(parse_address(provider.address), timeout=20, source_address=source)
            crowd.enter_context(stranger).sendall(said)
        until(lambda: provider.status().handshakes.present == strangers)
        waiting = provider.status().handshakes.waiting
        assert waiting > 40
        client = connect(to=provider)
        assert isinstance(client.ask(wire.FetchHealth()), wire.HealthReport)
        assert provider.status().handshakes.waiting > waiting // 2  # it has not waited for most of them


def test_accepting_is_a_part_of_the_share(configure: Configure) -> None:
    """Connections that say nothing cost processor time, too."""
    with Provider(configure(handshake_share=SHARE, max_handshakes=64)) as provider:
        assert provider._gateway is not None
        thread = provider._gateway.listener._thread.ident
        assert thread is not None
        clock, address = time.pthread_getcpuclockid(thread), parse_address(provider.address)
        used, begun = time.clock_gettime(clock), time.monotonic()
        for _ in range(8000):
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                silent.setblocking(False)
                silent.connect_ex(address)
        elapsed, used = time.monotonic() - begun, time.clock_gettime(clock) - used
        assert used <= SHARE * (elapsed + 1) + STEP_S


# Which connection is dropped when there are too many


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_networks(host: str, network: str) -> None:
    assert network_of(host) == network


def new_client(host: str, deadline: float = 10.0) -> UnauthenticatedConnection:
    return UnauthenticatedConnection(socket.socket(), host, deadline=deadline)


def test_all_addresses_of_an_ipv6_64_are_one_network() -> None:
    connections = UnauthenticatedConnections(4)
    tenant = new_client("2001:db8:ffff::1")
    assert connections.add(tenant) is None
    for number in range(100):
        gone = connections.add(new_client(f"2001:db8::{number:x}"))
        if gone is not None:
            assert gone is not tenant
            connections.remove(gone)
            gone.socket.close()
    for left in connections.all():
        left.socket.close()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=40), st.integers(1, 6))
def test_the_busiest_network_loses_its_silent_ones_first(coming: list[tuple[str, bool]], limit: int) -> None:
    connections = UnauthenticatedConnections(limit)
    for letter, speaks in coming:
        new = new_client(f"10.0.0.{ord(letter)}")
        gone = connections.add(new)
        crowd = Counter(s.network for s in connections.all())
        if gone is None:
            assert len(connections) <= limit
        else:
            assert crowd[gone.network] == max(crowd.values())
            same = [s for s in connections.all() if s.network == gone.network]
            assert gone.silent or not any(s.silent for s in same)
            connections.remove(gone)
            gone.socket.close()
        if speaks and gone is not new:
            new.silent = False
    assert len(connections) <= limit
    for left in connections.all():
        left.socket.close()


def test_silent_and_active_connections_have_the_same_deadline() -> None:
    connections = UnauthenticatedConnections(10)
    speaking, early, late = new_client("10.0.0.3", 0.5), new_client("10.0.0.1", 1.0), new_client("10.0.0.2", 2.0)
    for one in (speaking, early, late):
        connections.add(one)
    speaking.silent = False
    assert connections.next_deadline == 0.5
    assert connections.late(1.5) == [speaking, early]
    for one in (speaking, early, early):  # removing twice does nothing
        connections.remove(one)
    assert connections.next_deadline == 2.0
    for one in (early, late, speaking):
        one.socket.close()


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), max_size=20))
def test_the_time_waiting_for_a_turn_does_not_count(steps: list[tuple[float, float]]) -> None:
    """A client's own time has a limit, in however many steps; the time in the queue does not count."""
    connections, now, left = UnauthenticatedConnections(10), 0.0, 3.0
    one = new_client("10.0.0.1", left)
    connections.add(one)
    for own, waited in steps:
        now, left = now + own, left - own
        if left <= 1e-6:
            break
        assert not connections.late(now)
        connections.pause(one, now)
        now += waited
        assert connections.late(now) == []
        assert connections.next_deadline == math.inf
        connections.resume(one, now)
    assert connections.next_deadline == pytest.approx(now + left)
    assert connections.late(now + left + 1e-3) == [one]
    assert connections.late(now + left + 1e-3) == []
    connections.remove(one)
    one.socket.close()


def test_a_network_that_has_authenticated_loses_no_place_to_many_others() -> None:
    connections = UnauthenticatedConnections(8)
    known = [UnauthenticatedConnection(socket.socket(), "10.0.0.1", deadline=1.0, known=True) for _ in range(3)]
    for one in known:
        assert connections.add(one) is None
    for number in range(20):
        if (gone := connections.add(new_client(f"10.1.0.{number}"))) is not None:
            assert not gone.known
            connections.remove(gone)
            gone.socket.close()
    for left in connections.all():
        left.socket.close()
