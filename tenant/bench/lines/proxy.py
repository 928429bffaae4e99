"""Carries bytes between connections on loopback, each when it is due: for machines where nobody is root.

`python -m tenant.bench.lines.proxy PORT...` listens on a port of its own for each of the ports, says which, and then
takes conditions from stdin until that ends. It reads no more than a few round trips' worth ahead, so that a sender
feels the bandwidth. A connection costs the round trip of TCP's handshake before its first byte passes. A lost
segment holds up what follows on its connection for the round trip of its retransmission.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from tenant.bench.lines.carrier import answer, conditions
from tenant.bench.lines.condition import Condition
from tenant.bench.lines.shaping import Way

_HERE = "127.0.0.1"
_CHUNK = 32 << 10
_SEGMENT = 1448
_AHEAD = 1 << 20  # bytes of a direction that may be under way beyond what the line itself holds
_CONNECT_S = 10.0


class Proxy:
    """Everything that is carried, over one line."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.impose(Condition())

    def impose(self, condition: Condition) -> None:
        """What comes from now on."""
        self._condition = condition
        self._ways = [Way(condition, seed=seed) for seed in range(2)]

    async def listen(self, port: int) -> int:
        """A port of our own, whose connections go on to `port`."""
        listener = socket.create_server((_HERE, 0))
        listener.setblocking(False)
        self._start(self._accept(listener, port))
        return int(listener.getsockname()[1])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            self._start(self._connection(near, port))

    async def _connection(self, near: socket.socket, port: int) -> None:
        far = socket.socket()
        with near, far:
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.sleep(2 * self._condition.delay_s)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    await asyncio.get_running_loop().sock_connect(far, (_HERE, port))
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(near, far, way=0))
                    both.create_task(self._pump(far, near, way=1))

    async def _pump(self, source: socket.socket, target: socket.socket, *, way: int) -> None:
        """One direction of one connection. An error of either end ends both."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room = _Room()

        async def deliver() -> None:
            while True:
                at, data = await due.get()
                if (wait := at - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(target, data)
                room.give_back(len(data))

        async with asyncio.TaskGroup() as both:
            both.create_task(deliver())
            held = 0.0
            while data := await self._received(source):
                now, condition, direction = loop.time(), self._condition, self._ways[way]
                held = max(held, direction.arrival(now, len(data)))
                held += 2 * condition.delay_s * bool(direction.lost(-(-len(data) // _SEGMENT)))
                due.put_nowait((held, data))
                await room.take(len(data), most=_AHEAD + min(2 * condition.delay_s, 1.0) * _finite(condition))
            due.put_nowait((held, b""))

    async def _received(self, source: socket.socket) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(source, _CHUNK)
        except ConnectionResetError:
            return b""


class _Room:
    """How much of one direction is under way."""

    def __init__(self) -> None:
        self._used = 0
        self._less = asyncio.Event()

    async def take(self, size: int, *, most: float) -> None:
        """Returns when no more than `most` is."""
        self._used += size
        while self._used > most:
            self._less.clear()
            await self._less.wait()

    def give_back(self, size: int) -> None:
        """So much has arrived."""
        self._used -= size
        self._less.set()


def _finite(condition: Condition) -> float:
    return 0.0 if condition.mbit_per_s is None else condition.bytes_per_s


async def carry(ports: list[int]) -> None:
    """Until stdin ends."""
    proxy = Proxy()
    ended = asyncio.Event()

    def heard() -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        for condition in conditions(data):
            proxy.impose(condition)
            answer()
        if not data:
            ended.set()

    answer([await proxy.listen(port) for port in ports])
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), heard)
    await ended.wait()


def main() -> None:
    """See the module's text."""
    selector = selectors.SelectSelector()  # its timeouts are in microseconds; epoll's are in milliseconds
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(carry([int(port) for port in sys.argv[1:]]))


if __name__ == "__main__":
    main()
