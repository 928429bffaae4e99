"""Forwards bytes between connections on loopback, with a delay, a bandwidth and losses.

The proxy reads at most a few round trips ahead, so that the bandwidth limits a sender. A new connection waits for the
round trip of TCP's handshake before its first byte is forwarded. A lost segment delays the following bytes of its
connection by the round trip of a retransmission.
"""

import asyncio
import contextlib
import math
import random
import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tenant.bench.network.link import Condition, Link
from tenant.bench.processes.children import Child

_HERE = "127.0.0.1"
_CHUNK = 32 << 10
_SEGMENT = 1448
_CONNECT_S, _ANSWER_S = 10.0, 20.0


class _ProxyLink(Link):
    kind = "proxy"
    host = _HERE

    def __init__(self, proxy: Child[Condition | list[int], list[int]]) -> None:
        self._proxy = proxy
        self.emulators = [proxy.pid]

    def apply(self, condition: Condition) -> None:
        self._proxy.ask(condition, timeout_s=_ANSWER_S)

    def ports(self, ports: Sequence[int]) -> list[int]:
        return self._proxy.ask(list(ports), timeout_s=_ANSWER_S)


@contextmanager
def open_proxy() -> Iterator[Link]:
    """Context manager: a link through a proxy process on loopback."""
    with Child("proxy", serve_proxy) as child:
        yield _ProxyLink(child)


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


class Proxy:
    """All connections over one link."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self.apply(Condition())

    def apply(self, condition: Condition) -> None:
        """Apply a condition to all later bytes."""
        self._condition = condition
        self._directions = [DelayLine(condition, seed=seed) for seed in range(2)]

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
