"""Wiretaps of a session that record when executors answer, and kill one of them in the middle of a pass."""

import threading
import time
from collections.abc import Callable

from torch import Tensor

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire


class AnswerTimes:
    """Records when each executor answers, by `time.monotonic`. Thread-safe."""

    def __init__(self) -> None:
        self._answers: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Does nothing: requests are not recorded."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Record the time of an executor's answer."""
        if isinstance(message, wire.Result) and peer.role == "executor":
            with self._lock:
                self._answers.append((time.monotonic(), peer.name))

    def answered(self, *, since: float) -> list[tuple[float, str]]:
        """The time and the executor's name of each answer since the time `since`."""
        with self._lock:
            return [answer for answer in self._answers if answer[0] >= since]


class ExecutorKiller(AnswerTimes):
    """Kills one executor, once, just before a request to it is sent, so that the request is lost. `kill`: function that
    ends the provider with the given name."""

    def __init__(self, kill: Callable[[str], None]) -> None:
        super().__init__()
        self._kill = kill
        self._left: int | None = None
        self._arming = threading.Lock()
        self.victim: str | None = None
        self.at = 0.0

    def arm(self, *, requests: int) -> None:
        """Kill the executor after `requests` more requests to executors."""
        with self._arming:
            self._left = requests

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Count a request to an executor, and kill the executor if the count of `arm` is reached."""
        if not isinstance(message, wire.Execute):
            return
        with self._arming:
            if self._left:
                self._left -= 1
                return
            if self._left is None:
                return
            self._left, self.victim, self.at = None, peer.name, time.monotonic()
        self._kill(peer.name)

    @property
    def successor(self) -> str | None:
        """The first other executor that has answered after the kill; None if none has answered."""
        return self._next_answer()[1]

    @property
    def recovery_s(self) -> float:
        """Seconds from the kill to the answer of `successor`; 0 if there is none."""
        return self._next_answer()[0] - self.at

    def _next_answer(self) -> tuple[float, str | None]:
        others = (answer for answer in self.answered(since=self.at) if self.victim and answer[1] != self.victim)
        return next(others, (self.at, None))
