"""Ends a process when its parent has ended: the parent holds the other end of its stdin."""

import os
import threading
from collections.abc import Callable

_READ_BYTES = 4096


def when_stdin_closes(then: Callable[[], None]) -> None:
    """Call `then` in a background thread after stdin has closed. Returns immediately."""
    threading.Thread(target=_wait, args=(then,), name="parent-watch", daemon=True).start()


def _wait(then: Callable[[], None]) -> None:
    while os.read(0, _READ_BYTES):  # unbuffered: a thread inside sys.stdin would hold its lock when the process ends
        pass
    then()
