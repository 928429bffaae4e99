"""Emulated links: bandwidth and delay; unchanged bytes; nothing left behind."""

import math
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.bench.link import Condition, DelayLine, open_link
from tenant.bench.processes import Child
from tests.waiting import beside

TIMEOUT_S = 60.0
PETALS = (
    Condition(mbit_per_s=1000, round_trip_ms=5),
    Condition(mbit_per_s=100, round_trip_ms=5),
    Condition(mbit_per_s=100, round_trip_ms=100),
)
"""The conditions of PETALS' table; its "< 5 ms" are 5."""


def test_conditions_have_a_readable_form() -> None:
    assert Condition.parse("1gbit/5ms") == PETALS[0]
    assert Condition.parse(" 100mbit/100ms ") == PETALS[2]
    assert Condition.parse("2.5mbit/0ms") == Condition(mbit_per_s=2.5)
    assert [str(c) for c in PETALS] == ["1 Gbit/s, 5 ms", "100 Mbit/s, 5 ms", "100 Mbit/s, 100 ms"]
    assert PETALS[1].bytes_per_s == 12.5e6


@pytest.mark.parametrize("text", ["", "fast", "100mbit", "0mbit/5ms", "100/5", "1.2.3mbit/5ms", "100mbit/5ms/1%"])
def test_other_text_is_not_a_condition(text: str) -> None:
    with pytest.raises(ConfigError, match="100mbit/100ms"):
        Condition.parse(text)


@given(
    rate=st.sampled_from([None, 0.1, 100.0, 1000.0]),
    delay=st.floats(0, 500),
    sent=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 1 << 20)), min_size=1, max_size=30),
)
def test_a_direction_has_its_bandwidth_and_delay(
    rate: float | None, delay: float, sent: list[tuple[float, int]]
) -> None:
    condition = Condition(mbit_per_s=rate, round_trip_ms=delay)
    direction, now, before = DelayLine(condition), 0.0, 0.0
    busy, size, free = 0.0, 0, 0.0  # the start of an uninterrupted transmission, its bytes, its end
    for pause, count in sent:
        now += pause
        if free <= now:
            busy, size = now, 0
        size += count
        arrival = direction.arrival(now, count)
        assert arrival >= before  # in order
        assert math.isclose(arrival, busy + size / condition.bytes_per_s + condition.delay_s, abs_tol=1e-6)
        before, free = arrival, arrival - condition.delay_s


class Echo(socketserver.StreamRequestHandler):
    """Sends received bytes back."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        while data := self.connection.recv(1 << 16):
            self.connection.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends received bytes back."""
    with socketserver.ThreadingTCPServer(("0.0.0.0", 0), Echo) as server, beside(server.serve_forever):
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def serve_client(host: str, port: int) -> Iterator[Callable[[int], list[float]]]:
    """The work of a `Child`: the handler returns the seconds of three exchanges with the echo server, of 1, 1 and
    `size` bytes."""
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:

        def exchange(data: bytes) -> float:
            began = time.perf_counter()
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            back = bytearray()
            while len(back) < len(data):
                back += connection.recv(1 << 20)
            sending.join()
            assert back == data
            return time.perf_counter() - began

        yield lambda size: [exchange(b"x"), exchange(b"x"), exchange(os.urandom(size))]


def test_bytes_arrive_unchanged_and_delayed(echo: int) -> None:
    """Never earlier than the condition allows; the additional delay depends on the machine."""
    size = 1 << 20
    with open_link() as link:
        (port,) = link.ports([echo])
        for condition in (Condition(mbit_per_s=40, round_trip_ms=30), Condition(mbit_per_s=40)):
            link.apply(condition)
            with Child("client", serve_client, link.host, port) as client:
                _, byte, many = client.ask(size, timeout_s=TIMEOUT_S)
            assert 2 * condition.delay_s <= byte < 2 * condition.delay_s + 5
            assert many >= 2 * condition.delay_s + size / condition.bytes_per_s  # both directions at the same time
