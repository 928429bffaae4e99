"""A running executor as the gateway knows it, and the guard that asks it how it is.

`generation` counts its executor's ends: a thread that waits for an answer notices that the executor it asked is gone. A
guard asks every second; an executor that gives no answer for too long hangs, and what is done about that differs by
kind (`supervisor`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor.envelope import Ask
from provider.executor.queues import Line

log = logs.EventLog(__name__)

WATCH_S = 0.1
"""How often a waiting thread looks whether its executor still lives."""
STARTUP_S = 300.0
"""How long an executor may take until its first answer."""
_GUARD_S = 1.0  # how often it is asked how it is


class ExecutorHandle(ABC):
    """A running executor, seen from the gateway.

    Args:
        config: the provider's.
        model_digest: what it must serve, also when it is started again.
    """

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        self.config = config
        self.model_digest = model_digest
        self.generation = 0
        self.hangs = 0
        self._answered = -1  # the last generation that has
        self.stopping = threading.Event()
        self._guard = threading.Thread(target=self._run_guard, name="executor-guard", daemon=True)

    @property
    def present(self) -> bool:
        """Whether the executor has answered since it was started last, and has not ended."""
        return self._answered == self.generation

    @abstractmethod
    def start(self) -> None:
        """Start; returns when the executor answers. Raises what it failed with."""

    @abstractmethod
    def stop(self, timeout: float) -> None:
        """Stop, after the gateway has. Does nothing to an executor that was not started."""

    @abstractmethod
    def line(self) -> Line:
        """For one of the gateway's threads."""

    def close(self) -> None:  # noqa: B027 - not every kind has something left
        """After `stop`, when every line is closed."""

    @abstractmethod
    def _hung(self) -> None:
        """It does not answer any more."""

    def _run_guard(self) -> None:
        while not self.stopping.wait(_GUARD_S):
            generation, settings = self.generation, self.config.executor
            patience = settings.hang_timeout_s + (settings.group_timeout_s if settings.ranks > 1 else 0.0)
            if not self.present:  # one that starts may take its time
                patience = max(patience, STARTUP_S)
            try:
                answers = self._answers(within=patience)
            except Exception as error:  # it was not even asked: the machine may be out of descriptors, for now
                log.failure("executor_not_asked", error)
                continue
            if answers:
                self._answered = generation
            elif generation == self.generation and not self.stopping.is_set():
                self.hangs += 1
                log.warning("executor_hangs", seconds=round(patience, 1))
                self._hung()

    def _answers(self, *, within: float) -> bool:
        """Whether it says how it is in time. It may be started again meanwhile, or stopped: then it does not."""
        generation, deadline = self.generation, time.monotonic() + within
        with contextlib.closing(self.line()) as line:
            line.send(Ask())
            while line.receive(WATCH_S) is None:
                if time.monotonic() > deadline or generation != self.generation or self.stopping.is_set():
                    return False
        return True
