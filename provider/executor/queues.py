"""Messages between the gateway's threads and the executor, and their queues in one process.

Every `ProductRequest` gets exactly one answer: the product, or a `Failure` if the request was cancelled, late or
failed. When the answer arrives, the executor holds no memory of the request any more.

Theory of operation. The executor has an `Inbox`. Each thread of the gateway has a `RequestPipe` to the inbox, sends
one `[envelope, payload]` at a time and receives one `ExecutorAnswer`. Within a process, messages are neither encoded
nor copied, and pass through a queue that does not release the GIL. An idle executor may let the sender's thread compute
the answer, so that no thread has to be woken (`set_inline_handler`). For a product of several senders, the executor
wakes one thread, which wakes the senders (docs/adr/9-lane.md). Between processes, messages pass through a private
`ipc://` socket (`supervisor`).
"""

import bisect
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, get_args

import msgspec
from torch import Tensor

from provider import logs
from provider.fairness import RoundRobin
from provider.scheduler.jobs import J, Stage
from symbiosis_priv.arithmetic.ring import FORWARD, Widths
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)

_KEYSTREAM_COST = 50  # multiply-adds that take as long as one keystream word
_FEW_ROWS = 16  # a forward request of more rows is fine-tuning
_STEP_S = 60.0  # a tenant that has sent no backward request for this time has stopped training


class ProductRequest(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """A tenant's request for a product. The last byte arrived at `arrival`, and the gateway ignores the answer after
    `deadline`, both by `time.monotonic()`, which all processes of a machine share. The request was checked against
    model, shapes and limits."""

    tenant: TenantIdentity
    stage: Stage
    weight: float  # in fair sharing
    arrival: float
    deadline: float
    request: wire.Execute | wire.Effect
    narrow: bool = False  # rows and their product are as on the wire (`wire.RING24`), and not in 32 bits


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The tenant has left: the executor should answer the sender's request now, without a product."""


class ReportRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for an `ExecutorReport`, which is the answer's payload."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Wakes the executor's thread: keystream rows are ready, or the thread would sleep for too long."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ask the executor to answer all requests that have arrived, and to end."""


class Histogram(msgspec.Struct, kw_only=True):
    """Counts of observed values: one count per upper bound in `bounds`, and a last one for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


_SECOND_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class ExecutorReport(msgspec.Struct, kw_only=True):
    """Statistics of an executor since its start: layer groups that are served, and those in memory; requests that were
    answered without a product, because they were late, cancelled or failed; rows and requests per product; and the
    seconds from a request's arrival to its first product."""

    first_group: int
    groups: int
    groups_loaded: int = 0
    resident: int = 0  # memory of the executor's process, in bytes
    waiting: dict[Stage, int] = {}
    late: int = 0
    cancelled: int = 0
    failed: int = 0
    uptime: float = 0.0  # seconds since the start
    idle: float = 0.0  # seconds without work
    seconds: float = 0.0  # in products; the rest of the uptime was spent on receiving, batching and answering
    rows_by_group: list[int] = []  # from `first_group` on
    batch_rows: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=tuple(4.0**n for n in range(8))))
    batch_requests: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=tuple(2.0**n for n in range(8))))
    waits: dict[Stage, Histogram] = msgspec.field(
        default_factory=lambda: {stage: Histogram(bounds=_SECOND_BOUNDS) for stage in get_args(Stage)}
    )


Envelope = ProductRequest | Cancel | ReportRequest | Wake | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Envelope).decode


class Stages:
    """Tells inference from fine-tuning. Thread-safe. The stage is found per tenant and not per connection: a tenant
    that sends forward requests on one connection and backward requests on another is fine-tuning."""

    def __init__(self) -> None:
        self._last_backward: dict[TenantIdentity, float] = {}

    def of(self, tenant: TenantIdentity, request: wire.Execute | wire.Effect, now: float) -> Stage:
        """The stage of a request that arrives `now`. A forward request of up to 16 rows is inference, unless
        its tenant has sent a backward request within the last minute."""
        if request.direction != FORWARD:
            self._last_backward[tenant] = now
        trains = now - self._last_backward.get(tenant, -math.inf) <= _STEP_S
        return "fine_tuning" if trains or request.rows > _FEW_ROWS else "inference"


def row_load(request: type[wire.Binding], columns: Widths) -> tuple[int, int]:
    """The multiply-adds of one row's product, and the multiply-adds that the row costs: an effect's row includes its
    keystream."""
    inputs, outputs = columns
    work = inputs * outputs
    return work, work + (_KEYSTREAM_COST * inputs if request is wire.Effect else 0)


NOTHING = memoryview(b"")


class InboxMessage(NamedTuple):
    """A message in an inbox, and the sender that gets the answer."""

    sender: Hashable
    envelope: Envelope
    payload: memoryview


class ExecutorAnswer(NamedTuple):
    """The executor's answer to one request."""

    failure: bytes  # the frame of a `Failure`, ready for the wire; empty if there is a product
    payload: memoryview  # the product, or a report
    rows: int  # number of rows that were multiplied: all rows of the request, or those before it was dropped
    after: Callable[[], None] = lambda: None
    """Work of the executor that the receiver does after it has sent the answer, so that no tenant waits for it."""


AddressedAnswer = tuple[Hashable, ExecutorAnswer]  # the sender of a request, and the answer to it
InlineHandler = Callable[[InboxMessage], bool]
"""Serves a message in the thread of its sender. Returns False if the message must be queued."""


class RepeatedProduct(NamedTuple):
    """Computes products like one that the executor has accepted, in the thread of their sender."""

    multiply: Callable[[float, int, int], bool]
    """Compute a product at once. Returns False if the request must be sent to the executor, which is busy, or for which
    others wait; nothing has then changed. The arguments are the arrival, as of a `ProductRequest`, and the addresses of
    the request's payload and of memory for the answer's."""
    after: Callable[[], None]
    """Do the executor's work that the answer need not wait for. Call it after the answer was sent."""


Repeat = Callable[[ProductRequest], RepeatedProduct | None]
"""Returns what computes products like that of a request; None if there is no fast way."""


class Inbox(ABC):
    """The executor's end of the queues. Only `post` can be called from any thread; the other methods belong to the
    executor's thread, or to the thread that runs the inline handler."""

    @property
    def is_empty(self) -> bool:
        """True if no message waits."""
        return False

    def set_inline_handler(  # noqa: B027 - only senders in this process can use it
        self, handler: InlineHandler, repeat: Repeat = lambda _: None
    ) -> None:
        """Let senders in this process call `handler` before they queue a message, and `repeat` for known requests."""

    @abstractmethod
    def arrived(self) -> Iterator[InboxMessage]:
        """Yield the messages that have arrived, without waiting."""

    @abstractmethod
    def wait(self, seconds: float | None) -> None:
        """Wait for a message for at most `seconds`; None waits without a limit."""

    @abstractmethod
    def answer(self, answers: Sequence[AddressedAnswer]) -> None:
        """Send answers to their senders. An answer is dropped if its sender has closed its pipe."""

    @abstractmethod
    def post(self, message: Envelope) -> None:
        """Send a message that has no answer, from any thread of this process."""

    @abstractmethod
    def close(self) -> None:
        """Close the inbox, and drop the messages in it."""


class RequestPipe(ABC):
    """A sender's end of the queues."""

    @abstractmethod
    def send(self, message: Envelope, payload: memoryview = NOTHING) -> None:
        """Send a request, or cancel the last one. The answer may have arrived when this method returns."""

    def repeat(self, like: ProductRequest) -> RepeatedProduct | None:
        """Return what computes products like that of a request at once; None if the pipe has no fast way."""
        return None

    @abstractmethod
    def receive(self, seconds: float) -> ExecutorAnswer | None:
        """Return the answer, or None if no answer arrives within `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """Close the pipe. An answer that arrives later is dropped."""


class LocalInbox(Inbox):
    """The inbox of an executor in this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[InboxMessage] = queue.SimpleQueue()
        self._next: InboxMessage | None = None
        self._handler: InlineHandler = lambda _: False
        self.repeat: Repeat = lambda _: None
        self._batches: queue.SimpleQueue[Sequence[AddressedAnswer]] = queue.SimpleQueue()
        self._deliverer = threading.Thread(target=self._run_deliveries, name="answers", daemon=True)
        self._deliverer.start()

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def set_inline_handler(self, handler: InlineHandler, repeat: Repeat = lambda _: None) -> None:
        self._handler, self.repeat = handler, repeat

    def open_pipe(self) -> RequestPipe:
        return LocalPipe(self)

    def deliver(self, message: InboxMessage) -> None:
        if not self._queue.empty() or not self._handler(message):
            self._queue.put(message)

    def arrived(self) -> Iterator[InboxMessage]:
        if (message := self._next) is not None:
            self._next = None
            yield message
        while True:
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return

    def wait(self, seconds: float | None) -> None:
        if self._next is None:
            try:
                self._next = self._queue.get(timeout=seconds)
            except queue.Empty:
                return

    def answer(self, answers: Sequence[AddressedAnswer]) -> None:
        if len(answers) == 1:  # waking its sender takes no longer than waking the other thread
            _deliver(answers)
        else:
            self._batches.put(answers)

    def post(self, message: Envelope) -> None:
        self._queue.put(InboxMessage(None, message, NOTHING))

    def close(self) -> None:
        for _ in self.arrived():
            pass
        self._batches.put(())
        self._deliverer.join()

    def _run_deliveries(self) -> None:
        while answers := self._batches.get():
            for answer in answers:
                try:
                    _deliver([answer])
                except Exception as error:  # the other senders wait, and later ones
                    log.failure("answer_not_delivered", error)
            del answers, answer  # a sender may keep its own answer in memory only


def _deliver(answers: Sequence[AddressedAnswer]) -> None:
    for sender, answer in answers:
        assert isinstance(sender, LocalPipe)
        sender.put(answer)


class LocalPipe(RequestPipe):
    """A pipe to an executor in this process. It is freed with its last reference, and a late answer with it."""

    def __init__(self, inbox: LocalInbox) -> None:
        self._inbox = inbox
        self._answers: queue.SimpleQueue[ExecutorAnswer] = queue.SimpleQueue()

    def put(self, answer: ExecutorAnswer) -> None:
        """Take the answer, from any thread."""
        self._answers.put(answer)

    def send(self, message: Envelope, payload: memoryview = NOTHING) -> None:
        self._inbox.deliver(InboxMessage(self, message, payload))

    def repeat(self, like: ProductRequest) -> RepeatedProduct | None:
        return self._inbox.repeat(like)

    def receive(self, seconds: float) -> ExecutorAnswer | None:
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        pass


class KeystreamMaker(Generic[J]):
    """Makes slices of keystreams in a thread of its own, so that products do not wait for them. Serves tenants in
    round-robin order, one slice at a time: a small effect does not wait for another tenant's large effect. `wake` is
    called in this thread after each slice."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._ordered: RoundRobin[tuple[J, Callable[[], Tensor]]] = RoundRobin()  # by tenant
        self._made: deque[tuple[J, Tensor | Exception]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="keystream", daemon=True)
        self._thread.start()

    def order(self, job: J, make: Callable[[], Tensor]) -> None:
        """Queue a slice of a job. `made` returns the job with the result of `make`, or with its exception; nothing if
        the job has left before its turn."""
        with self._changed:
            self._ordered.put(job.tenant, (job, make))
            self._changed.notify()

    def made(self) -> list[tuple[J, Tensor | Exception]]:
        """The slices made since the last call: the job, with int32 `[rows, inputs]` or an exception."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def close(self) -> None:
        """Finish the current slice, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ordered and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job, make = self._ordered.get()
            if job.left:
                continue
            try:
                outcome: Tensor | Exception = make()
            except Exception as error:  # the executor answers the request with a failure
                outcome = error
            self._made.append((job, outcome))
            del job, make, outcome  # frees the memory before the thread waits
            try:
                self._wake()
            except Exception as error:  # the next slice wakes the executor
                log.failure("executor_not_woken", error)
