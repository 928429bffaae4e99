"""Files: limits, atomic writes, locks, and folders that another user could change."""

import os
import threading
from pathlib import Path

import pytest

from provider.config.schema import ProviderConfig
from symbiosis_priv.errors import ConfigError, StorageError
from symbiosis_priv.system.files import (
    PrivateFolder,
    check_unused,
    default_cache,
    lock,
    output_file,
    read_limited,
    replace_atomically,
    write_atomically,
)
from symbiosis_priv.system.toml import load_toml
from tests.cases import cases

Patch = pytest.MonkeyPatch


def test_the_tests_do_not_use_the_users_cache(monkeypatch: Patch) -> None:
    assert not default_cache().is_relative_to(Path.home() / ".cache")
    monkeypatch.delenv("SYMBIOSIS_PRIV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/xdg/symbiosis-priv")


def test_atomic_writes_leave_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    try:
        assert lock(first)
        assert not lock(second)
        assert not lock(second, patience_s=0.1)
        release = threading.Timer(0.1, os.close, [first])
        release.start()
        assert lock(second, patience_s=60)
        release.join()
    finally:
        os.close(second)


STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "c"
    PrivateFolder.open(path, create=True).close()
    return path


def give_away(path: Path, monkeypatch: Patch) -> None:
    """Make `path` belong to another user, or pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o755])
def test_no_other_user_may_own_or_write_to_a_folder_of_the_path(
    folder: Path, level: int, mode: int, monkeypatch: Patch
) -> None:
    changed = (folder, *folder.parents)[level]
    changed.chmod(mode)
    if mode == 0o755:
        PrivateFolder.open(folder).close()
        give_away(changed, monkeypatch)
    with pytest.raises(ConfigError, match="other users can change" + rf" {changed}\b" * (mode != 0o755)):
        PrivateFolder.open(folder)


def test_a_sticky_folder_is_safe_only_for_entries_of_this_user(folder: Path, monkeypatch: Patch) -> None:
    """In a folder like /tmp, no user can rename another user's entries, but any user could create the entry first."""
    folder.parent.chmod(0o1777)
    PrivateFolder.open(folder).close()
    give_away(folder, monkeypatch)
    with pytest.raises(ConfigError, match="other users can change"):
        PrivateFolder.open(folder)


def test_a_folder_of_the_path_may_be_a_link_and_its_target_is_checked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.parent)
    PrivateFolder.open(tmp_path / "link" / "c").close()
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can change"):
        PrivateFolder.open(tmp_path / "link" / "c")


def test_subfolders_and_files_are_made_exclusively_and_are_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        with PrivateFolder.open(folder) as parent, parent.subfolder("new", create=True) as new:
            new.write("file", b"content")
            assert new.read("file") == b"content"
            with pytest.raises(FileExistsError):
                parent.subfolder("new", create=True)
            with pytest.raises(FileExistsError):
                new.write("file", b"other")
    finally:
        os.umask(before)
    assert (folder / "new").stat().st_mode & 0o777 == 0o700
    assert (folder / "new" / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["link", "writable", "stranger"])
def test_a_subfolder_that_others_made_or_can_change_is_refused(folder: Path, what: str, monkeypatch: Patch) -> None:
    (folder / "real").mkdir()
    with PrivateFolder.open(folder) as parent:
        if what == "link":
            (folder / "sub").symlink_to(folder / "real")
        else:
            (folder / "sub").mkdir()
            if what == "writable":
                (folder / "sub").chmod(0o770)
            else:
                give_away(folder / "sub", monkeypatch)
        with pytest.raises(ConfigError, match="Delete"):
            parent.subfolder("sub")


@pytest.mark.parametrize("what", ["readable", "stranger", "pipe"])
def test_a_file_that_others_can_read_or_made_is_refused(folder: Path, what: str, monkeypatch: Patch) -> None:
    path = folder / "file"
    if what == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.touch(0o644 if what == "readable" else 0o600)
    with PrivateFolder.open(folder) as opened:
        if what == "stranger":
            give_away(path, monkeypatch)
        with pytest.raises(ConfigError, match="Delete"):
            opened.read("file")


def test_the_checked_folder_is_the_one_that_is_used(folder: Path) -> None:
    moved = folder.parent / "moved"
    (folder / "sub").mkdir()
    with PrivateFolder.open(folder) as opened:
        folder.rename(moved)
        (folder / "sub").mkdir(parents=True)
        opened.write("file", b"content")
        with opened.subfolder("sub") as sub:
            sub.write("file", b"content")
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert (moved / "file").read_bytes() == (moved / "sub" / "file").read_bytes() == b"content"


@cases(__file__, "fields")
def test_an_unknown_field_comes_with_the_known_ones(text: str, known: str, tmp_path: Path) -> None:
    (tmp_path / "provider.toml").write_text(text)
    with pytest.raises(ConfigError, match="unknown field") as raised:
        load_toml(tmp_path / "provider.toml", ProviderConfig, made_by="provider init")
    assert known in str(raised.value)


@cases(__file__, "values")
def test_an_unknown_value_comes_with_the_allowed_ones(text: str, allowed: str, tmp_path: Path) -> None:
    (tmp_path / "provider.toml").write_text(f'name = "alpha"\n{text}')
    with pytest.raises(ConfigError) as raised:
        load_toml(tmp_path / "provider.toml", ProviderConfig, made_by="provider init")
    assert sorted(allowed.split(", ")) == sorted(str(raised.value).partition("choose one of ")[2].split(", "))
