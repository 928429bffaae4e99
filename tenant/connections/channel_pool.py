"""A pool of connections to one provider. Each connection serves one request at a time.

A request takes the free channel that was used last. If no channel is free, the pool opens another one, up to a limit;
then the request waits for a channel. So several threads of a tenant use a provider at the same time, and the pool opens
no connection before it is needed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from symbiosis_priv.errors import DeadlineExceededError
from tenant.connections.channel import Channel


class NoFreeChannelError(DeadlineExceededError):
    """All connections to a provider were in use until the deadline. The provider is not at fault."""


class ChannelPool:
    """A pool of channels to one provider. Thread-safe.

    Args:
        new: makes a channel. The channel connects on its first request.
        most: maximum number of channels.
    """

    def __init__(self, new: Callable[[], Channel], *, most: int) -> None:
        self._new, self._most = new, most
        self._channels: list[Channel] = []
        self._free: list[Channel] = []
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for a free channel
        self._closed = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels, the oldest first."""
        return tuple(self._channels)

    @contextmanager
    def take(self, *, until: float) -> Iterator[Channel]:
        """Context manager for the exclusive use of a channel.

        Args:
            until: latest time to wait for a free channel, on the clock of `time.monotonic`.

        Raises:
            NoFreeChannelError: no channel was free until then.
        """
        channel = self.acquire(until=until)
        try:
            yield channel
        finally:
            self.release(channel)

    def acquire(self, *, until: float) -> Channel:
        """Take a channel as `take` does. The caller must `release` it."""
        with self._lock:
            while not self._free and len(self._channels) >= self._most:
                self._waiting += 1
                try:
                    if not self._returned.wait(until - time.monotonic()):
                        raise NoFreeChannelError(f"all {self._most} connections to the provider were in use")
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
        """Return a channel, so that another thread can take it."""
        with self._lock:
            self._free.append(channel)
            if self._waiting:
                self._returned.notify()

    def drop_idle(self) -> None:
        """Close the connections that are not in use, because their provider was lost."""
        for channel in self._channels:
            channel.drop_if_idle()

    def close(self) -> None:
        """Close all channels, for good and without waiting. Requests in flight fail."""
        with self._lock:
            self._closed = True
        for channel in self._channels:
            channel.close()

    def abandon(self) -> None:
        """Close the parent's connections in a forked child. Takes no lock: a thread of the parent may have held it."""
        for channel in self._channels:
            channel.abandon()
