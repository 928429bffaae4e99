"""How a thread of the gateway asks the executor: one question at a time, with a deadline, and sure to end.

An executor that has ended answers nothing, and it is started again (`supervisor`). Whoever waited for it tells its
tenant to ask again (`BUSY`) instead of waiting for nothing, as it tells everybody while the next one starts: a tenant
may know another provider.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from provider.executor import envelope
from provider.executor.envelope import Ask, Envelope, ExecutorReport
from provider.executor.handle import WATCH_S, ExecutorHandle
from provider.executor.queues import Answer
from provider.refusal import Refusal
from symbiosis_priv.network import wire

_FRESH_S = 0.25  # of what the executor says about itself
_GRACE_S = 1.0  # for the executor's own word that it is late, which comes after the slice that it is at
_NOTHING = memoryview(b"")


class ExecutorClient:
    """One gateway thread's line to the executor: one request at a time, always with a deadline.

    Every request gets one answer, also one that was cancelled or is late, unless its executor is lost. Until then the
    executor may hold the request's memory.
    """

    def __init__(self, handle: ExecutorHandle) -> None:
        self._handle = handle
        self._line = handle.line()
        self._generation = handle.generation
        self._owed = False  # an answer

    @property
    def generation(self) -> int:
        """Of the executor that was asked last."""
        return self._generation

    def __enter__(self) -> ExecutorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def require_present(self) -> None:
        """Raises `Refusal` BUSY while the executor is being started again."""
        if not self._handle.present:
            self._give_up("the executor is being started again; ask again later")

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        """Send a request; `receive` its answer."""
        if self._owed:
            self._reconnect()
        self._generation = self._handle.generation
        self._owed = True
        self._line.send(message, payload)

    def receive(self, *, deadline: float, gone: Callable[[], bool] = lambda: False) -> Answer:
        """The answer.

        Args:
            deadline: by `time.monotonic()`; the executor keeps it too, and answers that it is late.
            gone: whether nobody waits for the answer any more: then it is cancelled, and comes soon.

        Raises:
            Refusal: BUSY if the executor died or does not even say that it is late, STOPPING if the provider is.
        """
        cancelled = False
        while (answer := self._receive()) is None:
            if self._lost:
                self._reconnect()
                self._give_up("the executor was lost; ask again")
            if not cancelled and gone():
                self.cancel()
                cancelled = True
            if time.monotonic() > deadline + _GRACE_S:
                self._give_up("the executor is late; ask again later")
        return answer

    def report(self, *, deadline: float) -> ExecutorReport:
        """What the executor says about itself. Raises what `receive` does."""
        self.send(Ask())
        answer = self.receive(deadline=deadline - _GRACE_S)  # nobody says that a report is late
        return msgspec.json.decode(answer.payload, type=ExecutorReport)

    def settle(self) -> None:
        """Return when the executor holds nothing of the last request: it has answered, or it is no more."""
        while self._owed:
            if self._receive() is None and (self._lost or self._handle.stopping.is_set()):
                self._reconnect()

    @property
    def _lost(self) -> bool:
        return self._handle.generation != self._generation

    def _receive(self) -> Answer | None:
        answer = self._line.receive(WATCH_S)
        if answer is not None:
            self._owed = False
        return answer

    def cancel(self) -> None:
        """Say that nobody waits for the answer any more; it still comes, soon."""
        self._line.send(envelope.Cancel())

    def _give_up(self, detail: str) -> NoReturn:
        stopping = self._handle.stopping.is_set()
        raise Refusal(wire.ErrorCode.STOPPING if stopping else wire.ErrorCode.BUSY, detail)

    def _reconnect(self) -> None:
        # A late answer must not be taken for the next one's: it goes to a line that is no more.
        self._owed = False
        self._line.close()
        self._line = self._handle.line()


class Condition:
    """What the executor said last about itself, for whoever asks for health: no number of askers has it say so more
    often than once in a while, as nobody's share is charged for that. Thread-safe.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._said: tuple[float, ExecutorReport] | None = None

    def report(self, executor: ExecutorClient, *, timeout: float) -> ExecutorReport:
        """The report, a moment old at most; `executor` is the asker's own. Raises what its `receive` does."""
        executor.require_present()
        deadline = time.monotonic() + timeout
        if not self._asking.acquire(timeout=timeout):
            raise Refusal(wire.ErrorCode.BUSY, "the executor is late; ask again later")
        try:
            if self._said is None or time.monotonic() - self._said[0] > _FRESH_S:
                self._said = time.monotonic(), executor.report(deadline=deadline)
            return self._said[1]
        finally:
            self._asking.release()
