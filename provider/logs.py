"""Structured logs: one JSON object per line, about events and never about content.

A line may name a tenant, a layer group, a direction, a row count and a duration. Payloads, seeds, nonces and headers
cannot get into a line: callers pass named fields, and exceptions are logged by type and place, not by message.
"""

import json
import logging
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from symbiosis_priv.errors import CertificateError, CheckpointError, ConfigError

Field = str | int | float | None

_LINES_A_SECOND = 5
_FIELDS = "symbiosis_priv_fields"


class JsonLines(logging.Formatter):
    """Renders a record as one line of JSON. A message of other code is a field, because an `event` is a word: the
    record's attribute `event`, or "message"."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = record.getMessage(), getattr(record, _FIELDS, None)
        if fields is None:
            event, fields = getattr(record, "event", "message"), {"message": event}
        line: dict[str, Field] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        return json.dumps(line | fields)


def setup(level: str) -> None:
    """Send this process's logs to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("provider", "symbiosis_priv"):
        logging.getLogger(package).setLevel(level.upper())


def announce(event: str, **fields: Field) -> None:
    """Print an event to stdout as a line of the log, for programs that wait for it."""
    record = logging.makeLogRecord({"name": "provider", "levelname": "INFO", "msg": event, _FIELDS: fields})
    sys.stdout.write(JsonLines().format(record) + "\n")  # in one piece: ranks share stdout
    sys.stdout.flush()


class EventLog:
    """A logger of events with named fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        # for `often`: start of the current second, lines since then, suppressed lines
        self._often: dict[str, tuple[float, int, int]] = {}
        self._lock = threading.Lock()

    @property
    def detailed(self) -> bool:
        """Returns True if debug events are logged. Check this before building an event on the hot path."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **fields: Field) -> None:
        """Log an event of one request."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Field) -> None:
        """Log an event that an operator may want to know."""
        self._log(logging.INFO, event, fields)

    def often(self, event: str, **fields: Field) -> None:
        """Log an event that clients can cause at any rate: a few lines per second, then the number of suppressed
        lines."""
        with self._lock:
            now = time.monotonic()
            begun, written, suppressed = self._often.get(event, (now, 0, 0))
            if now - begun >= 1.0:
                begun, written = now, 0
            quiet = written >= _LINES_A_SECOND
            self._often[event] = (begun, written, suppressed + 1) if quiet else (begun, written + 1, 0)
        if not quiet:
            self._log(logging.INFO, event, {**fields, "suppressed": suppressed} if suppressed else fields)

    def warning(self, event: str, **fields: Field) -> None:
        """Log an event that an operator should check."""
        self._log(logging.WARNING, event, fields)

    def failure(self, event: str, error: BaseException, **fields: Field) -> None:
        """Log a bug or an exhausted machine: the exception's type and place. The exception's message might quote
        content, so it is logged only for errors of the operator's own files and options."""
        frames = traceback.extract_tb(error.__traceback__)
        place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
        if isinstance(error, ConfigError | CheckpointError | CertificateError):
            fields["reason"] = str(error)
        self._log(logging.ERROR, event, {**fields, "error": type(error).__name__, "at": place})

    def _log(self, level: int, event: str, fields: dict[str, Field]) -> None:
        self._logger.log(level, event, extra={_FIELDS: fields})
