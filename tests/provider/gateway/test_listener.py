"""Handshakes are made in turn, and no network can lock out another one."""

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, strategies as st

from provider.gateway.listener import Turns, UnauthenticatedConnection, network_of, to_drop
from provider.serve import Provider
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.cases import cases
from tests.provider.conftest import Configure, Connect, Keys
from tests.waiting import beside, until


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


def test_many_handshakes_delay_no_other_network(
    configure: Configure, connect: Connect, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.gateway.gateway.HANDSHAKE_TIMEOUT_S", 20.0)
    with Provider(configure()) as provider:
        with crowd(provider.address, keys, source="127.0.0.9", threads=16):
            until(lambda: any(count > 10 for count in provider.status().visits.values()))
            for source in ("127.0.0.1", "127.0.0.9"):  # another one, and that of the crowd
                client = connect(to=provider, source=source)
                assert isinstance(client.ask(wire.FetchHealth()), wire.HealthReport)
        assert provider.status().handshakes.late == 0


def test_a_slow_handshake_has_one_deadline_and_no_thread(
    configure: Configure, connect: Connect, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of a handshake comes in time, but its end never comes."""
    hello, nothing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        keys.context("alice").wrap_bio(nothing, hello, server_hostname="127.0.0.1").do_handshake()
    said = hello.read()
    monkeypatch.setattr("provider.gateway.gateway.HANDSHAKE_TIMEOUT_S", 1.0)
    with Provider(configure()) as provider, contextlib.ExitStack() as stack:
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


def test_an_error_in_the_listeners_thread_does_not_end_it(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would live and accept nobody, and nobody would start it again."""
    take, errors = Turns.next, [MemoryError()]

    def failing(self: Turns, ready: Iterable[UnauthenticatedConnection]) -> list[UnauthenticatedConnection]:
        if errors:
            raise errors.pop()
        return take(self, ready)

    with Provider(configure()) as provider:
        monkeypatch.setattr(Turns, "next", failing)
        assert isinstance(connect(to=provider).ask(wire.FetchHealth()), wire.HealthReport)
        assert not errors


# Whose turn it is


def new_client(host: str, *, known: bool = False) -> UnauthenticatedConnection:
    return UnauthenticatedConnection(None, host, deadline=10.0, known=known)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=80))
def test_networks_take_turns(coming: list[tuple[int, bool]]) -> None:
    """A client waits for the earlier ones of its network and for as many of each other network; one of a network from
    which a client has authenticated waits for sixteen steps of all others together."""
    turns = Turns()
    waiting = [new_client(f"10.0.{known:d}.{number}", known=known) for number, known in coming]
    for client in waiting:
        turns.arrived(client.network)
    taken: list[UnauthenticatedConnection] = []
    left = list(waiting)
    while left:
        chosen = turns.next(left)
        assert 0 < len(chosen) <= 16
        known = {client.network for client in left if client.known}
        assert sum(client.known for client in chosen) >= min(len(known), 8)
        left = [client for client in left if client not in chosen]
        taken += chosen
    for place, client in enumerate(taken):
        same = [other for other in waiting if other.network == client.network]
        before = Counter(other.network for other in taken[:place] if other.known is client.known)
        assert before[client.network] == same.index(client)
        assert all(count <= before[client.network] + 1 for count in before.values())


def test_new_networks_do_not_keep_an_earlier_one_waiting() -> None:
    """Who has an IPv6 /48 can come from another network every time."""
    turns, honest, waiting = Turns(), new_client("192.0.2.1"), list[UnauthenticatedConnection]()
    turns.arrived(honest.network)
    came, rounds = 0, 0
    for _ in range(3):  # steps of a handshake
        chosen: list[UnauthenticatedConnection] = []
        while honest not in chosen:
            rounds += 1
            chosen = turns.next([*waiting, honest])
            waiting = [client for client in waiting if client not in chosen]
            for _ in range(30):
                came += 1
                waiting.append(new_client(f"2001:db8:0:{came:x}::1"))
                turns.arrived(waiting[-1].network)
    assert rounds < 10


# Which connection is dropped when there are too many


@cases(__file__, "networks")
def test_networks(host: str, network: str) -> None:
    assert network_of(host) == network


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=40))
def test_the_busiest_network_loses_its_silent_ones_first(coming: list[tuple[str, bool]]) -> None:
    present = [new_client(f"10.0.0.{ord(letter)}") for letter, _ in coming]
    for client, (_, speaks) in zip(present, coming, strict=True):
        client.silent = not speaks
    gone, crowd = to_drop(present), Counter(client.network for client in present)
    assert crowd[gone.network] == max(crowd.values())
    same = [client for client in present if crowd[client.network] == crowd[gone.network]]
    assert gone is next((client for client in same if client.silent), same[0])


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_network_that_has_authenticated_loses_no_place_to_many_others(known: int, others: int) -> None:
    tenants = [new_client("10.0.0.1", known=True) for _ in range(known)]
    strangers = [new_client(f"10.1.0.{number}") for number in range(others)]
    gone = to_drop([*tenants, *strangers])
    assert gone in (strangers if others >= known else tenants)
