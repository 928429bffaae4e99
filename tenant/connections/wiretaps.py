"""A wiretap that remembers who answered when: how long a session stands still, and who takes over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire


class Witness:
    """Hears the answers of executors. Thread-safe.

    Times are those of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._answers: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Requests are not remembered."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """An answer."""
        if isinstance(message, wire.Result) and peer.role == "executor":
            with self._lock:
                self._answers.append((time.monotonic(), peer.name))

    def answered(self, *, since: float) -> list[tuple[float, str]]:
        """(when, name of the executor) of each answer from then on."""
        with self._lock:
            return [answer for answer in self._answers if answer[0] >= since]

    def stood_still(self, *, since: float, until: float) -> float:
        """The longest pause between answers that has begun or ended in that time, in seconds; 0 without answers."""
        with self._lock:
            times = [when for when, _ in self._answers]
        return max((end - start for start, end in pairwise(times) if start <= until and end >= since), default=0.0)


class Assassin(Witness):
    """Kills an executor, once, while it is being asked: the request that is about to leave is lost.

    Args:
        kill: ends the provider of that name.
    """

    def __init__(self, kill: Callable[[str], None]) -> None:
        super().__init__()
        self._kill = kill
        self._left: int | None = None
        self._arming = threading.Lock()
        self.victim: str | None = None
        self.at = 0.0

    def arm(self, *, requests: int) -> None:
        """Strike when so many more requests have left for executors."""
        with self._arming:
            self._left = requests

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """A request is about to leave: perhaps the one."""
        if not isinstance(message, wire.Execute):
            return
        with self._arming:
            if self._left is None:
                return
            self._left -= 1
            if self._left >= 0:
                return
            self._left = None
            self.victim, self.at = peer.name, time.monotonic()
        self._kill(peer.name)

    @property
    def successor(self) -> str | None:
        """Which other executor has answered first since; None if none has, or nothing happened."""
        return self._next_answer()[1]

    @property
    def recovery_s(self) -> float:
        """From the deed to that answer; 0 if there is none."""
        return self._next_answer()[0] - self.at

    def _next_answer(self) -> tuple[float, str | None]:
        others = (answer for answer in self.answered(since=self.at) if self.victim and answer[1] != self.victim)
        return next(others, (self.at, None))
