"""Logs warnings, each once, about key files that other users can read and certificates that expire soon."""

import logging
import os
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

from symbiosis_priv.certificates import clock
from symbiosis_priv.certificates.reading import load_certificates

_SOON: Final = timedelta(days=14)

log = logging.getLogger(__name__)
_warned: set[str] = set()


def warn_of_exposed_key(key: Path) -> None:
    """Logs a warning, once, if other users of this machine may read or write a key file."""
    if os.name == "posix" and key.exists() and (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        _warn_once(f"{key} is open to other users of this machine (mode {mode:03o}): chmod 600 {key}")


def warn_of_expiry(path: Path, *, fix: Callable[[], str]) -> None:
    """Logs a warning, once a day, for every certificate of a file that expires within 14 days."""
    for certificate in load_certificates(path):
        until = certificate.not_valid_after_utc
        left = until - clock.now()
        if timedelta() <= left < _SOON:
            _warn_once(f"{path} expires in {left.days} days, on {until:%Y-%m-%d %H:%M} UTC: {fix()}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
