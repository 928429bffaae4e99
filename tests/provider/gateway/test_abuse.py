"""A flood of requests, malformed frames and silent connections in thousands: the provider's memory is bounded.

The provider is a separate process, so that its memory can be measured. `bench abuse` tries what a tenant can do with
well-formed requests (`tests/threat_model/availability/test_abuse.py`).
"""

import contextlib
import itertools
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.memory import CLEAR_REFS, forget_peak, peak_kib
from tests.provider.clients import Client, Service, effect, execute
from tests.provider.conftest import Configure, Connect, Keys, Launch
from tests.waiting import beside
from threat_model.conformance.frames import malformed_frames

WIDTH = 512  # columns of the attacked layer group, gate and up
GATE_UP = 2
FRAMES = malformed_frames()
LIMITS = {"max_payload_mib": 64, "max_inflight_mib": 320}

pytestmark = pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the system has no peak of memory to reset")


@pytest.fixture(scope="module")
def wide(save_llama: Callable[..., Path]) -> Path:
    return save_llama(hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=1)


@pytest.fixture(scope="module")
def service(configure: Configure, launch: Launch, wide: Path) -> Service:
    return launch(configure(checkpoint=wide, frame_timeout_s=5, **LIMITS))


@contextlib.contextmanager
def growing_at_most(service: Service, *, mib: float) -> Iterator[None]:
    """Check the provider's peak of memory while a block runs."""
    forget_peak(service.process.pid)
    before = peak_kib(service.process.pid)
    yield
    assert peak_kib(service.process.pid) - before <= 1024 * mib


def test_a_flood_of_large_requests(service: Service, connect: Connect) -> None:
    """Honest answers have the right bits, and the flood takes no more memory than one tenant may."""
    honest, flood = connect("alice", to=service), [connect("bob", to=service) for _ in range(4)]
    row, matrix = (torch.arange(rows * WIDTH, dtype=torch.int32).reshape(rows, WIDTH) for rows in (1, 2048))
    alone = honest.product(execute(GATE_UP, 1), row)
    flood[0].product(execute(GATE_UP, 2048), matrix)  # later memory is not weights and kernels

    def keep_asking(client: Client) -> None:
        for _ in range(6):
            client.product(execute(GATE_UP, 2048), matrix)

    most = 1.1 * LIMITS["max_inflight_mib"] / 2
    with growing_at_most(service, mib=most), ThreadPoolExecutor(len(flood)) as pool:
        floods = [pool.submit(keep_asking, client) for client in flood]
        while not all(future.done() for future in floods):
            assert torch.equal(honest.product(execute(GATE_UP, 1), row), alone)
        for future in floods:
            future.result()


class FarClient:
    """A tenant whose bytes take `delay` seconds to arrive."""

    def __init__(self, address: str, context: ssl.SSLContext, *, delay: float) -> None:
        self._raw = socket.create_connection(parse_address(address), timeout=10)
        self._delay = delay
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")

    def health(self) -> None:
        self._until_done(self._tls.do_handshake)
        self._tls.write(wire.encode(wire.FetchHealth()))
        self._until_done(lambda: self._tls.read(1))
        self._raw.close()

    def _until_done(self, step: Callable[[], object]) -> None:
        while True:
            try:
                step()
                return
            except ssl.SSLWantReadError:
                time.sleep(self._delay)
                self._raw.sendall(self._out.read())
                self._in.write(self._raw.recv(65536))


def test_silent_unauthenticated_connections(service: Service, keys: Keys) -> None:
    """400 silent connections a second from 250 addresses, and a tenant with a delay of 300 ms."""
    over, opened = threading.Event(), list[socket.socket]()

    def flood() -> None:
        begun = time.monotonic()
        while not over.is_set() and len(opened) < 2000:
            source = f"127.1.0.{1 + len(opened) % 250}"
            connection = socket.create_connection(parse_address(service.address), source_address=(source, 0))
            opened.append(connection)
            over.wait(max(0.0, begun + len(opened) / 400 - time.monotonic()))

    with growing_at_most(service, mib=32), contextlib.ExitStack() as connections:
        with beside(flood, over=over):
            time.sleep(0.5)  # 200 of them are open
            for _ in range(3):
                FarClient(service.address, keys.context("alice"), delay=0.3).health()
        for connection in opened:
            connections.enter_context(connection)
    named = [line for line in service.logged() if line["event"] in ("handshake_dropped", "handshake_refused")]
    assert len(named) < 50


def malformed(rng: random.Random) -> tuple[bytes, bool]:
    """A malformed frame of many kinds, and whether its sender leaves within it. Kinds that break the framing cost a
    handshake each, so they are rare."""
    rows = rng.randrange(4)
    request = rng.choice([execute(0, rows), wire.FetchHealth(), effect(0, rows, seed=bytes(32))])
    good = wire.encode(request, payload_bytes=4 * rows * WIDTH) + bytes(4 * rows * WIDTH)
    flipped = bytearray(good)
    flipped[wire.PREFIX.size + rng.randrange(wire.PREFIX.unpack(good[: wire.PREFIX.size])[1])] ^= rng.randrange(1, 256)
    helpers = effect(0, 1, seed=bytes(32))
    size = rng.choice([size for size in (0, 1, 255, 256, 4096) if size != 4 * rows * WIDTH])
    if rng.random() < 0.05:
        kinds = [bytes(flipped), rng.randbytes(rng.randrange(wire.PREFIX.size, 200)), rng.choice(FRAMES).data]
        leaves = rng.random() < 0.2
        return (good[: rng.randrange(1, len(good))] if leaves else rng.choice(kinds)), leaves
    kinds = [
        wire.encode(execute(0, rng.choice([rows, 1000, wire.MAX_ROWS])), payload_bytes=size) + bytes(size),
        wire.encode(execute(rng.randrange(9, 1 << 20), 1), payload_bytes=4 * WIDTH) + bytes(4 * WIDTH),
        wire.encode(wire.Hello(version=1, role="helper", model_digest="x")),
        wire.encode(helpers) if rng.random() < 0.5 else wire.encode(helpers, payload_bytes=8) + bytes(8),
    ]
    return rng.choice(kinds), False


def test_thousands_of_malformed_frames(service: Service, connect: Connect) -> None:
    """Each gets an error or ends its connection. Another tenant's answers keep their bits, and no memory is kept."""
    honest, over, served = connect("bob", to=service), threading.Event(), itertools.count()
    row, rng, failures = torch.arange(WIDTH, dtype=torch.int32).reshape(1, WIDTH), random.Random(2), 0
    want = honest.product(execute(GATE_UP, 1), row)

    def keep_asking() -> None:
        while not over.wait(0.01):  # with pauses, because both cores are needed for the malformed frames
            assert torch.equal(honest.product(execute(GATE_UP, 1), row), want)
            next(served)

    def provoke(frames: int) -> None:
        nonlocal failures
        client = connect("alice", to=service)
        for _ in range(frames):
            frame, leaves = malformed(rng)
            try:
                client.send_bytes(frame)
                reply = None if leaves else client.receive()[0]
            except SymbiosisError:
                reply = None
            failures += isinstance(reply, wire.Failure)
            ends = (wire.ErrorCode.BAD_FRAME, wire.ErrorCode.TOO_LARGE)
            if reply is None or (isinstance(reply, wire.Failure) and reply.code in ends):
                client.close()
                client = connect("alice", to=service)

    with beside(keep_asking, over=over):
        provoke(1000)
        with growing_at_most(service, mib=12):
            provoke(3000)
    assert next(served) > 100
    assert failures > 2000
    assert service.stop() == 0
    assert not any(line["event"] == "connection_failed" for line in service.logged())
