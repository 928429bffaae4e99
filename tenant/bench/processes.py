"""The processes of a benchmark: child processes that answer questions, and what processes cost.

    with Child("tenant", serve_tenant, setup) as tenant:
        costs = tenant.ask(Step(batch=4, tokens=128), timeout_s=60)

The function is a context manager that yields a handler. The child enters the context, reports that it is ready, and
calls the handler for every question. When the parent closes the pipe or ends, the child leaves the context and ends
too.

Children are forked from a server process (`multiprocessing`'s forkserver) that has imported the function's module once.
Questions and answers are pickled. That is safe because both ends are this program, and no other process has the pipe.

Processor time and memory are read from /proc.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from symbiosis_priv.errors import ConfigError, DeadlineExceededError, SymbiosisError

Q = TypeVar("Q")
A = TypeVar("A")

_START_S, _STOP_S = 900.0, 10.0
_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Child(Generic[Q, A]):
    """A process that answers questions, and a context manager that ends it. `name`: for messages. `serve`: a
    module-level function that returns the context manager."""

    def __init__(
        self, name: str, serve: Callable[..., AbstractContextManager[Callable[[Q], A]]], *arguments: object
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._name = name
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, arguments, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self._ready = False

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


def ask_all(children: Sequence[Child[Q, A]], question: Q, *, timeout_s: float) -> list[A]:
    """Ask several children at the same time, and return their answers. Raises what `Child.receive` raises."""
    for child in children:
        child.send(question)
    return [child.receive(timeout_s=timeout_s) for child in children]


def seconds_of(work: Callable[[], object]) -> float:
    """Do some work, and return how long it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _Answer(NamedTuple):
    value: Any
    failure: str = ""


def _run(
    serve: Callable[..., AbstractContextManager[Callable[[Any], Any]]],
    arguments: tuple[object, ...],
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    try:
        with serve(*arguments) as handle:
            pipe.send(_Answer(None))
            with contextlib.suppress(EOFError):
                while True:
                    pipe.send(_Answer(handle(pipe.recv())))
    except Exception as error:
        reason = str(error) if isinstance(error, SymbiosisError) else traceback.format_exc()
        with contextlib.suppress(OSError):  # the parent has ended
            pipe.send(_Answer(None, reason))


class Resources(NamedTuple):
    """Resources of some processes at one moment: number of processes, threads, open files and resident bytes."""

    processes: int
    threads: int
    files: int
    bytes: int


def check_supported() -> None:
    """Refuse a system without /proc. Raises `ConfigError`: this is not Linux."""
    if not (_PROC / "self" / "stat").exists():
        raise ConfigError("this benchmark reads other processes' costs from /proc; run it on Linux")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of processes and their living descendants."""
    return sum(sum(map(int, _stat(pid)[11:13])) * _TICK_S for pid in descendants(pids))


def peak_mib(pids: Iterable[int]) -> float:
    """Return the sum of the peak resident memory of each process and living descendant, in MiB."""
    kib = 0
    for pid in descendants(pids):
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").split("\n")
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kib / 1024


def memory_mib() -> float:
    """Return the sum of the proportional set sizes of all descendants of this process, in MiB: a page that several of
    them map counts once. Raises `ConfigError`: this user may not read it."""
    kib = 0
    for pid in descendants([os.getpid()]) - {os.getpid()}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            try:
                lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="utf-8").split("\n")
            except PermissionError as error:
                raise ConfigError("the memory of a tenant with a session is closed to its user: run as root") from error
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def resources(pids: Iterable[int]) -> Resources:
    """Return the resources of processes and their living descendants."""
    members = descendants(pids)
    threads = files = pages = 0
    for pid in members:
        with contextlib.suppress(OSError):
            folder = _PROC / str(pid)
            pages += int((folder / "statm").read_text().split()[1])
            threads += len(list((folder / "task").iterdir()))
            files += len(list((folder / "fd").iterdir()))
    return Resources(len(members), threads, files, pages * os.sysconf("SC_PAGE_SIZE"))


def descendants(pids: Iterable[int]) -> set[int]:
    """Return the ids of processes and their living descendants."""
    parents = {int(path.name): int(stat[1]) for path in _PROC.glob("[0-9]*") if (stat := _stat(int(path.name)))}
    found = {pid for pid in pids if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def lower_own_priority(nice: int) -> None:
    """Lower the priority of this process and its children, so that they use only CPU time that other processes leave.

    Linux divides cores among sessions first, and within a session by priority (`autogroup` in sched(7)). So this
    process starts its own session.
    """
    os.setsid()
    os.nice(nice)
    with contextlib.suppress(OSError):  # the system has no autogroups
        (_PROC / "self" / "autogroup").write_text(str(nice))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list if the process has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
