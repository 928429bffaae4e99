"""Queues between the gateway's threads and the executor: in one process or over ZeroMQ.

Theory of operation. The executor has an `Inbox`. Each thread of the gateway has a `RequestChannel` to the inbox, sends
one `[envelope, payload]` at a time and receives one `ExecutorAnswer`. Within a process, messages are neither encoded
nor copied, and pass through a queue that does not release the GIL. (Every call of ZeroMQ releases the GIL: with sixteen
senders, the executor spent a fifth of its time waiting for the GIL.) An idle executor may let the sender's thread
compute the answer, so that no thread has to be woken (`set_inline_handler`). For a product of several senders, the
executor wakes one thread, which wakes the senders. (A thread that wakes another one may lose its core to it: with
sixteen senders, the executor spent a sixth of its time waking them.) Between processes, messages pass through a private
`ipc://` socket.
"""

import contextlib
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import zmq

from provider.executor import envelope
from provider.executor.envelope import Envelope
from symbiosis_priv.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]

_NOTHING = memoryview(b"")
_POSTS = "inproc://executor"  # carries the messages of `SocketInbox.post`
_LINGER_MS = 1000
_ROWS_BYTES = 4


def _do_nothing() -> None:
    pass


class InboxMessage(NamedTuple):
    """A message in an inbox, and the sender that gets the answer."""

    sender: Hashable
    envelope: Envelope
    payload: memoryview


class ExecutorAnswer(NamedTuple):
    """The executor's answer to one request.

    Args:
        failure: the frame of a `Failure`, ready for the wire; empty if there is a product.
        payload: the product, or a report.
        rows: number of rows that were multiplied: all rows of the request, or those before it was dropped.
        after: work of the executor that the receiver does after it has sent the answer, so that no tenant waits for it.
    """

    failure: bytes
    payload: memoryview
    rows: int
    after: Callable[[], None] = _do_nothing


AddressedAnswer = tuple[Hashable, ExecutorAnswer]
"""The sender of a request, and the answer to it."""
InlineHandler = Callable[[InboxMessage], bool]
"""Serves a message in the thread of its sender. Returns False if the message must be queued."""


class Inbox(ABC):
    """The executor's end of the queues.

    Only `post` can be called from any thread. The other methods belong to the executor's thread, or to the thread that
    runs the inline handler.
    """

    def set_inline_handler(self, handler: InlineHandler) -> None:  # noqa: B027 - only senders in this process can use it
        """Let senders in this process call `handler` before they queue a message."""

    @abstractmethod
    def arrived(self) -> Iterator[InboxMessage]:
        """Yield the messages that have arrived, without waiting."""

    @abstractmethod
    def wait(self, seconds: float | None) -> None:
        """Wait for a message for at most `seconds`; None waits without a limit."""

    @abstractmethod
    def answer(self, answers: Sequence[AddressedAnswer]) -> None:
        """Send answers to their senders. An answer is dropped if its sender has closed its channel."""

    @abstractmethod
    def post(self, message: Envelope) -> None:
        """Send a message that has no answer, from any thread of this process."""

    @abstractmethod
    def close(self) -> None:
        """Close the inbox, and drop the messages in it."""


class RequestChannel(ABC):
    """A sender's end of the queues."""

    @abstractmethod
    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        """Send a request, or cancel the last one. The answer may have arrived when this method returns."""

    @abstractmethod
    def receive(self, seconds: float) -> ExecutorAnswer | None:
        """Return the answer, or None if no answer arrives within `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """Close the channel. An answer that arrives later is dropped."""


class LocalInbox(Inbox):
    """The inbox of an executor in this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[InboxMessage] = queue.SimpleQueue()
        self._next: InboxMessage | None = None
        self._handler: InlineHandler = lambda _: False
        self._batches: queue.SimpleQueue[Sequence[AddressedAnswer]] = queue.SimpleQueue()
        self._deliverer = threading.Thread(target=self._run_deliveries, name="answers", daemon=True)
        self._deliverer.start()

    def set_inline_handler(self, handler: InlineHandler) -> None:
        self._handler = handler

    def open_channel(self) -> RequestChannel:
        return _LocalChannel(self)

    def deliver(self, message: InboxMessage) -> None:
        """Serve or queue a message, in the thread of its sender."""
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
        self._queue.put(InboxMessage(None, message, _NOTHING))

    def close(self) -> None:
        for _ in self.arrived():
            pass
        self._batches.put(())
        self._deliverer.join()

    def _run_deliveries(self) -> None:
        while answers := self._batches.get():
            _deliver(answers)
            del answers  # a sender may keep its own answer in memory only


class _Mailbox(queue.SimpleQueue[ExecutorAnswer]):
    pass


def _deliver(answers: Sequence[AddressedAnswer]) -> None:
    for sender, answer in answers:
        assert isinstance(sender, _Mailbox)
        sender.put(answer)


class _LocalChannel(RequestChannel):
    def __init__(self, inbox: LocalInbox) -> None:
        self._inbox = inbox
        self._mailbox = _Mailbox()

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        self._inbox.deliver(InboxMessage(self._mailbox, message, payload))

    def receive(self, seconds: float) -> ExecutorAnswer | None:
        try:
            return self._mailbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Does nothing: the mailbox is freed with its last reference."""


class SocketInbox(Inbox):
    """The inbox of an executor whose senders are in another process.

    Raises:
        ConfigError: the path cannot be used.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: Context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = _LINGER_MS
        try:
            for address in (endpoint, _POSTS):
                self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint = {endpoint!r}: {error.strerror}; choose another path") from error

    def arrived(self) -> Iterator[InboxMessage]:
        receive = self._router.recv  # part by part: `recv_multipart` and `send_multipart` take 5 µs longer
        while int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, head, payload = receive(), receive(), receive(copy=False)
            yield InboxMessage(sender, envelope.decode(head), payload.buffer)

    def wait(self, seconds: float | None) -> None:
        if not int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:  # ZeroMQ's timeouts are whole milliseconds: too long
            select.select([self._router.fileno()], [], [], seconds)

    def answer(self, answers: Sequence[AddressedAnswer]) -> None:
        for sender, answer in answers:
            assert isinstance(sender, bytes)
            self._router.send(sender, zmq.SNDMORE)
            self._router.send(answer.failure, zmq.SNDMORE)
            self._router.send(answer.rows.to_bytes(_ROWS_BYTES, "big"), zmq.SNDMORE)
            self._router.send(answer.payload, copy=False)

    def post(self, message: Envelope) -> None:
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as dealer:  # the inbox may be closed
            dealer.linger = _LINGER_MS
            dealer.connect(_POSTS)
            dealer.send(envelope.encode(message), zmq.SNDMORE)
            dealer.send(b"")

    def close(self) -> None:
        self._router.close()
        self._context.term()


class SocketChannel(RequestChannel):
    """A channel to an executor in another process."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.reconnect_ivl = 20
        self._dealer.connect(endpoint)
        self._arrival = select.poll()  # `select.select` takes no descriptor above 1023, and connections use more
        self._arrival.register(self._dealer.fileno(), select.POLLIN)

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        self._dealer.send(envelope.encode(message), zmq.SNDMORE)
        self._dealer.send(payload, copy=False)

    def receive(self, seconds: float) -> ExecutorAnswer | None:
        until = time.monotonic() + seconds
        while not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._arrival.poll(1000 * left)
        failure, rows = self._dealer.recv(), self._dealer.recv()
        return ExecutorAnswer(failure, self._dealer.recv(copy=False).buffer, int.from_bytes(rows, "big"))

    def close(self) -> None:
        self._dealer.close()
