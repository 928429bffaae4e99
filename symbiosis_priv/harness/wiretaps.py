"""A wiretap of a session that kills an executor in the middle of a pass."""

import threading
import time
from collections.abc import Callable

from torch import Tensor

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire


class ExecutorKiller:
    """Kills one executor, once, just before a request to it is sent, so that the request is lost. `kill` ends the
    provider with the given name. `successor` is the first other executor that has answered since then, after
    `recovery_s` seconds."""

    def __init__(self, kill: Callable[[str], None]) -> None:
        self._kill = kill
        self._left: int | None = None
        self._lock = threading.Lock()
        self._at = 0.0
        self.victim: str | None = None
        self.successor: str | None = None
        self.recovery_s = 0.0

    def arm(self, *, requests: int) -> None:
        """Kill the executor after `requests` more requests to executors."""
        with self._lock:
            self._left = requests

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Count a request to an executor, and kill the executor if the count of `arm` is reached."""
        if not isinstance(message, wire.Execute):
            return
        with self._lock:
            if self._left is None:
                return
            self._left -= 1
            if self._left >= 0:
                return
            self._left, self._at, self.victim = None, time.monotonic(), peer.name
        self._kill(peer.name)

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Note the first answer of another executor after the kill."""
        if not isinstance(message, wire.Result) or peer.role != "executor":
            return
        with self._lock:
            if self.successor is None and self.victim not in (None, peer.name):
                self.successor, self.recovery_s = peer.name, time.monotonic() - self._at
