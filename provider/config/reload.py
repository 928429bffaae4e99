"""Reloads files when they have changed, or on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from provider import logs

log = logs.EventLog(__name__)


class Reloader:
    """Calls `reload` in a thread of its own when files have changed and then held still for a look, or on `now`.

    Args:
        files: which files to look at; one that is missing has changed when it comes back.
        reload: reads them, all or nothing. What it raises is logged, and `succeeded` says so.
        interval_s: between two looks.
    """

    def __init__(
        self, files: Callable[[], Iterable[Path]], reload: Callable[[], None], *, interval_s: float = 0.5
    ) -> None:
        self._files = files
        self._reload = reload
        self._interval_s = interval_s
        self._said = threading.Event()
        self._closed = False
        self._succeeded = True
        self._seen = self._look()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    @property
    def succeeded(self) -> bool:
        """Returns True if the last reload succeeded, so that the settings in use are those of the files."""
        return self._succeeded

    def start(self) -> None:
        """Begin to watch the files."""
        self._thread.start()

    def now(self) -> None:
        """Reload soon, even if no file has changed. Safe in a signal handler."""
        self._said.set()

    def close(self, timeout: float) -> None:
        """Look no more; waits for a reload that is under way, but not for a file system that does not answer."""
        self._closed = True
        self._said.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        last = self._seen
        while True:
            said = self._said.wait(self._interval_s)
            if self._closed:
                return
            self._said.clear()
            found = self._look()
            if said or last == found != self._seen:  # otherwise a file may be half written
                self._seen = found
                self._try()
            last = found

    def _try(self) -> None:
        try:
            self._reload()
        except Exception as error:  # after any error the next change must still be noticed
            log.failure("reload_failed", error)
            self._succeeded = False
        else:
            self._succeeded = True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._files()))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
