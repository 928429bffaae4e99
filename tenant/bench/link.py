"""Emulates a network between a tenant and its providers, with latency, limited bandwidth and loss.

    with LocalFederation(model, folder) as local, Link() as link:
        federation = link.federation(local.federation)
        with Child("tenant", serve, federation) as tenant:
            link.impose(Condition(mbit_per_s=100, round_trip_ms=100))

A process on loopback forwards bytes after a delay, without changing TLS. The tenant's access is emulated: all of its
providers share one bandwidth, and each direction has its own. TCP itself sees no delay, so there is no slow start, and
a lost segment delays the following bytes of its connection by the round trip of a retransmission. A new connection
waits for the round trip of TCP's handshake. The proxy reads at most a few round trips ahead, so that the bandwidth
limits a sender.
"""

import asyncio
import contextlib
import math
import random
import re
import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically
from tenant.bench.children import Child

_FORM = re.compile(r"(?P<rate>[\d.]+)(?P<unit>mbit|gbit)/(?P<delay>[\d.]+)ms(?:/(?P<loss>[\d.]+)%)?")
_MBIT = 1e6 / 8  # bytes of a packet
_BUFFER = 1 << 20
_HERE = "127.0.0.1"
_CHUNK = 32 << 10
_SEGMENT = 1448
_CONNECT_S, _ANSWER_S = 10.0, 20.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The state of a link between a tenant and its providers, the same in both directions.

    Args:
        mbit_per_s: bandwidth in each direction; None for no limit.
        round_trip_ms: delay that the link adds to a round trip, half of it in each direction.
        loss: share of packets that are lost in each direction.
    """

    mbit_per_s: float | None = None
    round_trip_ms: float = 0.0
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `100mbit/100ms`, `1gbit/5ms`, or with a loss in each direction `100mbit/100ms/0.1%`.

        Raises:
            ConfigError: the text has another form.
        """
        try:
            found = _FORM.fullmatch(text.strip())
            if found is None:
                raise ValueError
            rate, delay, loss = (float(found[name] or 0) for name in ("rate", "delay", "loss"))
        except ValueError:
            rate, delay, loss, found = 0.0, 0.0, 0.0, None
        if found is None or rate <= 0 or loss >= 100:
            raise ConfigError(f"condition {text!r}: write rate and round trip like 100mbit/100ms, or 1gbit/5ms/0.1%")
        return cls(mbit_per_s=rate * (1000 if found["unit"] == "gbit" else 1), round_trip_ms=delay, loss=loss / 100)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of each direction; infinite without a limit."""
        return math.inf if self.mbit_per_s is None else self.mbit_per_s * _MBIT

    @property
    def delay_s(self) -> float:
        """Delay of one direction, in seconds."""
        return self.round_trip_ms / 2e3

    @property
    def bytes_under_way(self) -> float:
        """Bytes of a connection that one direction may hold: a buffer of 1 MiB, and the bytes of a round trip."""
        return _BUFFER + (0.0 if self.mbit_per_s is None else min(2 * self.delay_s, 1.0) * self.bytes_per_s)

    def __str__(self) -> str:
        rate = "no limit" if self.mbit_per_s is None else _rate(self.mbit_per_s)
        return f"{rate}, {self.round_trip_ms:g} ms" + (f", {self.loss:.2g} lost" if self.loss else "")


def _rate(mbit_per_s: float) -> str:
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"


class Link:
    """An emulated link, first without limits. A context manager that ends the proxy."""

    def __init__(self) -> None:
        self._proxy: Child[Condition | list[int], list[int]] = Child("proxy", serve_proxy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.close()

    @property
    def pid(self) -> int:
        """The proxy's process, whose processor time belongs to the emulation."""
        return self._proxy.pid

    def impose(self, condition: Condition) -> None:
        """Emulate this condition from now on."""
        self._proxy.ask(condition, timeout_s=_ANSWER_S)

    def ports(self, ports: Sequence[int]) -> list[int]:
        """The ports at which the tenant reaches servers that listen at these ports."""
        return self._proxy.ask(list(ports), timeout_s=_ANSWER_S)

    def federation(self, path: Path) -> Path:
        """The tenant's `federation.toml`, made from the file that names the providers themselves."""
        text, ports = path.read_text(encoding="utf-8"), [peer.port for peer in load_federation(path).peers]
        for port, reached in zip(ports, self.ports(ports), strict=True):
            text = text.replace(f'"{_HERE}:{port}"', f'"{_HERE}:{reached}"')
        emulated = path.with_name(f"{path.stem}-emulated{path.suffix}")
        write_atomically(emulated, text.encode())
        return emulated


@contextmanager
def serve_proxy() -> Iterator[Callable[[Condition | list[int]], list[int]]]:
    """For `Child`: takes a condition, or a list of ports, and returns one port of the proxy for each of these ports."""
    selector = selectors.SelectSelector()  # select's timeouts have microseconds; epoll's have milliseconds
    loop = asyncio.SelectorEventLoop(selector)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    proxy = _Proxy()

    async def answer(question: Condition | list[int]) -> list[int]:
        if isinstance(question, Condition):
            proxy.impose(question)
            return []
        return [await proxy.listen(port) for port in question]

    yield lambda question: asyncio.run_coroutine_threadsafe(answer(question), loop).result()


class Direction:
    """One direction of a link: bytes leave in order at the bandwidth, and arrive after the delay."""

    def __init__(self, condition: Condition, *, seed: int) -> None:
        self._condition = condition
        self._random = random.Random(seed)
        self._free = -math.inf  # time at which the last byte has left

    def arrival(self, now: float, size: int) -> float:
        """Return the arrival time of the last of `size` bytes sent at `now`, in seconds. Times must not decrease."""
        self._free = max(now, self._free) + size / self._condition.bytes_per_s
        return self._free + self._condition.delay_s

    def lost(self, packets: int) -> int:
        """Return the number of `packets` packets that are lost."""
        if not self._condition.loss:
            return 0
        return sum(self._random.random() < self._condition.loss for _ in range(packets))


class _Proxy:
    """All connections over one link."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self.impose(Condition())

    def impose(self, condition: Condition) -> None:
        self._condition = condition
        self._directions = [Direction(condition, seed=seed) for seed in range(2)]

    async def listen(self, port: int) -> int:
        """Open a port of the proxy, and forward its connections to `port`."""
        server = await asyncio.start_server(partial(self._connect, port), _HERE, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _connect(self, port: int, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._condition.delay_s)
        with contextlib.suppress(OSError, TimeoutError), contextlib.closing(to_near):
            far, to_far = await asyncio.wait_for(asyncio.open_connection(_HERE, port), _CONNECT_S)
            with contextlib.closing(to_far):
                await asyncio.gather(self._forward(near, to_far, index=0), self._forward(far, to_near, index=1))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, index: int) -> None:
        """Forward one direction of one connection."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        under_way, less = 0, asyncio.Event()

        async def deliver() -> None:
            nonlocal under_way
            data = b"begin"
            while data:
                at, data = await due.get()
                await asyncio.sleep(at - loop.time())
                target.write(data)
                await target.drain()
                under_way -= len(data)
                less.set()
            target.write_eof()

        delivery = asyncio.create_task(deliver())
        data, held = b"begin", 0.0
        while data and not delivery.done():
            data = await source.read(_CHUNK)
            now, condition, direction = loop.time(), self._condition, self._directions[index]
            held = max(held, direction.arrival(now, len(data)))
            held += 2 * condition.delay_s * bool(direction.lost(-(-len(data) // _SEGMENT)))
            due.put_nowait((held, data))
            under_way += len(data)
            while under_way > condition.bytes_under_way and not delivery.done():
                less.clear()
                await less.wait()
        await delivery
