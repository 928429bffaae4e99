"""10,000 malformed frames: each gets an error or ends its connection, and other tenants are not disturbed."""

import random
import threading
from pathlib import Path

import pytest
import torch

from symbiosis_priv.network import wire
from tests.provider.clients import Client, Service, effect, execute
from tests.provider.conftest import Configure, Connect, Launch

FRAMES = 10_000
WARM_UP = 1_000
MAX_GROWTH_KIB = 32 * 1024
WIDTH = 64

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


class Vandal:
    """Makes malformed frames of many kinds, from a fixed seed."""

    def __init__(self) -> None:
        self._random = random.Random(2)
        # The first five kinds break the framing, so each costs a connection; the others do not.
        self.ways = (self.flipped, self.truncated, self.oversized, self.noise, self.wrong_type)
        self.milder = (self.wrong_count, self.wrong_group, self.wrong_place)

    def frame(self) -> tuple[bytes, bool]:
        """Returns the bytes of a frame, and True if the client must drop the connection after sending them."""
        # about a hundred of each, because handshakes are slow
        ways = self.ways if self._random.random() < 0.05 else self.milder
        way = self._random.choice(ways)
        return way(), way == self.truncated

    def good(self) -> bytes:
        rows = self._random.randrange(4)
        request = self._random.choice([execute(0, rows), wire.FetchHealth(), effect(0, rows, seed=bytes(32))])
        payload = bytes(rows * WIDTH * 4) if isinstance(request, wire.Execute) else b""
        return wire.encode(request, payload_bytes=len(payload)) + payload

    def flipped(self) -> bytes:
        """One byte of the header is changed; the result is often not a header."""
        frame = bytearray(self.good())
        header = wire.PREFIX.unpack(frame[: wire.PREFIX.size])[1]
        frame[wire.PREFIX.size + self._random.randrange(header)] ^= self._random.randrange(1, 256)
        return bytes(frame)

    def truncated(self) -> bytes:
        frame = self.good()
        return frame[: self._random.randrange(1, len(frame))]

    def oversized(self) -> bytes:
        big = self._random.randrange(1 << 24, 1 << 32)
        sizes = self._random.choice([(big, 0), (100, big), (big, big)])
        return wire.PREFIX.pack(wire.MAGIC, *sizes) + self._random.randbytes(50)

    def noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(wire.PREFIX.size, 200))

    def wrong_type(self) -> bytes:
        """A reply, another protocol's header, or fields of the wrong type."""
        welcome = wire.Welcome(version=1, model_digest="x", first_group=0, end_group=1, max_rows=1, max_payload=4)
        broken = [b"\x80", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4type\xa7execute", b"\x81\xa4type\x01"]
        header = self._random.choice(broken)
        return self._random.choice([wire.encode(welcome), wire.PREFIX.pack(wire.MAGIC, len(header), 0) + header])

    def wrong_count(self) -> bytes:
        rows = self._random.choice([0, 1, 2, 1000, wire.MAX_ROWS])
        size = self._random.choice([s for s in (0, 1, 255, 256, 4096) if s != rows * WIDTH * 4])
        return wire.encode(execute(0, rows), payload_bytes=size) + bytes(size)

    def wrong_group(self) -> bytes:
        request = execute(self._random.randrange(9, 1 << 20), 1)
        return wire.encode(request, payload_bytes=WIDTH * 4) + bytes(WIDTH * 4)

    def wrong_place(self) -> bytes:
        """A helper's request on an executor's connection, a second hello, an effect with rows."""
        hello = wire.Hello(version=1, role="helper", model_digest="x")
        request = effect(0, 1, seed=bytes(32))
        choice = [wire.encode(hello), wire.encode(request), wire.encode(request, payload_bytes=8) + bytes(8)]
        return self._random.choice(choice)


class GoodNeighbour(threading.Thread):
    """Requests one product after the other, and records the first wrong one."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self.enough = threading.Event()
        self.served = 0
        self.trouble: BaseException | None = None

    def run(self) -> None:
        x = torch.arange(2 * WIDTH, dtype=torch.int32).reshape(2, WIDTH)
        try:
            want = self._client.product(execute(0, 2), x)
            while not self.enough.wait(0.01):  # it pauses, because both cores are needed for the malformed frames
                assert torch.equal(self._client.product(execute(0, 2), x), want)
                self.served += 1
        except BaseException as error:
            self.trouble = error


def provoke(vandal: Vandal, connect: Connect, service: Service, frames: int) -> int:
    """Send malformed frames. Returns the number that were answered with a failure; the others ended their
    connection."""
    client, failures = connect("alice", to=service), 0
    for _ in range(frames):
        frame, leave = vandal.frame()
        try:
            client.socket.sendall(frame)
            if leave:
                raise ConnectionResetError("left in the middle of a frame")
            reply, _ = client.receive()
            if not isinstance(reply, wire.Failure):
                continue
            failures += 1
            if reply.code in (wire.ErrorCode.BAD_FRAME, wire.ErrorCode.TOO_LARGE):
                raise ConnectionResetError("a broken frame ends its connection")
        except OSError:
            client.close()
            client = connect("alice", to=service)
    client.close()
    return failures


def test_ten_thousand_malformed_frames(configure: Configure, launch: Launch, connect: Connect) -> None:
    # thousands of handshakes would have a small share while products are computed; `test_listener.py` tests that
    service = launch(configure(frame_timeout_s=5, handshake_share=1.0, handshake_share_serving=1.0))
    vandal = Vandal()
    neighbour = GoodNeighbour(connect("bob", to=service))
    neighbour.start()
    try:
        failures = provoke(vandal, connect, service, WARM_UP)
        before, served = resident_kib(service.process.pid), neighbour.served
        failures += provoke(vandal, connect, service, FRAMES - WARM_UP)
        growth = resident_kib(service.process.pid) - before
    finally:
        neighbour.enough.set()
        neighbour.join(20)
    assert neighbour.trouble is None
    assert neighbour.served > served + 100
    assert failures > FRAMES // 2
    assert growth < MAX_GROWTH_KIB, f"{growth} KiB"
    assert service.stop() == 0
    assert not any(line["event"] == "connection_failed" for line in service.logged())
