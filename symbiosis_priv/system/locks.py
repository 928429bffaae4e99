"""Locks of open files and folders against other processes (`flock`). A lock ends with its descriptor or process."""

import fcntl
import time
from typing import Final

_POLL_S: Final = 0.05


def lock(descriptor: int, *, patience_s: float = 0.0) -> bool:
    """Lock an open file or folder. Waits at most `patience_s` seconds for another process that holds the lock.

    Returns:
        False if the other process still holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
