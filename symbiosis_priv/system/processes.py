"""The end of a process: with its parent, or faster than Python ends it.

Python collects garbage once more at exit. Importing torch, transformers and peft makes a million objects, so this last
collection takes a third of the start and end of such a process, although the system frees the memory anyway. Garbage
collection is normal until then, because garbage may hold a large tensor.
"""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def when_stdin_closes(then: Callable[[], None]) -> None:
    """Call `then` in a background thread after stdin has closed. Returns immediately."""

    def wait() -> None:
        while os.read(0, 4096):  # unbuffered: a thread inside sys.stdin would hold its lock when the process ends
            pass
        then()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_quickly() -> None:
    """Skip the last garbage collection of this process."""
    atexit.register(gc.freeze)


def end_now() -> NoReturn:
    """End this process with status 0, without Python's own end. There, Python ends daemon threads that are in torch's
    code, and C++ then aborts the process ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
