"""`FrameStream`: frames arrive whole, no wait outlasts its deadline, and a server's handshake never waits."""

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings, strategies as st

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire
from symbiosis_priv.network.stream import FrameStream
from tests.symbiosis_priv.network.conftest import LARGE, TIMEOUT_S, Contexts, tcp_pair

_SIZE = struct.Struct(">I")


@contextlib.contextmanager
def connected(
    contexts: Contexts,
    serve: Callable[[ssl.SSLSocket], object],
    *,
    client: ssl.SSLContext | None = None,
    pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> Iterator[tuple[FrameStream, Future[object]]]:
    """A stream, and a future with the result of its server."""
    ours, theirs = pair()
    for end in (ours, theirs):
        end.settimeout(TIMEOUT_S)

    def run() -> object:
        with contexts.server.wrap_socket(theirs, server_side=True, suppress_ragged_eofs=False) as connection:
            return serve(connection)

    with ThreadPoolExecutor(1) as pool, ours:
        yield FrameStream(ours, client or contexts.client, host="localhost"), pool.submit(run)


def take(connection: ssl.SSLSocket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += connection.recv(size - len(data))
    return bytes(data)


def returns_what_it_gets(connection: ssl.SSLSocket) -> None:
    """Receives a size and that many bytes, and sends the bytes back; ends at size 0."""
    while size := _SIZE.unpack(take(connection, _SIZE.size))[0]:
        connection.sendall(take(connection, size))


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def send_all(stream: FrameStream, data: bytes) -> None:
    stream.send_frame(b"", memoryview(data), deadline=soon())


def read_all(
    stream: FrameStream,
    size: int,
    *,
    timeout: float = TIMEOUT_S,
    on_timeout: Callable[[], object] = lambda: None,
) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        try:
            count = stream.recv_into(view[: 1 << 20], time.monotonic() + timeout)
        except TimeoutError:
            on_timeout()
            continue
        assert count
        view = view[count:]
    return bytes(buffer)


def test_no_wait_is_for_more_than_the_expected_bytes(contexts: Contexts) -> None:
    """If the last bytes of a payload are fewer than a usual read, by more or less than a record."""
    sizes = [at_once + extra for at_once in (1 << 18, 1 << 19) for extra in range(-20_000, 20_001, 1_000)]
    with connected(contexts, returns_what_it_gets, pair=tcp_pair) as (stream, server):
        stream.handshake(soon())
        begun = time.monotonic()
        for size in sizes:
            send_all(stream, _SIZE.pack(size) + LARGE[:size])
            assert read_all(stream, size) == LARGE[:size]
        send_all(stream, _SIZE.pack(0))
        server.result(TIMEOUT_S)
    assert time.monotonic() - begun < TIMEOUT_S


def test_a_large_payload_in_two_parts_is_read_when_it_has_arrived(contexts: Contexts) -> None:
    """And not at the timeout: after a first read, the kernel wakes it only after as many bytes again."""
    first, rest = LARGE[: 200 << 10], LARGE[200 << 10 : 400 << 10]
    read = threading.Event()

    def serve(connection: ssl.SSLSocket) -> bool:
        take(connection, 1)
        connection.sendall(first)
        time.sleep(0.2)  # until it has been read, or is being waited for
        connection.sendall(rest)
        return read.wait(TIMEOUT_S / 2)

    with connected(contexts, serve, pair=tcp_pair) as (stream, served):
        stream.handshake(soon())
        send_all(stream, b"!")
        assert read_all(stream, len(first) + len(rest)) == first + rest
        read.set()
        assert served.result(TIMEOUT_S)


def test_a_part_of_a_large_payload_is_read_when_the_peer_pauses(contexts: Contexts) -> None:
    """The peer may wait for this read: while the receive window was full, the peer has stopped to send, and the kernel
    asks for room only after seconds."""
    read = threading.Event()

    def serve(connection: ssl.SSLSocket) -> bool:
        connection.sendall(LARGE[: 50 << 10])
        return read.wait(TIMEOUT_S / 2)

    with connected(contexts, serve, pair=tcp_pair) as (stream, served):
        stream.handshake(soon())
        data = memoryview(bytearray(1 << 20))
        count = 0
        while count < 50 << 10:
            count += stream.recv_into(data[count:], time.monotonic() + TIMEOUT_S / 4)
        assert data[:count] == LARGE[: 50 << 10]
        read.set()
        assert served.result(TIMEOUT_S)


@pytest.mark.parametrize("shaken", [False, True], ids=["handshake", "read"])
def test_a_trickle_extends_no_timeout(contexts: Contexts, shaken: bool) -> None:
    """One byte at a time, each within the timeout: the total time is still limited."""
    slow = threading.Event()

    def trickling_pair() -> tuple[socket.socket, socket.socket]:
        (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()

        def pass_on(source: socket.socket, to: socket.socket, *, may_trickle: bool) -> None:
            with contextlib.suppress(OSError), source, to:
                while data := source.recv(1 if may_trickle and slow.is_set() else 1 << 16):
                    to.sendall(data)
                    if may_trickle and slow.is_set():
                        time.sleep(0.02)

        for source, to, may_trickle in ((far, near, True), (near, far, False)):
            passing = partial(pass_on, source, to, may_trickle=may_trickle)
            threading.Thread(target=passing, daemon=True).start()
        return ours, theirs

    if not shaken:
        slow.set()
    with connected(contexts, lambda c: c.sendall(LARGE), pair=trickling_pair) as (stream, _):
        if shaken:
            stream.handshake(soon())
            slow.set()
        buffer, begun = memoryview(bytearray(1 << 16)), time.monotonic()

        def attempt() -> int | None:
            deadline = time.monotonic() + 0.2
            if shaken:
                return stream.recv_into(buffer, deadline)
            stream.handshake(deadline)
            return None

        with pytest.raises(TimeoutError):
            for _ in iter(attempt, None):
                pass
        assert time.monotonic() - begun < TIMEOUT_S


def test_timeouts_lose_nothing(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while the other side does not read, nor while it does not write, nor in the handshake."""
    goes_on = [threading.Event() for _ in range(2)]

    def serve(connection: ssl.SSLSocket) -> bytes:
        assert goes_on[0].wait(TIMEOUT_S)
        data = take(connection, len(LARGE))
        assert goes_on[1].wait(TIMEOUT_S)
        connection.sendall(data)
        return data

    with connected(contexts, serve) as (stream, server):
        while True:
            with contextlib.suppress(TimeoutError):
                stream.handshake(time.monotonic() + 0.001)
                break
        monkeypatch.setattr("symbiosis_priv.network.stream.SLICE_S", 0.001)
        stream.waiting = lambda *_: goes_on[0].set()
        send_all(stream, LARGE)
        assert goes_on[0].is_set()  # the timeout passed, because the other side did not read
        assert read_all(stream, len(LARGE), timeout=0.001, on_timeout=goes_on[1].set) == LARGE
        assert server.result(TIMEOUT_S) == LARGE


def test_every_kind_of_end_is_reported(contexts: Contexts) -> None:
    for farewell in (ssl.SSLSocket.unwrap, ssl.SSLSocket.detach):

        def serve(connection: ssl.SSLSocket, farewell: Callable[[ssl.SSLSocket], object] = farewell) -> None:
            connection.sendall(b"last words")
            with contextlib.suppress(OSError):
                left = farewell(connection)
                socket.socket(fileno=left).close() if isinstance(left, int) else None

        with connected(contexts, serve) as (stream, _server):
            stream.handshake(soon())
            assert read_all(stream, 10) == b"last words"
            assert stream.recv_into(memoryview(bytearray(1)), soon()) == 0


def test_the_other_side_receives_the_reason_of_a_refusal(contexts: Contexts) -> None:
    with connected(contexts, lambda connection: None, client=contexts.stranger) as (stream, server):
        with pytest.raises(ssl.SSLCertVerificationError):
            stream.handshake(soon())
        with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
            server.result(TIMEOUT_S)


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
            server.handshake(None)
        shaken = pool.submit(client.handshake, soon())
        while True:
            try:
                server.handshake(None)
                break
            except TimeoutError:
                assert not server.unsent
                select.select([theirs], [], [], TIMEOUT_S)
        shaken.result(TIMEOUT_S)
        yield client, server


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
@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=4), skipped=st.integers(0, 1000))
def test_gathered_bytes_stay_in_order(contexts: Contexts, sizes: list[int], skipped: int) -> None:
    """However they are divided, and with bytes behind them; more than are read ahead are left to `receive`."""
    size = sum(sizes)
    with streams(contexts) as (client, server), ThreadPoolExecutor(1) as pool:
        for start, end in pairwise(accumulate(sizes, initial=0)):
            pool.submit(client.send_frame, b"", memoryview(LARGE)[start:end], deadline=soon()).result(TIMEOUT_S)
        server.begin(deadline=soon())
        skipped = min(skipped, len(server.arrived))
        server.arrived = server.arrived[skipped:]
        gathered = server.gather(size - skipped, deadline=soon())
        assert gathered or size - skipped > 1 << 15
        if gathered:
            assert server.arrived == LARGE[skipped:size]
        rest = bytearray(size - skipped)
        server.receive(memoryview(rest), deadline=soon())
        assert rest == LARGE[skipped:size]
        assert server.consumed == size


def test_a_peer_that_leaves_while_its_bytes_are_gathered(ends: tuple[FrameStream, FrameStream]) -> None:
    client, server = ends
    send_all(client, LARGE[:100])
    server.begin(deadline=soon())
    client.close()
    with pytest.raises(ConnectionLostError):
        server.gather(101, deadline=soon())
    assert len(server.arrived) == 100  # they are read again, and billed


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
            server.few_rows = True
            header, announced = server.receive_head(max_payload=size, deadline=soon())
            assert not server.few_rows  # the header may announce many rows
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


def test_a_wait_reports_its_purpose(ends: tuple[FrameStream, FrameStream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis_priv.network.stream.SLICE_S", 0.01)
    client, told, begun = ends[0], list[str](), time.monotonic()
    client.waiting = lambda deadline, why: told.append(why)
    with pytest.raises(TimeoutError, match="it has not answered yet"):
        client.begin(deadline=time.monotonic() + 0.1)
    with pytest.raises(TimeoutError, match="it does not take the request"):
        client.send_frame(b"", memoryview(LARGE * 4), deadline=time.monotonic() + 0.1)
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert list(dict.fromkeys(told)) == ["it has not answered yet", "it does not take the request"]
