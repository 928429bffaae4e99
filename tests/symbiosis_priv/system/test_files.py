"""The cache folder, size limits for reading, and atomic writes."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from symbiosis_priv.errors import ConfigError, StorageError
from symbiosis_priv.system.files import (
    check_unused,
    default_cache,
    output_file,
    read_limited,
    replace_atomically,
    write_atomically,
)
from symbiosis_priv.system.toml import load_toml


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


def test_only_the_owner_can_change_written_files_for_every_umask(tmp_path: Path) -> None:
    """Packed weights are mapped: truncating such a file ends the process that maps it (SIGBUS)."""
    file = tmp_path / "cache" / "file"
    before = os.umask(0)
    try:
        replace_atomically(file, lambda partial: partial.touch(mode=0o666))
    finally:
        os.umask(before)
    assert not (file.stat().st_mode | file.parent.stat().st_mode) & 0o022


def test_an_error_names_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*file/deep/new: .*make room"):
        write_atomically(tmp_path / "file" / "deep" / "new", b"")


def test_a_full_disk_is_the_same_error_for_every_writer(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writers: list[Callable[[], None]] = [
        lambda: write_atomically(tmp_path / "bytes", bytes(4096)),
        lambda: replace_atomically(tmp_path / "tensors", lambda path: save_file({"a": torch.zeros(1024)}, path)),
    ]
    for write in writers:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_pipes_devices_and_large_files_are_not_read(tmp_path: Path) -> None:
    """Opening a pipe would block, and an endless file would take memory."""
    path, pipe, open_files = tmp_path / "file", tmp_path / "pipe", len(list(Path("/dev/fd").iterdir()))
    path.write_bytes(b"abc")
    assert read_limited(path, 3) == b"abc"
    (tmp_path / "link").symlink_to(path)
    assert read_limited(tmp_path / "link", 3) == b"abc"
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a file"):
            read_limited(other, 3)
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_limited(path, 2)
    with path.open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger"):
        read_limited(path, 1 << 20)
    with pytest.raises(ConfigError, match="larger"):
        load_toml(path, dict, made_by="nothing")
    assert len(list(Path("/dev/fd").iterdir())) == open_files


def test_only_a_new_or_empty_folder_is_unused(tmp_path: Path) -> None:
    check_unused(tmp_path / "new")
    check_unused(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for used in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(ConfigError, match="in use"):
            check_unused(used)


def test_an_output_that_cannot_be_written_is_an_early_error(tmp_path: Path) -> None:
    assert output_file(None) is None
    assert output_file(tmp_path / "new" / "report.json") == tmp_path / "new" / "report.json"
    assert list((tmp_path / "new").iterdir()) == []
    for wrong in (tmp_path, Path(os.devnull)):  # root would replace /dev/null by a plain file
        with pytest.raises(ConfigError, match="is not a file; name one"):
            output_file(wrong)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert output_file(tmp_path / "link") == tmp_path / "file"
    with pytest.raises(StorageError, match="cannot write"):
        output_file(tmp_path / "file" / "report.json")
