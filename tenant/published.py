"""What a running session lets its owner's other programs see: a small file of figures about providers.

Off unless `RemoteConfig(status=...)` names the file. It holds names, states, counts and times: no secret, no seed, no
row, nothing computed from one. It is replaced as a whole, readable by its owner alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.files import write_atomically
from symbiosis_priv.limits import Role

_MODE = 0o600


class ProviderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One provider in a session.

    Args:
        state: what the session thinks of it, in a word or two.
        requests: that it was asked.
        latency_s: of a small request, smoothed; None if none was answered yet.
        verified, rejected: answers of its that were used, and those that were wrong.
    """

    name: str
    role: Role
    state: str
    requests: int
    latency_s: float | None
    verified: int
    rejected: int


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A session, at a moment.

    Args:
        pid: of its process.
        written: seconds since 1970.
        model_digest: of the federation.
    """

    pid: int
    written: float
    model_digest: str
    providers: list[ProviderFigures]


def write_status(path: Path, status: SessionStatus) -> None:
    """Replace the file.

    Raises:
        StorageError: it cannot be written.
    """
    write_atomically(path, msgspec.json.encode(status), mode=_MODE)


def read_status(path: Path) -> SessionStatus:
    """The file's content; ConfigError if there is none, or another one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SessionStatus)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. A session writes it, if RemoteConfig(status=...) names it"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not the status of a session of this release: {error}") from error
