"""Connections to one provider, of which each serves one request at a time.

A request takes a free lane, the one that was used last. If no lane is free, another one is opened, up to a limit; then
the request waits for a lane. So several threads of a tenant reach a provider at once, and one thread opens no more
connections than it uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from symbiosis_priv.errors import DeadlineExceededError
from tenant.connections.channel import Channel


class LanesInUseError(DeadlineExceededError):
    """Every connection that this side opens to a provider was in use until the deadline: not the provider's doing."""


class Lanes:
    """See the module's text. Thread-safe.

    Args:
        new: makes a channel, which connects when it is first used.
        most: channels at the same time.
    """

    def __init__(self, new: Callable[[], Channel], *, most: int) -> None:
        self._new, self._most = new, most
        self._channels: list[Channel] = []
        self._free: list[Channel] = []
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._waiting = 0  # for one to come free
        self._closed = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All of them, the oldest first."""
        return tuple(self._channels)

    @contextmanager
    def take(self, *, until: float) -> Iterator[Channel]:
        """A channel that nobody else uses meanwhile.

        Args:
            until: how long to wait for one, on the clock of `time.monotonic`.

        Raises:
            LanesInUseError: all of them were in use for so long.
        """
        channel = self.acquire(until=until)
        try:
            yield channel
        finally:
            self.release(channel)

    def acquire(self, *, until: float) -> Channel:
        """A channel that the caller gives back with `release`; see `take`."""
        with self._lock:
            while not self._free and len(self._channels) >= self._most:
                self._waiting += 1
                try:
                    if not self._returned.wait(until - time.monotonic()):
                        raise LanesInUseError(f"all {self._most} connections to it were in use")
                finally:
                    self._waiting -= 1
            if self._free:
                return self._free.pop()
            channel = self._new()
            self._channels.append(channel)
            if self._closed:
                channel.close()
            return channel

    def release(self, channel: Channel) -> None:
        """Others may take it now."""
        with self._lock:
            self._free.append(channel)
            if self._waiting:
                self._returned.notify()

    def drop_idle(self) -> None:
        """Forget connections that nobody uses just now: their provider has just been lost."""
        for channel in self._channels:
            channel.drop_if_idle()

    def close(self) -> None:
        """Close all, for good and without waiting; a request in flight fails."""
        with self._lock:
            self._closed = True
        for channel in self._channels:
            channel.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections. No lock: a thread of the parent may have held it."""
        for channel in self._channels:
            channel.abandon()
