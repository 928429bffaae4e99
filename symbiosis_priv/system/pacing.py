"""Pauses after failures, and threads that run something again and again."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

log = logging.getLogger(__name__)

_random: Final = secrets.SystemRandom().random
_MOST_DOUBLINGS: Final = 32


@dataclass(eq=False)
class Backoff:
    """Pauses after failures in a row: each is twice as long as the one before, up to `last_s`. For one thread.

        backoff = Backoff(0.02, 1.0, jitter=0.5)
        while not connected():
            stopping.wait(backoff.failed())

    Without waiting, `is_over` tells whether the next attempt may be made; `succeeded` ends the row of failures. Each
    pause is varied at random by up to `jitter`, a share, so that programs that failed together do not return together.
    """

    first_s: float
    last_s: float
    jitter: float = 0.0
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = _random  # numbers in [0, 1)
    failures: int = field(default=0, init=False)  # in a row
    _until: float = field(default=0.0, init=False)

    @property
    def next_s(self) -> float:
        """Seconds of the pause that the next failure begins, without jitter."""
        return float(min(self.first_s * 2 ** min(self.failures, _MOST_DOUBLINGS), self.last_s))

    @property
    def is_over(self) -> bool:
        return not self.failures or self.clock() >= self._until

    def failed(self) -> float:
        """Begin a pause. Returns its length in seconds."""
        pause_s = varied(self.next_s, self.jitter, self.random)
        self.failures += 1
        self._until = self.clock() + pause_s
        return pause_s

    def succeeded(self) -> None:
        """End the pause, and begin with the shortest pause after the next failure."""
        self.failures = 0


class Periodic:
    """A daemon thread that calls `action` every `every_s` seconds; with `at_once`, for the first time at the start.

        flusher = Periodic(self._flush, every_s=1.0, name="flusher")
        flusher.start()
        flusher.wake()              # call it now
        flusher.close(timeout=5.0)  # wait for a call in progress

    The action may call `stop`, and set `every_s` for its next call. An exception of the action does not end the thread,
    but is logged. Pauses are varied at random by up to the share `jitter`, so that programs that start together do not
    act together. The thread belongs to one process: a forked child makes its own."""

    def __init__(
        self, action: Callable[[], object], *, every_s: float, name: str, jitter: float = 0.0, at_once: bool = False
    ) -> None:
        self._action, self.every_s, self._jitter = action, every_s, jitter
        self._first_s = 0.0 if at_once else every_s
        self._due = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopped(self) -> bool:
        return self._stopped

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if the system can start no more threads."""
        self._thread.start()

    def wake(self) -> None:
        """Call the action soon. Calls before the next call count once."""
        self._due.set()

    def stop(self) -> None:
        """Make no further call. Does not wait."""
        self._stopped = True
        self._due.set()

    def close(self, timeout: float) -> bool:
        """Make no further call, and wait for a call in progress. Returns True if the thread has ended within `timeout`
        seconds; False at once in the thread itself."""
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = self._first_s
        while True:
            self._due.wait(varied(pause_s, self._jitter))
            self._due.clear()
            if self._stopped:  # read after the event was cleared, so `stop` is never missed
                return
            try:
                self._action()
            except Exception as error:  # its text may quote data, so only its type is logged
                log.warning("%s failed and is tried again: %s", self._thread.name, type(error).__name__)
            pause_s = self.every_s


def varied(seconds: float, share: float, random: Callable[[], float] = _random) -> float:
    """Return a random time between `seconds * (1 - share)` and `seconds * (1 + share)`."""
    return seconds * (1 + share * (2 * random() - 1)) if share else seconds
