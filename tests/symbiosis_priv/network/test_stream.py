"""`FrameStream`: frames arrive whole, no wait outlasts its deadline, and a server's handshake never waits."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire
from symbiosis_priv.network.stream import FrameStream, within
from tests.symbiosis_priv.network.pairs import LARGE, TIMEOUT_S, Contexts, tcp_pair


@pytest.fixture
def ends(contexts: Contexts) -> Iterator[tuple[FrameStream, FrameStream]]:
    """A client and a server after their handshake. The server's side never waits."""
    with streams(contexts) as found:
        yield found


@contextlib.contextmanager
def streams(contexts: Contexts) -> Iterator[tuple[FrameStream, FrameStream]]:
    ours, theirs = tcp_pair()
    client, server = FrameStream(ours, contexts.client, host="localhost"), FrameStream(theirs, contexts.server)
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        with pytest.raises(TimeoutError):
            server.handshake(0.0)
        shaken = pool.submit(client.handshake, TIMEOUT_S)
        while True:
            try:
                server.handshake(0.0)
                break
            except TimeoutError:
                assert not server.unsent
                select.select([theirs], [], [], TIMEOUT_S)
        shaken.result(TIMEOUT_S)
        yield client, server


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


@settings(max_examples=15)
@given(
    head=st.binary(max_size=100),
    size=st.integers(0, 1 << 20) | st.sampled_from([0, 1, 16_284, 16_384, 65_536]),
    first=st.integers(0, 40_000),
)
def test_a_frame_arrives_whole_in_either_direction(contexts: Contexts, head: bytes, size: int, first: int) -> None:
    sent = head + LARGE[:size]
    with streams(contexts) as ends, ThreadPoolExecutor(1) as pool:
        for sender, receiver in (ends, ends[::-1]):
            sending = pool.submit(sender.send_frame, head, memoryview(LARGE)[:size], deadline=soon())
            kept = bytearray(min(first, len(sent)))
            receiver.receive(memoryview(kept), deadline=soon())
            assert kept == sent[: len(kept)]
            receiver.discard(len(sent) - len(kept), deadline=soon())
            sending.result(TIMEOUT_S)


@settings(max_examples=15)
@given(size=st.integers(0, 20_000), pause=st.integers(0, 40))
def test_heads_and_payloads_are_told_apart(contexts: Contexts, size: int, pause: int) -> None:
    """Wherever the records end, and with the next frame in the same record."""
    hello = wire.Hello(version=wire.VERSION, role="executor", model_digest="x")
    frame = wire.encode(hello, payload_bytes=size) + LARGE[:size]
    with streams(contexts) as (client, server), ThreadPoolExecutor(1) as pool:
        for part in (frame[:pause], frame[pause:] + frame):
            pool.submit(client.send_frame, b"", memoryview(part), deadline=soon()).result(TIMEOUT_S)
        for _ in range(2):
            assert server.begin(deadline=soon())
            header, announced = server.receive_head(max_payload=size, deadline=soon())
            assert (wire.decode_request(header), announced) == (hello, size)
            payload = bytearray(size)
            server.receive(memoryview(payload), deadline=soon())
            assert payload == LARGE[:size]


def test_a_slow_peer_and_a_lost_peer_give_different_errors(ends: tuple[FrameStream, FrameStream]) -> None:
    client, server = ends
    buffer = memoryview(bytearray(10))
    client.send_frame(b"half", memoryview(b""), deadline=soon())
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        server.receive(buffer, deadline=begun + 0.1)
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert not server.peer_left()
    client.close()
    with pytest.raises(ConnectionLostError):
        server.receive(buffer, deadline=soon())
    assert server.peer_left()
    assert not server.begin(deadline=soon())


def test_sending_to_a_reader_that_stops_ends_at_the_deadline(ends: tuple[FrameStream, FrameStream]) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ends[1].send_frame(b"", memoryview(LARGE * 4), deadline=begun + 0.2)
    assert time.monotonic() - begun < TIMEOUT_S / 2


def test_a_socket_that_is_shut_wakes_its_reader(ends: tuple[FrameStream, FrameStream]) -> None:
    server = ends[1]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.begin, deadline=soon())
        server.raw.shutdown(socket.SHUT_RD)
        assert not reading.result(TIMEOUT_S / 2)


def test_a_wait_reports_its_purpose() -> None:
    told: list[str] = []

    def late(timeout: float) -> None:
        time.sleep(0.01)
        raise TimeoutError

    with pytest.raises(TimeoutError, match="an answer"):
        within(time.monotonic() + 0.1, late, "an answer", waiting=lambda deadline, why: told.append(why))
    assert set(told) == {"an answer"}
