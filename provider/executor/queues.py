"""How the gateway's threads reach the executor: by hand where it is a thread beside them, else by ZeroMQ.

Theory of operation. The executor has an `Inbox`, and each of the gateway's threads a `Line` to it with one question at
a time: `[envelope, payload]` there, an `Answer` back. In one process nothing is encoded or copied, and a message
is handed over in a queue that does not let go of the interpreter's lock. (Every call of ZeroMQ does, so an executor
that answered sixteen askers that way queued for the lock behind those whom it had just woken, for a fifth of its time.)
An executor that has nothing to do may have the asker's thread compute the answer, and nobody is woken at all (`lend`).
Between processes a message goes through a private `ipc://` socket.
"""

from __future__ import annotations

import contextlib
import queue
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import zmq

from provider.executor import envelope
from provider.executor.envelope import Envelope
from symbiosis_priv.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]

_NOTHING = memoryview(b"")
_POSTS = "inproc://executor"  # by which the process of a `SocketInbox` reaches its own
_LINGER_MS = 1000
_ROWS_BYTES = 4


class Message(NamedTuple):
    """What somebody has sent, and to whom the answer goes."""

    sender: Hashable
    envelope: Envelope
    payload: memoryview


class Answer(NamedTuple):
    """What the executor says.

    Args:
        head: prefix and header, ready for the wire.
        payload: what follows it.
        rows: of the request, that have been multiplied: all of them, or those before it was given up.
    """

    head: bytes
    payload: memoryview
    rows: int


Serve = Callable[[Message], bool]
"""Serve a message in the thread that brings it; False if it should be queued."""


class Inbox(ABC):
    """The executor's end. All but `post` belong to its thread, or to an asker's while that has its turn (`lend`)."""

    def lend(self, serve: Serve) -> None:  # noqa: B027 - not every kind has askers in this process
        """Have askers try this before they queue."""

    @abstractmethod
    def arrived(self) -> Iterator[Message]:
        """What has come, without waiting."""

    @abstractmethod
    def wait(self, seconds: float | None) -> None:
        """Until something has come, at most so long."""

    @abstractmethod
    def answer(self, sender: Hashable, answer: Answer) -> None:
        """Send an answer; one whose asker has gone is forgotten."""

    @abstractmethod
    def post(self, message: Envelope) -> None:
        """Say something from another thread of this process; nobody is answered."""

    @abstractmethod
    def close(self) -> None:
        """Nothing comes any more."""


class Line(ABC):
    """One asker's end."""

    @abstractmethod
    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        """Ask, or say that the answer is not wanted any more. The answer may be there when this returns."""

    @abstractmethod
    def receive(self, seconds: float) -> Answer | None:
        """The answer; None if it has not come within so many seconds."""

    @abstractmethod
    def close(self) -> None:
        """An answer that is still to come is forgotten."""


class LocalInbox(Inbox):
    """Of an executor in this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._next: Message | None = None
        self._serve: Serve = lambda _: False

    def lend(self, serve: Serve) -> None:
        self._serve = serve

    def line(self) -> Line:
        """A line to it."""
        return _LocalLine(self)

    def bring(self, message: Message) -> None:
        """From an asker's thread."""
        if not self._queue.empty() or not self._serve(message):
            self._queue.put(message)

    def arrived(self) -> Iterator[Message]:
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

    def answer(self, sender: Hashable, answer: Answer) -> None:
        assert isinstance(sender, _Mailbox)
        sender.put(answer)

    def post(self, message: Envelope) -> None:
        self._queue.put(Message(None, message, _NOTHING))

    def close(self) -> None:
        for _ in self.arrived():
            pass


class _Mailbox(queue.SimpleQueue[Answer]):
    pass


class _LocalLine(Line):
    def __init__(self, inbox: LocalInbox) -> None:
        self._inbox = inbox
        self._mailbox = _Mailbox()

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        self._inbox.bring(Message(self._mailbox, message, payload))

    def receive(self, seconds: float) -> Answer | None:
        try:
            return self._mailbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """The mailbox goes with whoever still knows it."""


class SocketInbox(Inbox):
    """Of an executor whose askers are in another process.

    Args:
        endpoint: `ipc://` path to listen at; ConfigError if that cannot be done.
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

    def arrived(self) -> Iterator[Message]:
        receive = self._router.recv  # part by part: `recv_multipart` takes 5 µs longer, and so does sending so
        while int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, head, payload = receive(), receive(), receive(copy=False)
            yield Message(sender, envelope.decode(head), payload.buffer)

    def wait(self, seconds: float | None) -> None:
        if not int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:  # its own timeouts are whole milliseconds: too long
            select.select([self._router.fileno()], [], [], seconds)

    def answer(self, sender: Hashable, answer: Answer) -> None:
        assert isinstance(sender, bytes)
        self._router.send(sender, zmq.SNDMORE)
        self._router.send(answer.head, zmq.SNDMORE)
        self._router.send(answer.rows.to_bytes(_ROWS_BYTES, "big"), zmq.SNDMORE)
        self._router.send(answer.payload, copy=False)

    def post(self, message: Envelope) -> None:
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as dealer:  # it may be closed by now
            dealer.linger = _LINGER_MS
            dealer.connect(_POSTS)
            dealer.send(envelope.encode(message), zmq.SNDMORE)
            dealer.send(b"")

    def close(self) -> None:
        self._router.close()
        self._context.term()


class SocketLine(Line):
    """To an executor in another process."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.reconnect_ivl = 20
        self._dealer.connect(endpoint)
        self._arrival = select.poll()  # `select.select` takes no descriptor from 1024 on, and strangers hold as many
        self._arrival.register(self._dealer.fileno(), select.POLLIN)

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        self._dealer.send(envelope.encode(message), zmq.SNDMORE)
        self._dealer.send(payload, copy=False)

    def receive(self, seconds: float) -> Answer | None:
        until = time.monotonic() + seconds
        while not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._arrival.poll(1000 * left)
        head, rows = self._dealer.recv(), self._dealer.recv()
        return Answer(head, self._dealer.recv(copy=False).buffer, int.from_bytes(rows, "big"))

    def close(self) -> None:
        self._dealer.close()
