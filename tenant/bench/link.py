"""An emulated link between a tenant and its providers, with a latency and a bandwidth, for `bench network`.

    with Link() as link, LocalFederation(model, folder, host=HOST) as local:
        federation = link.federation(local.federation)
        with Child("tenant", serve_tenant, federation) as tenant:
            link.apply(Condition(mbit_per_s=100, round_trip_ms=100))

A thread forwards the bytes of connections on loopback, without changing TLS. All providers share the bandwidth, which
is separate for each direction. The thread reads at most a few round trips ahead, so that the bandwidth limits a
sender. A new connection waits for the round trip of TCP's handshake before its first byte is forwarded. TCP itself has
no delay, so there is no slow start, and nothing is lost.
"""

import asyncio
import contextlib
import math
import re
import selectors
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.files import write_atomically

HOST = "127.0.0.1"
_NUMBER = r"\d*\.?\d+"
_FORM = re.compile(rf"(?P<rate>{_NUMBER})(?P<unit>mbit|gbit)/(?P<delay>{_NUMBER})ms")
_CHUNK, _AHEAD = 32 << 10, 128  # bytes that are read at once, and how often before the first of them have arrived
_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The state of a link between a tenant and its providers: bandwidth of each direction, and the round trip."""

    mbit_per_s: float = math.inf
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
    def delay_s(self) -> float:
        return self.round_trip_ms / 2e3

    def __str__(self) -> str:
        rate = f"{self.mbit_per_s / 1000:g} Gbit/s" if self.mbit_per_s >= 1000 else f"{self.mbit_per_s:g} Mbit/s"
        return f"{rate}, {self.round_trip_ms:g} ms"


class DelayLine:
    """One direction of a link: bytes leave in order at the bandwidth, and arrive after the delay."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self._free = -math.inf  # time at which the last byte has left

    def arrival(self, now: float, size: int) -> float:
        """Return the arrival time of the last of `size` bytes sent at `now`, in seconds. Times must not decrease."""
        self._free = max(now, self._free) + size / (self.condition.mbit_per_s * 1e6 / 8)
        return self._free + self.condition.delay_s


class Link:
    """An emulated link, and a context manager that closes it. Providers must listen at `HOST`. It begins without
    limits."""

    def __init__(self) -> None:
        self._directions = [DelayLine(Condition()) for _ in range(2)]
        self._servers: list[asyncio.Server] = []
        # select's timeouts have a resolution of microseconds, epoll's of milliseconds
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for server in self._servers:
            server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.sleep(0))  # transports end one step after their tasks
        self._loop.close()

    def apply(self, condition: Condition) -> None:
        """Emulate this condition for all later bytes; `Condition()` has no limits."""
        self._directions = [DelayLine(condition) for _ in range(2)]

    def federation(self, path: Path) -> Path:
        """Write a `federation.toml` through which the tenant reaches the providers of `path`. Returns its path."""
        text = path.read_text(encoding="utf-8")
        for peer in load_federation(path).peers:
            reached = asyncio.run_coroutine_threadsafe(self._listen(peer.port), self._loop).result()
            text = text.replace(f'"{HOST}:{peer.port}"', f'"{HOST}:{reached}"')
        emulated = path.with_name(f"{path.stem}-emulated{path.suffix}")
        write_atomically(emulated, text.encode())
        return emulated

    async def _listen(self, port: int) -> int:
        """Open a port, and forward its connections to `port`."""

        async def connect(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
            await asyncio.sleep(2 * self._directions[0].condition.delay_s)
            try:
                with contextlib.closing(to_near):
                    far, to_far = await asyncio.wait_for(asyncio.open_connection(HOST, port), _CONNECT_S)
                    with contextlib.closing(to_far):
                        async with asyncio.TaskGroup() as both:
                            both.create_task(self._forward(near, to_far, index=0))
                            both.create_task(self._forward(far, to_near, index=1))
            except* OSError:  # one end has closed the connection
                pass

        server = await asyncio.start_server(connect, HOST, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, index: int) -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_AHEAD)

        async def deliver() -> None:
            data = b"begin"
            while data:
                at, data = await due.get()
                await asyncio.sleep(at - loop.time())
                target.write(data)
                await target.drain()
            target.write_eof()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            data, held = b"begin", 0.0
            while data:
                data = await source.read(_CHUNK)
                held = max(held, self._directions[index].arrival(loop.time(), len(data)))
                await due.put((held, data))
