"""Runs functions in child processes that answer their parent's questions. All benchmarks use this protocol.

    with Child("tenant", serve_tenant, setup) as tenant:
        costs = tenant.ask(Step(batch=4, tokens=128), timeout_s=60)

The function is a context manager that yields a handler. The child enters the context, reports that it is ready, and
calls the handler for every question. When the parent closes the pipe or ends, the child leaves the context and ends
too.

Children are forked from a server process (`multiprocessing`'s forkserver) that has imported the function's module once.
Questions and answers are pickled. That is safe because both ends are this program, and no other process has the pipe.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError

Q = TypeVar("Q")
A = TypeVar("A")

_START_S, _STOP_S = 900.0, 10.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2) and setns(2)


class Child(Generic[Q, A]):
    """A process that answers questions. A context manager that ends the process.

    Args:
        name: name of the child for messages.
        serve: module-level function that returns the context manager.
        network: network namespace of the child, as a file in /proc; None for the parent's.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[..., AbstractContextManager[Callable[[Q], A]]],
        *arguments: object,
        network: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._name = name
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, arguments, child_end, network), daemon=True)
        self._process.start()
        child_end.close()
        self._ready = False

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None, "the process has been started"
        return self._process.pid

    def wait_ready(self) -> Self:
        """Return once the child has entered its context. Raises what `receive` raises."""
        if not self._ready:
            self._ready = True
            self.receive(timeout_s=_START_S)
        return self

    def ask(self, question: Q, *, timeout_s: float) -> A:
        """Send a question and return the answer. Raises what `receive` raises."""
        self.send(question)
        return self.receive(timeout_s=timeout_s)

    def send(self, question: Q) -> None:
        """Send a question without waiting for the answer."""
        self.wait_ready()
        with contextlib.suppress(BrokenPipeError):  # `receive` raises the child's error
            self._pipe.send(question)

    def receive(self, *, timeout_s: float) -> A:
        """Return the answer to the last question.

        Raises:
            DeadlineExceededError: the answer is late.
            SymbiosisError: the child has failed; the message quotes its error.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise DeadlineExceededError(f"no answer from {self._name!r} within {timeout_s:g} s")
            answer: _Answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_STOP_S)
            answer = _Answer(None, f"exit status {self._process.exitcode}")
        if answer.failure:
            raise SymbiosisError(f"{self._name!r} has ended: {answer.failure}")
        value: A = answer.value
        return value

    def close(self, *, grace_s: float = _STOP_S) -> None:
        """End the child. It is killed if it does not leave its context within `grace_s` seconds."""
        self._pipe.close()
        self._process.join(grace_s)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Answer(NamedTuple):
    value: Any
    failure: str = ""


def _run(
    serve: Callable[..., AbstractContextManager[Callable[[Any], Any]]],
    arguments: tuple[object, ...],
    pipe: Connection,
    network: Path | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    try:
        if network is not None:
            _enter_network(network)
        with serve(*arguments) as handle:
            pipe.send(_Answer(None))
            with contextlib.suppress(EOFError):
                while True:
                    pipe.send(_Answer(handle(pipe.recv())))
    except SymbiosisError as error:
        _fail(pipe, str(error))
    except Exception:
        _fail(pipe, traceback.format_exc())


def _fail(pipe: Connection, reason: str) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        pipe.send(_Answer(None, reason))


def _enter_network(namespace: Path) -> None:
    with namespace.open() as file:
        _check_call(ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK), "setns")


def leave_network() -> None:
    """Move this process into a new network namespace, which lasts as long as the process.

    Raises:
        OSError: this user or this system cannot make a namespace.
    """
    _check_call(ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK), "unshare")


def _check_call(result: int, name: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
