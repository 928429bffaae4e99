"""Carries packets between two TUN interfaces, each when it is due: `tc netem` where the kernel has none.

`python -m tenant.bench.lines.packets OUTER INNER` makes both, says so, and then takes conditions from stdin until that
ends. Packets are as large as Linux hands them out, up to 64 KiB with the segmentation still to be done (TSO): each
counts for the segments and headers that it stands for. Where some get lost, Linux cuts them first, so that each segment
is lost on its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from tenant.bench.lines.carrier import answer, conditions
from tenant.bench.lines.condition import Condition
from tenant.bench.lines.shaping import Way

# linux/if_tun.h, linux/virtio_net.h
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_CHECKSUMS, _TSO4 = 0x01, 0x02
_INTERFACE = struct.Struct("16sH22x")
_VNET = struct.Struct("=BBHHHH")  # flags, segmentation, header bytes, segment bytes, where checksums go
_LARGEST = _VNET.size + (1 << 16)

_QUEUE_S, _QUEUE_BYTES = 0.1, 256 << 10
"""What may wait for the bandwidth, as in a router: so many seconds' worth, at least so much; the rest is dropped."""

_BURST = 64  # packets of one side that are taken before the other side has its turn


@dataclass
class _Side:
    """What comes in by one interface and goes out by the other."""

    source: int
    target: int
    way: Way
    queue_bytes: float = math.inf
    due: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            size, segments = on_the_wire(packet)
            if self.way.waiting(now) + size <= self.queue_bytes and not self.way.lost(segments):
                self.due.append((self.way.arrival(now, size), packet))

    def deliver(self) -> None:
        while self.due and self.due[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # an interface that is down loses packets
                os.write(self.target, self.due.popleft()[1])

    def wait_s(self) -> float | None:
        return max(0.0, self.due[0][0] - time.monotonic()) if self.due else None


def carry(outer: int, inner: int) -> None:
    """Until stdin ends."""
    stdin = sys.stdin.fileno()
    sides = [_Side(inner, outer, Way(Condition(), seed=1)), _Side(outer, inner, Way(Condition(), seed=2))]
    while True:
        waits = [wait for side in sides if (wait := side.wait_s()) is not None]
        ready, _, _ = select.select([outer, inner, stdin], [], [], min(waits, default=None))  # precise to microseconds
        for side in sides:
            side.deliver()
            if side.source in ready:
                side.take()
        if stdin in ready:
            data = os.read(stdin, 1 << 16)
            if not data:
                return
            for condition in conditions(data):
                _impose(condition, sides)
                answer()


def _impose(condition: Condition, sides: list[_Side]) -> None:
    for seed, side in enumerate(sides):
        _offload(side.source, _CHECKSUMS | (0 if condition.loss else _TSO4))
        side.way = Way(condition, seed=seed)
        side.queue_bytes = max(condition.bytes_per_s * _QUEUE_S, _QUEUE_BYTES)


def on_the_wire(packet: bytes) -> tuple[int, int]:
    """Bytes of a packet with its `virtio_net_hdr`, counting the headers of all segments, and how many those are."""
    _, _, _, segment, _, _ = _VNET.unpack_from(packet)
    size = len(packet) - _VNET.size
    if not segment:
        return size, 1
    network = (packet[_VNET.size] & 15) * 4
    headers = network + (packet[_VNET.size + network + 12] >> 4) * 4
    segments = -(-(size - headers) // segment)
    return size + (segments - 1) * headers, segments


def _tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, _INTERFACE.pack(name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    return descriptor


def _offload(descriptor: int, what: int) -> None:
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, what)


def main() -> None:
    """See the module's text."""
    try:
        outer, inner = map(_tun, sys.argv[1:3])
    except OSError as error:
        sys.exit(f"no TUN interface: {error}")
    answer()
    carry(outer, inner)


if __name__ == "__main__":
    main()
