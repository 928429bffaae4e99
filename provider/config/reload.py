"""Reloads files when they have changed, or on request."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from provider import logs
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

_AT_LEAST_EVERY_S = 86_400.0


class Reloader:
    """Calls `reload` in its own thread: after one of `files()` has changed and then stayed unchanged between two
    checks, on `request`, and once a day, so that the log warns of certificates that expire soon. A
    missing file counts as changed when it exists again. An exception of `reload` sets `succeeded` to False, and
    `reload` is called again at every check until it succeeds. An error is logged when it is new."""

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        reload: Callable[[], None],
        *,
        interval_s: float = 0.5,
    ) -> None:
        self._files = files
        self._reload = reload
        self._requested = False
        self._last_reload = time.monotonic()
        self._error = ""  # of the last reload
        self.succeeded = True  # true if the last reload succeeded, so that the settings in use are those of the files
        self._seen = self._last = self._stamps()
        self.periodic = Periodic(self._check, every_s=interval_s, name="reload")

    def request(self) -> None:
        """Reload soon, even if no file has changed. Safe in a signal handler."""
        self._requested = True
        self.periodic.wake()

    def _check(self) -> None:
        requested, self._requested = self._requested, False
        requested |= time.monotonic() - self._last_reload > _AT_LEAST_EVERY_S
        found = self._stamps()
        stable = self._last == found  # otherwise a file may be half written
        if requested or (stable and (found != self._seen or not self.succeeded)):
            self._seen, self._last_reload = found, time.monotonic()
            try:
                self._reload()
            except Exception as error:  # after any error the next change must still be noticed
                if repr(error) != self._error:
                    log.failure("reload_failed", error)
                self._error, self.succeeded = repr(error), False
            else:
                self._error, self.succeeded = "", True
        self._last = found

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._files():
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)
