"""The end of a process: with its parent, or faster than Python ends it.

Python collects garbage once more at exit. Importing torch, transformers and peft makes a million objects, so this last
collection takes a third of the start and end of such a process, although the system frees the memory anyway. Garbage
collection is normal until then, because garbage may hold a large tensor.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends, also while this process is stopped or
    waits in a library (Linux). Call `when_stdin_closes`, too: it notices an end before this call, and other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
