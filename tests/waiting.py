"""Wait for what another thread or process makes true, and run threads and servers beside a test."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true. The limit only ends a test that would hang."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s:g} s"
        time.sleep(0.01)


@contextlib.contextmanager
def beside(*works: Callable[[], object], over: threading.Event | None = None) -> Iterator[None]:
    """Run each work in a thread of its own. At the end of the block `over` is set; all must end, without an error."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        try:
            yield
        finally:
            if over is not None:
                over.set()
    for each in running:
        each.result()


@contextlib.contextmanager
def answering(server: Any) -> Iterator[None]:
    """Run a server of uvicorn beside the block."""
    with beside(server.run):
        try:
            until(lambda: server.started)
            yield
        finally:
            server.should_exit = True
