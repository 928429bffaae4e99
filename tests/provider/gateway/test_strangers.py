"""Who loses a place when there are too many who have not authenticated, and how little is said about it."""

from __future__ import annotations

import logging
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider import logs
from provider.gateway.strangers import Stranger, Strangers, network_of


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


def stranger(host: str, deadline: float = 10.0) -> Stranger:
    return Stranger(socket.socket(), host, deadline=deadline)


def test_a_crowd_with_addresses_without_number_is_one_network() -> None:
    strangers = Strangers(4)
    tenant = stranger("2001:db8:ffff::1")
    assert strangers.come(tenant) is None
    for number in range(100):
        gone = strangers.come(stranger(f"2001:db8::{number:x}"))
        if gone is not None:
            assert gone is not tenant
            strangers.leave(gone)
            gone.socket.close()
    for left in strangers.all():
        left.socket.close()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=40), st.integers(1, 6))
def test_the_busiest_network_loses_its_silent_ones_first(coming: list[tuple[str, bool]], limit: int) -> None:
    strangers = Strangers(limit)
    for letter, speaks in coming:
        new = stranger(f"10.0.0.{ord(letter)}")
        gone = strangers.come(new)
        crowd = Counter(s.network for s in strangers.all())
        if gone is None:
            assert len(strangers) <= limit
        else:
            assert crowd[gone.network] == max(crowd.values())
            same = [s for s in strangers.all() if s.network == gone.network]
            assert gone.silent or not any(s.silent for s in same)
            strangers.leave(gone)
            gone.socket.close()
        if speaks and gone is not new:
            strangers.speak(new, new.socket)
    assert len(strangers) <= limit
    for left in strangers.all():
        left.socket.close()


def test_whoever_takes_too_long_is_late_silent_or_not() -> None:
    strangers = Strangers(10)
    speaking, early, late = stranger("10.0.0.3", 0.5), stranger("10.0.0.1", 1.0), stranger("10.0.0.2", 2.0)
    for one in (speaking, early, late):
        strangers.come(one)
    strangers.speak(speaking, speaking.socket)
    assert strangers.next_deadline == 0.5
    assert strangers.late(1.5) == [speaking, early]
    for one in (speaking, early, early):  # once more does nothing
        strangers.leave(one)
    assert strangers.next_deadline == 2.0
    for one in (early, late, speaking):
        one.socket.close()


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), max_size=20))
def test_time_that_was_waited_for_a_turn_is_nobodys_delay(steps: list[tuple[float, float]]) -> None:
    """Who takes its time, in however many steps, has no more of it than who takes it at once."""
    strangers, now, left = Strangers(10), 0.0, 3.0
    one = stranger("10.0.0.1", left)
    strangers.come(one)
    for own, waited in steps:
        now, left = now + own, left - own
        if left <= 1e-6:
            break
        assert not strangers.late(now)
        strangers.pause(one, now)
        now += waited
        assert strangers.late(now) == []
        assert strangers.next_deadline is None
        strangers.resume(one, now)
    assert strangers.next_deadline == pytest.approx(now + left)
    assert strangers.late(now + left + 1e-3) == [one]
    assert strangers.late(now + left + 1e-3) == []
    strangers.leave(one)
    one.socket.close()


def test_what_others_cause_fills_no_disk(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
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
