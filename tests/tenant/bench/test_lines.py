"""Lines with a bandwidth, a delay and losses: their arithmetic, what passes through them, what they leave behind."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.bench.lines import KINDS, PETALS, Condition, Kind, Line, open_line
from tenant.bench.lines.packets import on_the_wire
from tenant.bench.lines.shaping import Way

TIMEOUT_S = 60.0


def test_conditions_are_written_as_people_say_them() -> None:
    assert Condition.parse("1gbit/5ms") == PETALS[0]
    assert Condition.parse(" 100mbit/100ms ") == PETALS[2]
    assert Condition.parse("2.5mbit/0ms/0.5%") == Condition(mbit_per_s=2.5, loss=0.005)
    assert [str(c) for c in PETALS] == ["1 Gbit/s, 5 ms", "100 Mbit/s, 5 ms", "100 Mbit/s, 100 ms"]
    assert PETALS[1].bytes_per_s == 12.5e6


@pytest.mark.parametrize("text", ["", "fast", "100mbit", "0mbit/5ms", "100/5", "1.2.3mbit/5ms", "100mbit/5ms/100%"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="100mbit/100ms"):
        Condition.parse(text)


@given(
    rate=st.sampled_from([None, 0.1, 100.0, 1000.0]),
    delay=st.floats(0, 500),
    sent=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 1 << 20)), min_size=1, max_size=30),
)
def test_a_way_is_as_fast_as_its_bandwidth_and_as_long_as_its_delay(
    rate: float | None, delay: float, sent: list[tuple[float, int]]
) -> None:
    condition = Condition(mbit_per_s=rate, round_trip_ms=delay)
    way, now, before = Way(condition, seed=0), 0.0, 0.0
    busy, size = 0.0, 0  # since when it has been sending without a pause, and how much
    for pause, count in sent:
        now += pause
        if way.waiting(now) == 0:
            busy, size = now, 0
        size += count
        arrival = way.arrival(now, count)
        assert arrival >= before  # in order
        assert math.isclose(arrival, busy + size / condition.bytes_per_s + condition.delay_s, abs_tol=1e-6)
        assert way.waiting(now) <= size * (1 + 1e-6)
        before = arrival


def test_so_many_get_lost_as_were_asked_for() -> None:
    way = Way(Condition(loss=0.02), seed=0)
    lost = sum(way.lost(3) for _ in range(20_000))
    deviation = math.sqrt(60_000 * 0.02 * 0.98)
    assert abs(lost - 1200) < 5 * deviation  # and the seed is fixed
    assert Way(Condition(), seed=0).lost(1000) == 0


def test_segments_that_are_still_to_be_cut_count_for_their_headers() -> None:
    headers = bytes([0x45, *range(19)]) + bytes(12) + bytes([8 << 4]) + bytes(19)  # IPv4 of 20 bytes, TCP of 32
    vnet = bytes(4) + (1448).to_bytes(2, sys.byteorder) + bytes(4)
    assert on_the_wire(vnet + headers + bytes(10 * 1448 + 1)) == (10 * 1448 + 1 + 11 * 52, 11)
    assert on_the_wire(bytes(10) + headers + bytes(100)) == (152, 1)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it hears."""
    with socket.create_server(("0.0.0.0", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


CLIENT = """
import os, socket, sys, threading, time
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), timeout=60) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    def exchange(data):
        began = time.perf_counter()
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        back = bytearray()
        while len(back) < len(data):
            back += connection.recv(1 << 20)
        sending.join()
        assert back == data
        return time.perf_counter() - began
    print(exchange(b"x"), exchange(b"x"), exchange(os.urandom(size)))
"""


@contextmanager
def opened(kind: Kind) -> Iterator[Line]:
    """Or the test is skipped, where this machine makes no such line."""
    with ExitStack() as held:
        try:
            line = held.enter_context(open_line(kind))
        except ConfigError as error:
            pytest.skip(str(error))
        yield line


@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_is_whole_and_late(kind: Kind, echo: int) -> None:
    """Never sooner than the condition allows; how much later is this machine's business."""
    size = 1 << 20
    with opened(kind) as line:
        (port,) = line.ports([echo])
        for condition in (Condition(mbit_per_s=40, round_trip_ms=30), Condition(mbit_per_s=40, loss=0.01)):
            line.impose(condition)
            command = line.command([sys.executable, "-c", CLIENT, line.host, str(port), str(size)])
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
            _, byte, many = map(float, done.stdout.split())
            assert 2 * condition.delay_s <= byte < 2 * condition.delay_s + 5
            assert many >= 2 * condition.delay_s + size / condition.bytes_per_s  # both ways at once


def test_the_best_line_is_chosen_and_the_choice_explained() -> None:
    with open_line() as line:
        better = KINDS[: KINDS.index(line.kind)]
        assert all(f"{kind}: " in line.why for kind in better)
        assert bool(line.why) == bool(better)


HOLDER = """
import os, signal, sys, time
from tenant.bench.lines import open_line
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
with open_line(sys.argv[1]) as line:
    line.ports([9])
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
@pytest.mark.parametrize("kind", ["packets", "proxy"])
def test_nothing_is_left_behind(kind: Kind, number: signal.Signals) -> None:
    with opened(kind):
        pass
    before = _interfaces()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        children = [Path("/proc") / pid for pid in process.stdout.readline().split()]
        assert len(children) == (2 if kind == "packets" else 1)
        process.send_signal(number)
    deadline = time.monotonic() + TIMEOUT_S
    while any(child.exists() for child in children) or _interfaces() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("sp")}
