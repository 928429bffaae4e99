"""Wait for what another thread or process makes true, and run threads and servers beside a test."""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

END_S = 120.0
"""Seconds in which a work beside a test must end. A fixture that waits for one without a limit is a test that hangs."""


def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true. The limit only ends a test that would hang."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s:g} s"
        time.sleep(0.01)


class _Beside(threading.Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)  # one that hangs must not keep the process
        self.work, self.outcome = work, Future[object]()

    def run(self) -> None:
        try:
            self.outcome.set_result(self.work())
        except BaseException as error:
            self.outcome.set_exception(error)

    def ended(self, deadline: float) -> None:
        self.join(max(0.0, deadline - time.monotonic()))
        if (frame := sys._current_frames().get(self.ident or 0)) and not self.outcome.done():
            where = " < ".join(f"{entry.filename}:{entry.lineno}" for entry in reversed(traceback.extract_stack(frame)))
            raise AssertionError(f"{self.work} has not ended: it is at {where}")


@contextlib.contextmanager
def beside(*works: Callable[[], object], over: threading.Event | None = None) -> Iterator[None]:
    """Run each work in a thread of its own. At the end of the block `over` is set; all must end, without an error."""
    running = [_Beside(work) for work in works]
    for each in running:
        each.start()
    try:
        yield
    finally:
        if over is not None:
            over.set()
        deadline = time.monotonic() + END_S
        for each in running:
            each.ended(deadline)
    for each in running:
        each.outcome.result(0)


@contextlib.contextmanager
def answering(server: Any) -> Iterator[None]:
    """Run a server of uvicorn beside the block."""
    with beside(server.run):
        try:
            until(lambda: server.started)
            yield
        finally:
            server.should_exit = True
