"""Notices that files have changed, or that somebody says so, and has them read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

_LOOK_S = 1.0


class Reloader:
    """Calls `reload` in a thread of its own when one of the files has changed, or on `now`.

    Args:
        files: that are looked at every second; one that is missing has changed when it comes back.
        reload: reads them; its errors are its own to report.
    """

    def __init__(self, files: Iterable[Path], reload: Callable[[], None]) -> None:
        self._files = tuple(files)
        self._reload = reload
        self._said = threading.Event()
        self._closed = False
        self._seen = self._look()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def now(self) -> None:
        """Reload soon, whatever the files look like. Safe in a signal handler."""
        self._said.set()

    def close(self) -> None:
        """Look no more; waits for a reload that is under way."""
        self._closed = True
        self._said.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            said = self._said.wait(_LOOK_S)
            if self._closed:
                return
            self._said.clear()
            found = self._look()
            if said or found != self._seen:
                self._seen = found
                self._reload()

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._files))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
