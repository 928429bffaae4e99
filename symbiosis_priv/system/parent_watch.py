"""A process ends with whoever holds the other end of its stdin, however that one ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

_READ_BYTES = 4096


def when_stdin_closes(then: Callable[[], None]) -> None:
    """Have it called once stdin has closed, in a thread of its own; returns at once."""
    threading.Thread(target=_wait, args=(then,), name="lifeline", daemon=True).start()


def _wait(then: Callable[[], None]) -> None:
    while os.read(0, _READ_BYTES):  # unbuffered: a thread inside sys.stdin would hold its lock when the process ends
        pass
    then()
