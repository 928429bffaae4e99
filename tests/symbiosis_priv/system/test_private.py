"""Folders that another user could change or replace are refused, at every level of their path."""

import os
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.private import PrivateFolder

STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "c"
    PrivateFolder.open(path, create=True).close()
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` belong to another user, or pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_no_other_user_may_write_to_any_folder_of_the_path(folder: Path, level: int, mode: int) -> None:
    changed = (folder, *folder.parents)[level]
    changed.chmod(mode)
    with pytest.raises(ConfigError, match=rf"other users can change {changed}\b"):
        PrivateFolder.open(folder)
    changed.chmod(0o755)
    PrivateFolder.open(folder).close()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_folder_of_the_path_may_belong_to_another_user(
    folder: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away((folder, *folder.parents)[level], monkeypatch)
    with pytest.raises(ConfigError, match="other users can change"):
        PrivateFolder.open(folder)


def test_a_sticky_folder_is_safe_only_for_entries_of_this_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_subfolder_that_others_made_or_can_change_is_refused(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_file_that_others_can_read_or_made_is_refused(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
