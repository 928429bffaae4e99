"""The gateway's view of a running executor, and the guard that notices an executor that hangs.

`generation` counts the ends of the executor, so that a thread that waits for an answer notices that the executor has
ended. The guard asks the executor for a report every second. An executor that does not answer within
`[executor] hang_timeout_s` hangs; each kind of executor reacts in its own way (`supervisor`).
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor.envelope import ReportRequest
from provider.executor.queues import RequestChannel

log = logs.EventLog(__name__)

WATCH_S = 0.1
"""Seconds after which a waiting thread checks again that its executor has not ended."""
STARTUP_S = 300.0
"""Seconds that an executor may take to its first answer."""
_GUARD_S = 1.0  # pause between two reports


class ExecutorHandle(ABC):
    """A running executor, as the gateway sees it.

    Args:
        model_digest: digest of the model that the executor must serve, also after a restart.
    """

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        self.config = config
        self.model_digest = model_digest
        self.generation = 0
        self.hangs = 0
        self._answered = -1  # the last generation that has answered
        self.stopping = threading.Event()
        self._guard = threading.Thread(target=self._run_guard, name="executor-guard", daemon=True)

    @property
    def present(self) -> bool:
        """True if the executor has answered since its last start and has not ended."""
        return self._answered == self.generation

    @abstractmethod
    def start(self) -> None:
        """Start the executor and wait for its first answer. Raises the error that prevents the start."""

    @abstractmethod
    def stop(self, timeout: float) -> None:
        """Stop the executor, after the gateway has stopped. Does nothing if the executor was not started."""

    @abstractmethod
    def open_channel(self) -> RequestChannel:
        """Make a channel for one thread of the gateway."""

    def close(self) -> None:  # noqa: B027 - only some kinds have something to close
        """Free the resources. Call this after `stop`, when every channel is closed."""

    @abstractmethod
    def _on_hang(self) -> None:
        """React to an executor that does not answer any more."""

    def _run_guard(self) -> None:
        while not self.stopping.wait(_GUARD_S):
            generation, settings = self.generation, self.config.executor
            patience = settings.hang_timeout_s + (settings.group_timeout_s if settings.ranks > 1 else 0.0)
            if not self.present:  # a start takes longer than an answer
                patience = max(patience, STARTUP_S)
            try:
                answers = self._answers(within=patience)
            except Exception as error:  # the request was not sent: for example no descriptor was free
                log.failure("executor_not_asked", error)
                continue
            if answers:
                self._answered = generation
            elif generation == self.generation and not self.stopping.is_set():
                self.hangs += 1
                log.warning("executor_hangs", seconds=round(patience, 1))
                self._on_hang()

    def _answers(self, *, within: float) -> bool:
        """Ask for a report. Returns False if the report is late, or if the executor restarts or stops first."""
        generation, deadline = self.generation, time.monotonic() + within
        with contextlib.closing(self.open_channel()) as channel:
            channel.send(ReportRequest())
            while channel.receive(WATCH_S) is None:
                if time.monotonic() > deadline or generation != self.generation or self.stopping.is_set():
                    return False
        return True
