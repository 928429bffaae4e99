"""The output folder of a run, and the checkpoint from which it resumes."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from tenant.training.options import FineTuning
from tenant.training.output import check_output, last_checkpoint, make_record, write_record
from tests.cases import table

RECORD = make_record(FineTuning(), model="sha256:0", data="0", began=datetime(2026, 1, 1))


def used(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").touch()
    return folder


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


REFUSED: dict[str, Callable[[Path], Path]] = {
    "the model's own folder": lambda root: root / "model",
    "inside of it": lambda root: root / "model" / "new",
    "a link to it": lambda root: link(root / "link", root / "model"),
    "around it": lambda root: root,
    "the cache": lambda root: root / "cache" / "tenant",
    "another adapter": lambda root: root / "adapter" / "new",
    "a used folder": lambda root: used(root / "used"),
    "a link to a used folder": lambda root: link(root / "link", used(root / "used")),
    "a dangling link": lambda root: link(root / "link", root / "nowhere"),
    "a file": lambda root: used(root / "used") / "file",
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place", REFUSED.values(), ids=REFUSED)
def test_no_other_folder_is_overwritten(place: Callable[[Path], Path], tmp_path: Path, resume: bool) -> None:
    model, cache = used(tmp_path / "model"), used(tmp_path / "cache")
    (used(tmp_path / "adapter") / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"choose another folder|no checkpoint"):
        check_output(place(tmp_path), resume=resume, model=model, cache=cache)


def test_a_new_or_empty_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "deep" / "new", link(tmp_path / "link", tmp_path / "empty")):
        check_output(output, resume=False, model=tmp_path / "model", cache=tmp_path / "cache")


def checkpoint(output: Path, step: int) -> Path:
    folder = output / f"checkpoint-{step}"
    write_record(folder, RECORD)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_run_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9)
    whole = checkpoint(tmp_path, 10)
    (checkpoint(tmp_path, 11) / "trainer_state.json").write_text('{"global_st')  # a crash while it was written
    (checkpoint(tmp_path, 12) / "trainer_state.json").unlink()
    assert last_checkpoint(tmp_path) == whole
    check_output(tmp_path, resume=True, model=tmp_path.parent / "no-model", cache=tmp_path.parent / "no-cache")
    with pytest.raises(ConfigError, match="pass --resume to continue"):
        check_output(tmp_path, resume=False, model=tmp_path.parent / "no-model", cache=tmp_path.parent / "no-cache")


CHANGES = table(__file__, "changes")


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_resumes_only_with_its_own_options(name: str, tmp_path: Path) -> None:
    assert CHANGES.keys() == RECORD.keys()
    whole = checkpoint(tmp_path, 1)
    assert last_checkpoint(tmp_path, of=RECORD) == whole
    with pytest.raises(ConfigError, match=f"differ: .*{name.replace('_', ' ')}"):
        last_checkpoint(tmp_path, of=RECORD | {name: CHANGES[name]})


def test_a_device_in_place_of_a_record_is_not_read(tmp_path: Path) -> None:
    """A link to /dev/zero would fill the memory."""
    (checkpoint(tmp_path, 1) / "run.json").unlink()
    link(tmp_path / "checkpoint-1" / "run.json", Path("/dev/null"))
    with pytest.raises(ConfigError, match="no checkpoint"):
        last_checkpoint(tmp_path, of=RECORD)
    checkpoint(tmp_path, 2)
    with pytest.raises(ConfigError, match="device"):
        last_checkpoint(tmp_path, of=RECORD)
