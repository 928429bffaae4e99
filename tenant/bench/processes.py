"""The processes of a benchmark: child processes that answer questions, and what processes cost.

    with Child("tenant", serve_tenant, setup) as tenant:
        costs = tenant.ask(Step(batch=4, tokens=128), timeout_s=60)

Children are forked from a server process (`multiprocessing`'s forkserver) that has imported the function's module once.
Questions and answers are pickled. That is safe because both ends are this program, and no other process has the pipe.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import psutil

from symbiosis_priv.errors import ConfigError, DeadlineExceededError, SymbiosisError

Q = TypeVar("Q")
A = TypeVar("A")

_START_S, _STOP_S = 900.0, 10.0


class Child(Generic[Q, A]):
    """A process that answers questions, and a context manager that ends it. `name`: for messages. `serve`: a
    module-level function that returns a context manager, which the child enters. It yields a handler of questions. When
    the parent closes the pipe or ends, the child leaves it and ends too."""

    def __init__(
        self, name: str, serve: Callable[..., AbstractContextManager[Callable[[Q], A]]], *arguments: object
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._name, self._ready = name, False
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, arguments, child_end), daemon=True)
        self._process.start()
        child_end.close()

    @property
    def pid(self) -> int:
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
        """Return the answer to the last question. Raises `DeadlineExceededError`: the answer is late; `SymbiosisError`:
        the child has failed; the message quotes its error."""
        answer: A
        try:
            if not self._pipe.poll(timeout_s):
                raise DeadlineExceededError(f"no answer from {self._name!r} within {timeout_s:g} s")
            answer, failure = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_STOP_S)
            raise SymbiosisError(f"{self._name!r} has ended: exit status {self._process.exitcode}") from error
        if failure:
            raise SymbiosisError(f"{self._name!r} has ended: {failure}")
        return answer

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


def ask_all(children: Sequence[Child[Q, A]], question: Q, *, timeout_s: float) -> list[A]:
    """Ask several children at the same time, and return their answers. Raises what `Child.receive` raises."""
    for child in children:
        child.send(question)
    return [child.receive(timeout_s=timeout_s) for child in children]


def _run(
    serve: Callable[..., AbstractContextManager[Callable[[Any], Any]]],
    arguments: tuple[object, ...],
    pipe: Connection,
) -> None:
    """The child: sends pairs of an answer and a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    try:
        with serve(*arguments) as handle:
            pipe.send((None, ""))
            with contextlib.suppress(EOFError):
                while True:
                    pipe.send((handle(pipe.recv()), ""))
    except Exception as error:
        reason = str(error) if isinstance(error, SymbiosisError) else traceback.format_exc()
        with contextlib.suppress(OSError):  # the parent has ended
            pipe.send((None, reason))


def seconds_of(work: Callable[[], object]) -> float:
    """Do some work, and return how long it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Resources(NamedTuple):
    """Threads, open files and resident bytes of some processes at one moment."""

    threads: int
    files: int
    bytes: int


def check_supported() -> None:
    """Refuse a system without /proc. Raises `ConfigError`: this is not Linux."""
    if not psutil.LINUX:
        raise ConfigError("this benchmark reads other processes' costs from /proc; run it on Linux")


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and its living descendants."""
    return _sum(pid, lambda process: sum(process.cpu_times()[:2]))


def peak_mib(pid: int) -> float:
    """Return the sum of the peak resident memory of a process and each living descendant, in MiB."""

    def kib(process: psutil.Process) -> float:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace").split("\n")
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

    return _sum(pid, kib) / 1024


def memory_mib() -> float:
    """Return the sum of the proportional set sizes of all descendants of this process, in MiB: a page that several of
    them map counts once. Raises `ConfigError`: this user may not read it."""
    own = os.getpid()
    try:
        return _sum(own, lambda process: process.memory_full_info().pss * (process.pid != own)) / 2**20
    except psutil.AccessDenied as error:
        raise ConfigError("the memory of a tenant with a session is closed to its user: run as root") from error


def resources(pid: int) -> Resources:
    """Return the resources of a process and its living descendants."""
    figures = (psutil.Process.num_threads, psutil.Process.num_fds, lambda process: process.memory_info().rss)
    return Resources(*(int(_sum(pid, figure)) for figure in figures))


def _sum(pid: int, figure: Callable[[psutil.Process], float]) -> float:
    """Return the sum of a figure of a process and its living descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                total += figure(one)
    return total
