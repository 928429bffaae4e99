"""Which unauthenticated connection is dropped when there are too many, and how much is logged about it."""

import logging
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider import logs
from provider.gateway.unauthenticated import UnauthenticatedConnection, UnauthenticatedConnections, network_of


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
            connections.mark_active(new)
    assert len(connections) <= limit
    for left in connections.all():
        left.socket.close()


def test_silent_and_active_connections_have_the_same_deadline() -> None:
    connections = UnauthenticatedConnections(10)
    speaking, early, late = new_client("10.0.0.3", 0.5), new_client("10.0.0.1", 1.0), new_client("10.0.0.2", 2.0)
    for one in (speaking, early, late):
        connections.add(one)
    connections.mark_active(speaking)
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
        assert connections.next_deadline is None
        connections.resume(one, now)
    assert connections.next_deadline == pytest.approx(now + left)
    assert connections.late(now + left + 1e-3) == [one]
    assert connections.late(now + left + 1e-3) == []
    connections.remove(one)
    one.socket.close()


def test_events_that_clients_cause_are_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("provider.logs.time.monotonic", lambda: now)
    log = logs.EventLog("provider.test")
    with caplog.at_level(logging.INFO, logger="provider.test"):
        for _ in range(1000):
            log.often("knock")
        log.often("other")
        now = 1.5
        log.often("knock")
    events = [record.getMessage() for record in caplog.records]
    assert events.count("knock") == 6
    assert events.count("other") == 1
    assert getattr(caplog.records[-1], logs._FIELDS)["suppressed"] == 995
