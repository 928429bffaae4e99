"""The client of one executor: a pool of connections for masked rows, and threads that use several of them for one
product.

A request takes the free connection that was used last. If none is free, the pool opens another one, up to a limit; then
the request waits. So several threads of a tenant use a provider at the same time, and no connection is opened before it
is needed.

A request names the blocks of relayed effects, which the executor then subtracts (`blocks_at`). If it has not subtracted
them, `Pad.fetch_effects` asks the helpers for the effects.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import torch
from torch import Tensor

from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, RepeatedRequest, Reply, fresh_nonce
from tenant.core.pads import with_first_rows
from tenant.core.parts import Part
from tenant.routing.known_provider import KnownProvider, State
from tenant.worker import Worker

PARALLEL_CHANNELS: Final = 2
"""Connections for one product: one connection transfers data while the rows of the other are multiplied."""
MOST_CHANNELS: Final = 8
"""Maximum number of connections for products of several threads. A provider's default limit per tenant is 64."""
_FRESH_S: Final = 0.2  # a connection that has just answered is used without asking whether the provider has left


class Answer:
    """An executor's answer to a part. A relayed answer keeps its connection until `close`, because the executor returns
    the subtracted blocks on that connection only.

    Attributes:
        words: int32 `[r, o]`, unverified.
        seconds: duration of the request, once there was a connection.
        relayed: True if the executor has subtracted the blocks of all rows.
        missed: True if the request named blocks, and the executor has not subtracted them.
    """

    def __init__(
        self, client: "ExecutorClient", channel: Channel, replies: Sequence[Reply], request: wire.Execute, began: float
    ) -> None:
        self.words, self.seconds = joined([reply.words for reply in replies]), time.monotonic() - began
        self.relayed = replies[0].relayed
        self.missed = bool(request.blocks) and not self.relayed
        self._client, self._channel, self._reply, self._nonce = client, channel, replies[0], request.nonce

    def fetch_block(self, block_id: bytes, size: int, *, deadline: float) -> tuple[wire.Block, bytearray]:
        """Fetch a block of a relayed answer; see `Channel.fetch_block`."""
        request = wire.FetchBlock(block=block_id)
        return self._channel.fetch_block(request, size, connection=self._reply.connection, deadline=deadline)

    def confirm(self) -> None:
        """Allow the executor to delete the blocks, because the answer was right."""
        if self.relayed:
            self._client.confirms.append(self._nonce)

    def close(self) -> None:
        """Release the connection of a relayed answer."""
        if self.relayed:
            self._client.release(self._channel)


class NoFreeChannelError(DeadlineExceededError):
    """All connections to a provider were in use until the deadline. The provider is not at fault."""


class ExecutorClient:
    """The client of one executor: channels, each for one request at a time. Thread-safe. `uses_blocks`: True if
    requests name the blocks of relayed effects. `confirms`: nonces of answers that were right and are not confirmed
    yet."""

    def __init__(self, provider: KnownProvider, new_channel: Callable[[], Channel], *, relay: bool) -> None:
        self.provider = provider
        self.workers = [Worker(f"channel-{provider.peer.name}") for _ in range(PARALLEL_CHANNELS)]
        self.channels: list[Channel] = []
        self.uses_blocks = self._relay = relay
        self.confirms: deque[bytes] = deque()
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

    def drop_idle(self) -> None:
        """Close the connections that are not in use, because the executor was lost."""
        for channel in self.channels:
            channel.drop_if_idle()

    def abandon(self) -> None:
        """Close the parent's connections in a forked child. Takes no lock: a thread of the parent may have held it."""
        for channel in self.channels:
            channel.abandon()

    @contextmanager
    def take(self, *, until: float) -> Iterator[Channel]:
        """Context manager for the exclusive use of a channel. `until`: latest time to wait for a free channel, on the
        clock of `time.monotonic`. Raises `NoFreeChannelError`: no channel was free until then."""
        channel = self.acquire(until=until)
        try:
            yield channel
        finally:
            self.release(channel)

    def acquire(self, *, until: float) -> Channel:
        """Take a channel as `take` does. The caller must `release` it."""
        with self._lock:
            while not self._free and len(self.channels) >= MOST_CHANNELS:
                self._waiting += 1
                try:
                    if not self._returned.wait(until - time.monotonic()):
                        raise NoFreeChannelError(f"all {MOST_CHANNELS} connections to the provider were in use")
                finally:
                    self._waiting -= 1
            if self._free:
                return self._free.pop()
            channel = self._new_channel()
            self.channels.append(channel)
            if self._closed:
                channel.close()
            return channel

    def release(self, channel: Channel) -> None:
        """Return a channel, so that another thread can take it."""
        with self._lock:
            self._free.append(channel)
            if self._waiting:
                self._returned.notify()

    def ask(
        self, part: Part, *, patience_s: float, deadline: float, since: float, meanwhile: Callable[[], None]
    ) -> Answer:
        """Send masked rows once, without retrying, in as many requests as the executor's limits need.

        Args:
            part: the rows; they must not change during the call.
            patience_s: seconds that the answer may take once a connection is free.
            meanwhile: called while an answer is awaited.

        Raises:
            NoFreeChannelError: no connection was free until the deadline. No request was sent.
            TransportError: the executor is away, busy, too slow, or no longer serves the layer group.
            ProviderError: the executor refused.
            ProtocolError: the executor broke the protocol.
        """
        replies, relayed, before = list[Reply](), False, self.provider.health.state
        channel = self.acquire(until=deadline)
        try:
            if self.provider.health.state is State.DOWN and before is not State.DOWN:
                raise ConnectionLostError(f"{self.provider} was lost while its connections were in use")
            until = min(deadline, time.monotonic() + patience_s)
            welcome = self.provider.welcome = channel.probe() or channel.connect(deadline=until, since=since)
            if not self.provider.serves(part.index):
                raise ConnectionLostError(f"{self.provider} no longer serves layer group {part.index}")
            started = time.monotonic()
            limit = row_limit(part.widest, welcome)
            matrices = part.sent.split(limit) if part.count > limit else [part.sent]
            requests = self._requests(part, limit)
            for request, rows in zip(requests, matrices, strict=True):
                reply = channel.attempt(
                    request, rows, outputs=part.outputs, deadline=until, since=since, meanwhile=meanwhile
                )
                replies.append(reply)
            relayed = replies[0].relayed
            return Answer(self, channel, replies, requests[0], started)
        finally:
            if not relayed:
                self.release(channel)

    def repeat(self, request: RepeatedRequest, *, deadline: float, meanwhile: Callable[[], None]) -> Answer | None:
        """Send a request like an earlier one, as `ask` does. Returns None if no open connection is free; nothing was
        sent then."""
        channel = self.acquire(until=deadline)
        try:
            started = time.monotonic()
            if channel.connection is None or (started - channel.used_at > _FRESH_S and channel.probe() is None):
                return None
            reply = channel.repeat(request, deadline=deadline, meanwhile=meanwhile)
            return Answer(self, channel, [reply], request.frames.like, started)  # without blocks, it needs no nonce
        finally:
            self.release(channel)

    def _requests(self, part: Part, limit: int) -> list[wire.Execute]:
        requests = part.requests.get((self, limit))
        if requests is None:
            blocks = blocks_at(self.provider.peer, part) if self.uses_blocks and part.count <= limit else ()
            for pad in part.pads if self._relay and not blocks else ():
                pad.fetch_effects()
            requests = part.requests[self, limit] = []
            for first in range(0, part.count, limit):
                confirms = list[bytes]()
                with suppress(IndexError):  # other threads may have taken them
                    while self.confirms and len(confirms) < wire.MAX_BLOCKS:
                        confirms.append(self.confirms.popleft())
                requests.append(
                    wire.Execute(
                        nonce=fresh_nonce(),
                        group=part.index,
                        direction=part.direction,
                        arithmetic="ring",
                        rows=min(limit, part.count - first),
                        counts=part.counts and part.counts_of(first, limit),
                        ring_bits=part.rows.ring_bits,
                        blocks=blocks,
                        confirms=tuple(confirms),
                    )
                )
        return requests


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of several matrices. A single matrix is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@functools.lru_cache(1024)  # called for each executor and product, with one width per layer group
def row_limit(widest: int, welcome: wire.Welcome) -> int:
    """Return the number of rows whose request and answer fit a provider's limits. Neither has more than `widest`
    columns."""
    return max(1, min(welcome.max_rows, welcome.max_payload // wire.RING32.size(1, widest)))


def blocks_at(executor: Peer, part: Part) -> tuple[wire.BlockRows, ...]:
    """Return the blocks of all rows of a part; none unless every block was sent to this executor."""
    found, now = list[wire.BlockRows](), time.monotonic()
    for first, pad in with_first_rows(part.pads):
        blocks = pad.blocks()
        if not blocks or any(block.executor != executor or block.until < now for block in blocks):
            return ()
        found += [wire.BlockRows(block=b.id, start=b.start, first=first, rows=pad.rows) for b in blocks]
    return tuple(found) if len(found) <= wire.MAX_BLOCKS else ()
