"""A background thread that does not delay the end of the program.

`concurrent.futures` joins its threads before any exit handler runs, and only after their queues are empty: requests to
a provider that is gone would keep a finished script alive until their deadlines. A plain daemon thread that is inside
torch when the interpreter exits aborts the process. A `Worker` is a daemon thread whose owner stops it, wakes what it
waits for, and joins it. `tenant.session.runtime` does so when a session is closed, and at exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from symbiosis_priv.errors import SymbiosisError

P = ParamSpec("P")
T = TypeVar("T")


class Promise(Future[T]):
    """A future that needs no lock once its result is there: a product asks several times for what came long before."""

    _kept: T | None = None

    def set_result(self, result: T) -> None:
        super().set_result(result)
        self._kept = result

    def done(self) -> bool:
        return self._kept is not None or super().done()

    def result(self, timeout: float | None = None) -> T:
        return super().result(timeout) if self._kept is None else self._kept

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(timeout) if self._kept is None else None


_Job = tuple[Promise[Any], Callable[[], Any]]


class Worker:
    """Runs one job after the other in a thread of its own, which starts with the first.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._started = self._stopped = False

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]:
        """Queue a job. Once the worker is stopped, the future fails with `SymbiosisError`."""
        future: Promise[T] = Promise()
        with self._lock:
            if self._stopped:
                _refuse(future)
                return future
            if not self._started:
                self._thread.start()
                self._started = True
            self._jobs.put((future, lambda: work(*args, **kwargs)))
        return future

    def stop(self) -> None:
        """Begin no further job; those that wait fail. Returns at once: see `join`."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the job in hand, after `stop`. Whether the thread is gone."""
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if self._stopped:
                _refuse(future)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # it is the caller's
                    future.set_exception(error)
            del job, future, work  # holds tensors


def _refuse(future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(SymbiosisError("this session is closed; load the model again"))
