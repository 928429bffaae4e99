"""An emulated link between a tenant and its providers, with a latency and a bandwidth, for `bench network`.

    with open_link() as link, LocalFederation(model, folder, host=link.host) as local:
        federation = link.federation(local.federation)
        with Child("tenant", serve_tenant, federation) as tenant:
            link.apply(Condition(mbit_per_s=100, round_trip_ms=100))

A process forwards the bytes of connections on loopback, without changing TLS. All providers share the bandwidth, which
is separate for each direction. The process reads at most a few round trips ahead, so that the bandwidth limits a
sender. A new connection waits for the round trip of TCP's handshake before its first byte is forwarded. TCP itself has
no delay, so there is no slow start, and nothing is lost.
"""

import asyncio
import contextlib
import math
import re
import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically
from tenant.bench.processes import Child

_NUMBER = r"\d*\.?\d+"
_FORM = re.compile(rf"(?P<rate>{_NUMBER})(?P<unit>mbit|gbit)/(?P<delay>{_NUMBER})ms")
_MBIT = 1e6 / 8
_BUFFER = 1 << 20
_HERE = "127.0.0.1"
_CHUNK = 32 << 10
_CONNECT_S, _ANSWER_S = 10.0, 20.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The state of a link between a tenant and its providers: bandwidth of each direction (None for no limit), and the
    round trip."""

    mbit_per_s: float | None = None
    round_trip_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `100mbit/100ms` or `1gbit/5ms`. Raises `ConfigError`."""
        found = _FORM.fullmatch(text.strip())
        if found is None or not float(found["rate"]):
            raise ConfigError(f"condition {text!r}: write rate and round trip like 100mbit/100ms")
        rate = float(found["rate"]) * (1000 if found["unit"] == "gbit" else 1)
        return cls(mbit_per_s=rate, round_trip_ms=float(found["delay"]))

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of each direction; infinite without a limit."""
        return math.inf if self.mbit_per_s is None else self.mbit_per_s * _MBIT

    @property
    def delay_s(self) -> float:
        return self.round_trip_ms / 2e3

    @property
    def bytes_under_way(self) -> float:
        """Bytes that one direction of a connection may hold: a buffer of 1 MiB, and the bytes of a round trip."""
        return _BUFFER + (0.0 if self.mbit_per_s is None else min(2 * self.delay_s, 1.0) * self.bytes_per_s)

    def __str__(self) -> str:
        if self.mbit_per_s is None:
            rate = "no limit"
        else:
            rate = f"{self.mbit_per_s / 1000:g} Gbit/s" if self.mbit_per_s >= 1000 else f"{self.mbit_per_s:g} Mbit/s"
        return f"{rate}, {self.round_trip_ms:g} ms"


class Link:
    """An emulated link. Providers must listen at `host`."""

    host = _HERE

    def __init__(self, proxy: "Child[Condition | list[int], list[int]]") -> None:
        self._proxy = proxy

    def apply(self, condition: Condition) -> None:
        """Emulate this condition from now on; `Condition()` has no limits."""
        self._proxy.ask(condition, timeout_s=_ANSWER_S)

    def federation(self, path: Path) -> Path:
        """Write a `federation.toml` through which the tenant reaches the providers of `path`. Returns its path."""
        text, ports = path.read_text(encoding="utf-8"), [peer.port for peer in load_federation(path).peers]
        for port, reached in zip(ports, self.ports(ports), strict=True):
            text = text.replace(f'"{self.host}:{port}"', f'"{self.host}:{reached}"')
        emulated = path.with_name(f"{path.stem}-emulated{path.suffix}")
        write_atomically(emulated, text.encode())
        return emulated

    def ports(self, ports: list[int]) -> list[int]:
        """Return the ports at which the tenant reaches servers that listen at `ports` of `host`."""
        return self._proxy.ask(ports, timeout_s=_ANSWER_S)


@contextmanager
def open_link() -> Iterator[Link]:
    """Context manager: open a link without limits. It ends with the block, or with this process."""
    with Child("proxy", serve_proxy) as child:
        yield Link(child)


@contextmanager
def serve_proxy() -> Iterator[Callable[[Condition | list[int]], list[int]]]:
    """The work of a `Child`: the handler applies a condition, or returns a port of the proxy for each given port."""
    # select's timeouts have a resolution of microseconds, epoll's of milliseconds
    selector = selectors.SelectSelector()
    loop = asyncio.SelectorEventLoop(selector)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    proxy = Proxy()

    async def answer(question: Condition | list[int]) -> list[int]:
        if isinstance(question, Condition):
            proxy.apply(question)
            return []
        return [await proxy.listen(port) for port in question]

    yield lambda question: asyncio.run_coroutine_threadsafe(answer(question), loop).result()


class DelayLine:
    """One direction of a link: bytes leave in order at the bandwidth, and arrive after the delay."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._free = -math.inf  # time at which the last byte has left

    def arrival(self, now: float, size: int) -> float:
        """Return the arrival time of the last of `size` bytes sent at `now`, in seconds. Times must not decrease."""
        self._free = max(now, self._free) + size / self._condition.bytes_per_s
        return self._free + self._condition.delay_s


class Proxy:
    """All connections over one link."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self.apply(Condition())

    def apply(self, condition: Condition) -> None:
        """Apply a condition to all later bytes."""
        self._condition = condition
        self._directions = [DelayLine(condition) for _ in range(2)]

    async def listen(self, port: int) -> int:
        """Open a port of the proxy, and forward its connections to `port`."""

        async def connect(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
            await asyncio.sleep(2 * self._condition.delay_s)
            with contextlib.suppress(OSError, TimeoutError), contextlib.closing(to_near):
                far, to_far = await asyncio.wait_for(asyncio.open_connection(_HERE, port), _CONNECT_S)
                with contextlib.closing(to_far):
                    await asyncio.gather(self._forward(near, to_far, index=0), self._forward(far, to_near, index=1))

        server = await asyncio.start_server(connect, _HERE, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, index: int) -> None:
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
            due.put_nowait((held, data))
            under_way += len(data)
            while under_way > condition.bytes_under_way and not delivery.done():
                less.clear()
                await less.wait()
        await delivery
