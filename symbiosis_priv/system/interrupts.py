"""Ctrl-C and SIGTERM as exceptions that do not interrupt a critical section.

A signal can raise an exception between any two instructions, for example in the middle of an optimizer step or of a
write. `whole()` delays the exception until its block ends, and `anywhere()` inside that block allows it again. A second
signal is never delayed.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

from symbiosis_priv.display import terminal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context manager. Inside it, SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143). Outside the
    main thread it does nothing, because Python delivers signals to the main thread only."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._deferring = False
        self._pending: int | None = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Delay the exception until this block has ended."""
        with self._set_deferring(True):
            yield
        self._raise_pending()

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Inside `whole`, allow the exception again in this block."""
        with self._set_deferring(False):
            self._raise_pending()
            yield

    @contextmanager
    def _set_deferring(self, value: bool) -> Iterator[None]:
        before, self._deferring = self._deferring, value
        try:
            yield
        finally:
            self._deferring = before

    def _raise_pending(self) -> None:
        number, self._pending = self._pending, None
        if number is not None:
            _raise(number)

    def __enter__(self) -> Self:
        def arrived(number: int, frame: FrameType | None) -> None:
            if not self._deferring or self._pending is not None:
                _raise(number)
            self._pending = number

        if threading.current_thread() is threading.main_thread():
            # SIGINT is ignored: nohup, `cmd &`
            heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, arrived) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def set_on_signals(event: threading.Event, *, starting: Callable[[], bool] = lambda: False) -> Callable[..., None]:
    """Let SIGINT and SIGTERM set an event, and raise KeyboardInterrupt while a server is `starting`. Returns a
    handler."""

    def arrived(*_: object) -> None:
        event.set()
        if starting():
            raise KeyboardInterrupt

    for number in _SIGNALS:
        signal.signal(number, arrived)
    return arrived


@contextmanager
def importing() -> Iterator[None]:
    """Context manager: a `whole` block of imports, in which libraries may catch the exception of a signal."""
    with Interrupts() as interrupts:
        try:
            with interrupts.whole():
                yield
        except Exception:  # perhaps of a library that has caught a second signal
            interrupts._raise_pending()
            raise


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Context manager: `importing`, announced on stderr as "loading `what`"."""
    with terminal.working(f"loading {what}"), importing():
        yield


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
