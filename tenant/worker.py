"""A background thread that does not delay the end of the program.

`concurrent.futures` joins its threads before exit handlers run, and only after their queues are empty. So requests to a
lost provider would keep a finished script alive until their deadlines. A plain daemon thread that runs torch code while
the interpreter exits aborts the process. A `Worker` is a daemon thread that its owner stops and joins, after ending the
requests that the thread waits for. `tenant.session.runtime` does so when a session is closed, and at exit.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from symbiosis_priv.errors import SymbiosisError

P = ParamSpec("P")
T = TypeVar("T")


class Promise(Future[T]):
    """A future that takes no lock once it has a result, because products read results several times. `kept`: the
    result; None if there is none yet, or if the result is None."""

    kept: T | None = None

    def set_result(self, result: T) -> None:
        super().set_result(result)
        self.kept = result

    def done(self) -> bool:
        return self.kept is not None or super().done()

    def result(self, timeout: float | None = None) -> T:
        return super().result(timeout) if self.kept is None else self.kept

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(timeout) if self.kept is None else None


_Job = tuple[Promise[Any], Callable[[], Any]]


class Worker:
    """Runs jobs one after the other in its own thread, which starts with the first job. `unfinished`: number of jobs
    that are queued or running."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._started = self._stopped = False
        self.unfinished = 0

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]:
        """Queue a job. If the worker is stopped before the job starts, the future fails with `SymbiosisError`."""
        future: Promise[T] = Promise()
        with self._lock:
            if self._stopped:
                _refuse(future)
                return future
            if not self._started:
                self._thread.start()
                self._started = True
            self.unfinished += 1
            self._jobs.put((future, lambda: work(*args, **kwargs)))
        return future

    def stop(self) -> None:
        """Stop after the current job; queued jobs fail. Returns at once; see `join`."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """After `stop`, wait up to `timeout` seconds for the current job. Returns True if the thread has ended."""
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
                except BaseException as error:  # `result` raises it in the caller's thread
                    future.set_exception(error)
            with self._lock:
                self.unfinished -= 1
            del job, future, work  # free their tensors before the next wait


def _refuse(future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(SymbiosisError("this session is closed; load the model again"))
