"""Files on the own disk: where caches live, and writes that leave the old file or the whole new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_cache() -> Path:
    """Where quantised weights and verification keys are kept: `$SYMBIOSIS_PRIV_CACHE` or the user's cache folder."""
    if override := os.environ.get("SYMBIOSIS_PRIV_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symbiosis-priv"


def replace_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        write(partial)
        partial.replace(path)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that readers see the old one or the whole new one, with permission bits `mode` from the start."""

    def write(partial: Path) -> None:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    replace_atomically(path, write)
