"""Where caches live, and writes that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from symbiosis_priv.files import default_cache, write_atomically


def test_the_tests_do_not_use_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not default_cache().is_relative_to(Path.home() / ".cache")
    monkeypatch.delenv("SYMBIOSIS_PRIV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/xdg/symbiosis-priv")


def test_atomic_writes_leave_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "file"
    write_atomically(file, b"old", mode=0o600)
    assert file.stat().st_mode & 0o777 == 0o600

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]
