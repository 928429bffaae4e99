"""Abuse by a tenant or by unauthenticated clients: waits and memory are bounded, and the bill names the abuser.

Every attack uses loopback and has a limited number of requests and time. The provider is a separate process, so that
its memory and processor time can be measured. At the same time an honest tenant requests one row at a time.
"""

import contextlib
import itertools
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from provider.config.schema import UsageConfig
from provider.gateway.usage import COUNTED, read
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.provider.clients import Client, Service, effect, execute
from tests.provider.conftest import Configure, Connect, Keys, Launch
from tests.waiting import beside, until
from threat_model.conformance.frames import malformed_frames

MIB = 1 << 20
WIDTH, WIDE = 512, 2048  # columns of the attacked layer group, gate and up
GATE_UP = 2
ROWS = 8192  # a request's matrix has 16 MiB, its answer's has 64 MiB
PATIENCE_S = 1.0
FRAMES = malformed_frames()
LIMITS = {"max_payload_mib": 64, "max_inflight_mib": 320, "max_inflight_mib_per_tenant": 192}

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


@pytest.fixture(scope="module")
def wide(save_llama: Callable[..., Path]) -> Path:
    return save_llama(hidden_size=WIDTH, intermediate_size=WIDE // 2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bills") / "usage.sqlite"


@pytest.fixture(scope="module")
def service(configure: Configure, launch: Launch, wide: Path, bills: Path) -> Service:
    return launch(configure(checkpoint=wide, usage=UsageConfig(database=bills), **LIMITS))


class Culprit:
    """The usage counters of the tenant that abuses the provider in a test.

    Args:
        bills: the provider's database.
        tenant: the abuser.
    """

    def __init__(self, bills: Path, tenant: str) -> None:
        self._bills, self._tenant = bills, tenant
        self._before = self._counts()

    def must_have(self, **least: int) -> None:
        """Wait until these counters have increased by at least these amounts."""
        until(lambda: all(self._grown(name) >= count for name, count in least.items()))

    def _grown(self, name: str) -> int:
        return self._counts()[name] - self._before[name]

    def _counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for row in read(self._bills):
            if row["tenant"] == self._tenant:
                total.update({name: int(row[name]) for name in COUNTED})
        return total


Blame = Callable[[str], Culprit]


@pytest.fixture
def blame(bills: Path, victim: Service, connect: Connect) -> Blame:
    """Wait until the counters of earlier tests are committed, by a refused request after them."""

    def blame(tenant: str) -> Culprit:
        with contextlib.closing(connect(tenant, role=None, to=victim)) as only:
            until(lambda: getattr(only.ask(wire.FetchHealth()), "connections", None) == 1)
            before = Culprit(bills, tenant)
            assert isinstance(only.ask(execute(0, 0)), wire.Failure)
            before.must_have(refused=1)
            return Culprit(bills, tenant)

    return blame


@pytest.fixture
def victim(service: Service, connect: Connect) -> Service:
    """A provider that has already loaded the attacked layer group, so that later memory is not weights and kernels."""
    client = connect("alice", to=service)
    for rows in (1, 64):
        for direction, width in zip(DIRECTIONS, (WIDTH, WIDE), strict=True):
            client.product(execute(GATE_UP, rows, direction=direction), torch.ones(rows, width, dtype=torch.int32))
    client.close()
    return service


class Watch:
    """Peak memory and processor time of a process while a block runs."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._before = self._resident()
        self._cpu = self._processor_time()
        self._peak = self._before
        self._over = threading.Event()

    @property
    def grown_mib(self) -> float:
        return (self._peak - self._before) / MIB

    @property
    def cpu_s(self) -> float:
        return self._processor_time() - self._cpu

    def _resident(self) -> int:
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _processor_time(self) -> float:
        user, system = (self._folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    @property
    def left_mib(self) -> float:
        return (self._resident() - self._before) / MIB

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self._peak = max(self._peak, self._resident())

    @contextlib.contextmanager
    def running(self) -> Iterator["Watch"]:
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()


def watching(service: Service) -> contextlib.AbstractContextManager[Watch]:
    return Watch(service.process.pid).running()


def longest_wait(client: Client, *, seconds: float) -> float:
    """Request one row after the other, and return the longest time of a request."""
    row, longest, end = torch.ones(1, WIDTH, dtype=torch.int32), 0.0, time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        client.product(execute(GATE_UP, 1), row)
        longest = max(longest, time.monotonic() - begun)
    return longest


def test_effects_of_a_tenant_that_hangs_up(victim: Service, connect: Connect, blame: Blame) -> None:
    """A hundred bytes request a large product: it is cut into slices, waits its turn, and ends when its tenant
    leaves."""
    honest, culprit = connect("alice", to=victim), blame("dave")
    with watching(victim) as watch:
        for _ in range(6):
            attacker = connect("dave", role="helper", to=victim)
            attacker.send(effect(GATE_UP, ROWS, seed=secrets.token_bytes(32)))
            attacker.close()
        assert longest_wait(honest, seconds=2.0) <= PATIENCE_S
    assert watch.grown_mib <= 1.1 * LIMITS["max_inflight_mib_per_tenant"]
    assert watch.cpu_s <= 6.0
    culprit.must_have(abandoned=6)


def test_a_flood_of_large_requests(victim: Service, connect: Connect, blame: Blame) -> None:
    """Honest answers have the right bits, and the abuser is billed for the flood."""
    honest, culprit = connect("alice", to=victim), blame("bob")
    row = torch.arange(WIDTH, dtype=torch.int32).reshape(1, WIDTH)
    alone = honest.product(execute(GATE_UP, 1), row)
    flood = [connect("bob", to=victim) for _ in range(4)]
    matrix = torch.ones(2048, WIDTH, dtype=torch.int32)

    def keep_asking(client: Client) -> None:
        for _ in range(6):
            client.product(execute(GATE_UP, 2048), matrix)

    with watching(victim) as watch, ThreadPoolExecutor(len(flood)) as pool:
        floods = [pool.submit(keep_asking, client) for client in flood]
        while not all(future.done() for future in floods):
            begun = time.monotonic()
            assert torch.equal(honest.product(execute(GATE_UP, 1), row), alone)
            assert time.monotonic() - begun <= PATIENCE_S
        for future in floods:
            future.result()
    assert watch.grown_mib <= 1.1 * LIMITS["max_inflight_mib_per_tenant"]
    culprit.must_have(requests=24, rows=24 * 2048)


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


def test_silent_unauthenticated_connections(victim: Service, keys: Keys) -> None:
    """400 silent connections a second from 250 addresses, and a tenant with a delay of 300 ms."""
    over, opened = threading.Event(), list[socket.socket]()

    def flood() -> None:
        begun = time.monotonic()
        while not over.is_set() and len(opened) < 2000:
            source = f"127.1.0.{1 + len(opened) % 250}"
            connection = socket.create_connection(parse_address(victim.address), source_address=(source, 0))
            opened.append(connection)
            over.wait(max(0.0, begun + len(opened) / 400 - time.monotonic()))

    with watching(victim) as watch, contextlib.ExitStack() as connections:
        with beside(flood, over=over):
            time.sleep(0.5)  # 200 of them are open
            for _ in range(3):
                FarClient(victim.address, keys.context("alice"), delay=0.3).health()
        for connection in opened:
            connections.enter_context(connection)
    assert watch.grown_mib <= 32
    named = [line for line in victim.logged() if line["event"] in ("handshake_dropped", "handshake_refused")]
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
        kinds = [
            bytes(flipped),
            rng.randbytes(rng.randrange(wire.PREFIX.size, 200)),
            rng.choice(FRAMES).data,
        ]
        leaves = rng.random() < 0.2
        return (good[: rng.randrange(1, len(good))] if leaves else rng.choice(kinds)), leaves
    kinds = [
        wire.encode(execute(0, rng.choice([rows, 1000, wire.MAX_ROWS])), payload_bytes=size) + bytes(size),
        wire.encode(execute(rng.randrange(9, 1 << 20), 1), payload_bytes=4 * WIDTH) + bytes(4 * WIDTH),
        wire.encode(wire.Hello(version=1, role="helper", model_digest="x")),
        wire.encode(helpers) if rng.random() < 0.5 else wire.encode(helpers, payload_bytes=8) + bytes(8),
    ]
    return rng.choice(kinds), False


def test_ten_thousand_malformed_frames(configure: Configure, launch: Launch, wide: Path, connect: Connect) -> None:
    """Each gets an error or ends its connection. Another tenant's answers keep their bits, and no memory is kept."""
    service = launch(configure(checkpoint=wide, frame_timeout_s=5))
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
        with watching(service) as watch:
            provoke(9000)
    assert next(served) > 100
    assert failures > 5000
    assert watch.grown_mib < 32
    assert service.stop() == 0
    assert not any(line["event"] == "connection_failed" for line in service.logged())
