"""A file with a running session's figures about its providers, for the owner's other programs.

The file is written only if `RemoteConfig(status=...)` names it. It holds names, states, counts and times: no secret, no
seed, no row, nothing computed from them. It is replaced as a whole every second, and only its owner can read it. The
thread that writes it belongs to the process that opened the session: a forked child writes nothing.
"""

import logging
import os
import threading
import time
import weakref
from pathlib import Path

import msgspec

from symbiosis_priv.errors import ConfigError, StorageError
from symbiosis_priv.system.files import UNDECODABLE, write_atomically
from tenant.routing.route import ProviderFigures
from tenant.session.session import Session

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_MODE = 0o600


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a session at one moment.

    Args:
        pid: the session's process.
        written: seconds since 1970.
        model_digest: the federation's model.
    """

    pid: int
    written: float
    model_digest: str
    providers: list[ProviderFigures]


def status_of(session: Session) -> SessionStatus:
    """Return the current figures of a session's providers."""
    return SessionStatus(
        pid=os.getpid(),
        written=time.time(),
        model_digest=session.preparation.manifest.digest,
        providers=list(session.routes.figures()),
    )


def publish(session: Session, path: Path, *, interval_s: float = INTERVAL_S) -> None:
    """Write a session's status to a file repeatedly, until the session is closed or garbage collected.

    Raises:
        StorageError: the first write failed. A later failure is logged once, and the write is tried again.
    """
    write_status(path, status_of(session))
    arguments = (weakref.ref(session), path, interval_s)
    threading.Thread(target=_publish, args=arguments, name="status", daemon=True).start()


def _publish(session: weakref.ref[Session], path: Path, interval_s: float) -> None:
    complained = False
    while (alive := session()) is not None:
        closed = alive.closed
        try:
            write_status(path, status_of(alive))
        except StorageError as error:
            if not complained:
                log.warning("the session's status is not up to date: %s", error)
            complained = True
        if closed:
            return
        del alive
        time.sleep(interval_s)


def write_status(path: Path, status: SessionStatus) -> None:
    """Replace the file with a new status.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomically(path, msgspec.json.encode(status), mode=_MODE)


def read_status(path: Path) -> SessionStatus:
    """Read a status file.

    Raises:
        ConfigError: there is no file, or it is not a status file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=SessionStatus)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. A session writes it, if RemoteConfig(status=...) names it"
        ) from error
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is not the status of a session of this release: {error}") from error
