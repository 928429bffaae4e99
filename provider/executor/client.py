"""The gateway's view of a running executor, and its client: one request at a time, with a deadline.

`generation` counts the ends of the executor, so that a thread that waits for an answer notices that the executor has
ended. The guard asks the executor for a report every second. An executor that does not answer within
`[executor] hang_timeout_s` hangs; each kind of executor reacts in its own way (`supervisor`).

The supervisor restarts an executor that has ended. Its requests, and new ones until the restart is complete, are
refused with BUSY: the tenant may ask another provider.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Self

import msgspec

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor import queues
from provider.refusal import Refusal
from symbiosis_priv.network import wire
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

WATCH_S = 0.1  # seconds after which a waiting thread checks again that its executor has not ended
STARTUP_S = 300.0  # seconds that an executor may take to its first answer
_GUARD_S = 1.0  # pause between two reports
_RECENT_S = 5.0  # oldest report that tenants are told of


class ExecutorHandle(ABC):
    """A running executor, as the gateway sees it. It must serve the model with this digest, also after a restart."""

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        self.config = config
        self.model_digest = model_digest
        self.generation = 0
        self.hangs = 0
        self.narrow = False
        """True if the executor takes and returns rows of 24 bits as they are on the wire."""
        self._answered = -1  # the last generation that has answered
        self._reported: tuple[float, queues.ExecutorReport] | None = None  # its last report to the guard, and when
        self.stopping = threading.Event()
        self._guard = Periodic(self._look, every_s=_GUARD_S, name="executor-guard")

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
    def open_pipe(self) -> queues.RequestPipe:
        """Make a pipe for one thread of the gateway."""

    def close(self) -> None:  # noqa: B027 - only some kinds have something to close
        """Free the resources. Call this after `stop`, when every pipe is closed."""

    def _on_hang(self) -> None:  # noqa: B027 - a thread cannot be killed
        """React to an executor that does not answer any more."""

    def recent_report(self) -> queues.ExecutorReport:
        """A report of the last seconds: those that tenants ask for take no time of the executor, because they are
        charged to nobody. Raises `Refusal` BUSY: there is none."""
        if self._reported is None or time.monotonic() - self._reported[0] > _RECENT_S:
            raise Refusal(wire.ErrorCode.BUSY, "the executor is late; ask again later")
        return self._reported[1]

    def _ask(self, patience: float) -> None:
        """Ask for a report. Raises `Refusal`: it is late, or the executor has ended."""
        with ExecutorRequester(self) as client:
            report = client.report(deadline=time.monotonic() + patience)
            self._reported, self._answered = (time.monotonic(), report), client.generation

    def _look(self) -> None:
        """Ask for a report; notice a start or a hang."""
        generation, settings = self.generation, self.config.executor
        patience = settings.hang_timeout_s * (2 if settings.ranks > 1 else 1)
        if not self.present:  # a start takes longer than an answer
            patience = max(patience, STARTUP_S)
        try:
            self._ask(patience)
        except Refusal:  # it hangs, or has ended
            if generation == self.generation and not self.stopping.is_set():
                self.hangs += 1
                log.warning("executor_hangs", seconds=round(patience, 1))
                self._on_hang()


_GRACE_S = 1.0  # after the deadline, for the executor's own answer that it is late: it finishes its slice first


class ExecutorRequester:
    """Sends the requests of one gateway thread to the executor: one at a time, always with a deadline. Every request
    gets one answer, even if it was cancelled or is late, unless the executor is lost. Until the answer comes, the
    executor may hold the request's memory."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.handle = handle
        self.generation = handle.generation  # generation of the executor that received the last request
        self._pipe = handle.open_pipe()
        self._outstanding = False  # True while an answer is missing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()

    def repeat(self, like: queues.ProductRequest) -> queues.RepeatedProduct | None:
        """Return what computes products like that of a request, in this thread; None if there is no fast way."""
        return self._pipe.repeat(like)

    def require_present(self) -> None:
        """Raises `Refusal` BUSY while the executor restarts."""
        if not self.handle.present:
            self._give_up("the executor is being started again; ask again later")

    def send(self, message: queues.Envelope, payload: memoryview = queues.NOTHING) -> None:
        """Send a request. Call `receive` for its answer."""
        generation = self.handle.generation  # first: a pipe of an executor that has ended is never taken for a new one
        if self._outstanding or self.generation != generation:
            self._reconnect()
        self.generation = generation
        self._outstanding = True
        self._pipe.send(message, payload)

    def receive(self, *, deadline: float, tenant_left: Callable[[], bool] = lambda: False) -> queues.ExecutorAnswer:
        """Wait for the answer to the last request. The executor also checks the deadline, by `time.monotonic()`, and
        answers a late request without a product. A request whose tenant has left is cancelled. Raises `Refusal`: BUSY
        if the executor ended or did not answer in time; STOPPING if the provider stops."""
        cancelled = False
        while (answer := self._receive()) is None:
            if self._lost:
                self._reconnect()
                self._give_up("the executor was lost; ask again")
            if not cancelled and tenant_left():
                self.cancel()
                cancelled = True
            if time.monotonic() > deadline + _GRACE_S:
                self._give_up("the executor is late; ask again later")
        return answer

    def report(self, *, deadline: float) -> queues.ExecutorReport:
        """Ask the executor for a report. Raises what `receive` raises."""
        self.send(queues.ReportRequest())
        answer = self.receive(deadline=deadline - _GRACE_S)  # the executor sends no answer for a late report
        return msgspec.json.decode(answer.payload, type=queues.ExecutorReport)

    def settle(self) -> int:
        """Wait until the executor holds no memory of the last request: it has answered or ended. Returns the number of
        rows that it has multiplied."""
        while self._outstanding:
            if (answer := self._receive()) is not None:
                return answer.rows
            if self._lost:
                self._reconnect()
        return 0

    @property
    def _lost(self) -> bool:
        return self.handle.generation != self.generation or self.handle.stopping.is_set()

    def _receive(self) -> queues.ExecutorAnswer | None:
        answer = self._pipe.receive(WATCH_S)
        if answer is not None:
            self._outstanding = False
        return answer

    def cancel(self) -> None:
        """Cancel the last request. The executor still answers it, without a product."""
        self._pipe.send(queues.Cancel())

    def _give_up(self, detail: str) -> NoReturn:
        stopping = self.handle.stopping.is_set()
        raise Refusal(wire.ErrorCode.STOPPING if stopping else wire.ErrorCode.BUSY, detail)

    def _reconnect(self) -> None:
        # A late answer must not be mistaken for the answer to the next request: it is lost with its pipe.
        self._outstanding = False
        self._pipe.close()
        self._pipe = self.handle.open_pipe()
