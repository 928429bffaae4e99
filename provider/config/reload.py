"""Reloads files when they have changed, or on request."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from provider import logs

log = logs.EventLog(__name__)


class Reloader:
    """Calls `reload` in its own thread: after files have changed and then stayed unchanged between two checks, or on
    `request`.

    Args:
        files: returns the files to check. A missing file counts as changed when it exists again.
        reload: reads the files, all or nothing. Its exceptions are logged, and set `succeeded` to False.
    """

    def __init__(
        self, files: Callable[[], Iterable[Path]], reload: Callable[[], None], *, interval_s: float = 0.5
    ) -> None:
        self._files = files
        self._reload = reload
        self._interval_s = interval_s
        self._requested = threading.Event()
        self._closed = False
        self._succeeded = True
        self._seen = self._stamps()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    @property
    def succeeded(self) -> bool:
        """True if the last reload succeeded, so that the settings in use are those of the files."""
        return self._succeeded

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Reload soon, even if no file has changed. Safe in a signal handler."""
        self._requested.set()

    def close(self, timeout: float) -> None:
        """Stop checking. Waits up to `timeout` seconds for a reload in progress, in case a file system does not
        answer."""
        self._closed = True
        self._requested.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        last = self._seen
        while True:
            requested = self._requested.wait(self._interval_s)
            if self._closed:
                return
            self._requested.clear()
            found = self._stamps()
            if requested or last == found != self._seen:  # otherwise a file may be half written
                self._seen = found
                try:
                    self._reload()
                    self._succeeded = True
                except Exception as error:  # after any error the next change must still be noticed
                    log.failure("reload_failed", error)
                    self._succeeded = False
            last = found

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._files()))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
