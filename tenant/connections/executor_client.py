"""The client of one executor: a pool of connections for masked rows, and threads that use several of them for one
product.

A request takes the free connection that was used last. If none is free, the pool opens another one, up to a limit; then
the request waits. So several threads of a tenant use a provider at the same time, and no connection is opened before it
is needed.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, RepeatedRequest, fresh_nonce
from tenant.core.parts import Part
from tenant.routing.known_provider import KnownProvider, State
from tenant.worker import Worker

PARALLEL_CHANNELS: Final = 2
"""Connections for one product: one connection transfers data while the rows of the other are multiplied."""
MOST_CHANNELS: Final = 8
"""Maximum number of connections for products of several threads. A provider's default limit per tenant is 64."""
_FRESH_S: Final = 0.2  # a connection that has just answered is used without asking whether the provider has left


class Answer(NamedTuple):
    """An executor's answer to a part: int32 `[r, o]`, unverified, and the duration of the request, once there was a
    connection."""

    words: Tensor
    seconds: float


class NoFreeChannelError(DeadlineExceededError):
    """All connections to a provider were in use until the deadline. The provider is not at fault."""


class ExecutorClient:
    """The client of one executor: channels, each for one request at a time. Thread-safe."""

    def __init__(self, provider: KnownProvider, new_channel: Callable[[], Channel]) -> None:
        self.provider = provider
        self.workers = [Worker(f"channel-{provider.peer.name}") for _ in range(PARALLEL_CHANNELS)]
        self.channels: list[Channel] = []
        self._new_channel = new_channel
        self._free: list[Channel] = []
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for a free channel
        self._closed = False

    def close(self) -> None:
        """Close all connections and stop the threads, for good and without waiting. Requests in flight fail."""
        for worker in self.workers:
            worker.stop()
        with self._lock:
            self._closed = True
        for channel in self.channels:
            channel.close()

    def abandon(self) -> None:
        """Close the parent's connections in a forked child. Takes no lock: a thread of the parent may have held it."""
        for channel in self.channels:
            channel.abandon()

    @contextmanager
    def take(self, *, until: float) -> Iterator[Channel]:
        """Context manager for the exclusive use of a channel. `until`: latest time to wait for a free channel, on the
        clock of `time.monotonic`. Raises `NoFreeChannelError`: no channel was free until then."""
        with self._lock:
            while not self._free and len(self.channels) >= MOST_CHANNELS:
                self._waiting += 1
                try:
                    if not self._returned.wait(until - time.monotonic()):
                        raise NoFreeChannelError(f"all {MOST_CHANNELS} connections to the provider were in use")
                finally:
                    self._waiting -= 1
            if not self._free:
                self._free.append(self._new_channel())
                self.channels.append(self._free[-1])
                if self._closed:
                    self._free[-1].close()
            channel = self._free.pop()
        try:
            yield channel
        finally:
            with self._lock:
                self._free.append(channel)
                if self._waiting:
                    self._returned.notify()

    def ask(
        self, part: Part, *, patience_s: float, deadline: float, since: float, meanwhile: Callable[[], None]
    ) -> Answer:
        """Send masked rows once, without retrying, in as many requests as the executor's limits need. `patience_s`:
        seconds that the answer may take once a connection is free. `meanwhile`: called while an answer is awaited.
        Raises `NoFreeChannelError`: no connection was free until the deadline, and no request was sent;
        `TransportError`: the executor is away, busy, too slow, or no longer serves the layer group; `ProviderError`: it
        refused; `ProtocolError`: it broke the protocol."""
        before = self.provider.health.state
        with self.take(until=deadline) as channel:
            if self.provider.health.state is State.DOWN and before is not State.DOWN:
                raise ConnectionLostError(f"{self.provider} was lost while its connections were in use")
            until = min(deadline, time.monotonic() + patience_s)
            welcome = self.provider.welcome = channel.probe() or channel.connect(deadline=until, since=since)
            if not self.provider.serves(part.index):
                raise ConnectionLostError(f"{self.provider} no longer serves layer group {part.index}")
            started = time.monotonic()
            limit = row_limit(part.widest, welcome)
            matrices = part.sent.split(limit) if part.count > limit else [part.sent]
            answers = [
                channel.attempt(request, rows, outputs=part.outputs, deadline=until, since=since, meanwhile=meanwhile)
                for request, rows in zip(self._requests(part, limit), matrices, strict=True)
            ]
            return Answer(joined(answers), time.monotonic() - started)

    def _requests(self, part: Part, limit: int) -> list[wire.Execute]:
        requests = part.requests.get((self, limit))
        if requests is None:
            requests = part.requests[self, limit] = [
                wire.Execute(
                    nonce=fresh_nonce(),
                    group=part.index,
                    direction=part.direction,
                    arithmetic="ring",
                    rows=min(limit, part.count - first),
                    counts=part.counts and part.counts_of(first, limit),
                    ring_bits=part.rows.ring_bits,
                )
                for first in range(0, part.count, limit)
            ]
        return requests

    def repeat(self, request: RepeatedRequest, *, deadline: float, meanwhile: Callable[[], None]) -> Answer | None:
        """Send a request like an earlier one, as `ask` does. Returns None if no open connection is free; nothing was
        sent then."""
        with self.take(until=deadline) as channel:
            started = time.monotonic()
            if channel.connection is None or (started - channel.used_at > _FRESH_S and channel.probe() is None):
                return None
            words = channel.repeat(request, deadline=deadline, meanwhile=meanwhile)
            return Answer(words, time.monotonic() - started)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of several matrices. A single matrix is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@functools.lru_cache(1024)  # called for each executor and product, with one width per layer group
def row_limit(widest: int, welcome: wire.Welcome) -> int:
    """Return the number of rows whose request and answer fit a provider's limits. Neither has more than `widest`
    columns."""
    return max(1, min(welcome.max_rows, welcome.max_payload // wire.RING32.size(1, widest)))
