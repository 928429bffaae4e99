"""Tasks of other parties, more tasks than memory, and tasks in use: clear errors, and nothing lost."""

import contextlib
import json
import os
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from peft import LoraConfig
from safetensors.torch import load_file

from symbiosis_priv.errors import CheckpointError, ConfigError, SymbiosisError, TaskError
from tenant.model.loading import load_model
from tenant.tasks.adapter import check_name
from tenant.tasks.registry import Tasks
from tests.adapters import METHODS
from tests.tenant.tasks.conftest import WriteTask
from tests.waiting import beside

IDS = torch.arange(1, 11).view(1, 10)


@pytest.fixture(scope="module")
def base(llama: Path) -> Any:
    return load_model(llama, dtype=torch.float32)


@pytest.fixture
def tasks(base: Any) -> Any:
    made = Tasks(base)
    yield made
    made.close()


def logits(tasks: Tasks, name: str) -> torch.Tensor:
    with torch.no_grad(), tasks.batch([name]):
        found: torch.Tensor = tasks.model(input_ids=IDS).logits
    return found


def test_a_task_reports_its_method_and_size(tasks: Tasks, folders: Path) -> None:
    assert tasks.register("mine", folders / "ia3") == "mine"
    assert len(tasks.register_all(folders)) == len(METHODS)
    assert "mine" in tasks
    assert len(tasks.infos()) == len(METHODS) + 1
    assert tasks.bytes == 0
    tasks.load("lora")
    info = tasks["lora"]
    file = folders / "lora" / "adapter_model.safetensors"
    assert info.method == "LORA"
    assert info.bytes == sum(tensor.nbytes for tensor in load_file(file).values())
    tasks.unregister("lora")
    assert "lora" not in tasks
    with pytest.raises(TaskError, match="register"):
        tasks.load("lora")


# Names and folders


@given(name=st.one_of(st.text(max_size=70), st.from_regex(r"[A-Za-z0-9._/\\-]{1,70}", fullmatch=True)))
def test_an_allowed_name_is_one_part_of_a_path(name: str) -> None:
    """Every name that is allowed is one plain component of a path, in ASCII."""
    try:
        check_name(name)
    except ConfigError:
        return
    assert Path(name).name == name
    assert name.isascii()
    assert name not in (".", "..")


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "a\\b", "", "x" * 65, ".hidden", "mіne", "ﬁle", "a\n", "__base__"]
)
def test_other_names_are_refused(tasks: Tasks, folders: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        tasks.register(name, folders / "lora")
    assert tasks.infos() == []


def test_a_name_cannot_be_registered_twice(tasks: Tasks, folders: Path) -> None:
    tasks.register("lora", folders / "ia3")
    with pytest.raises(ConfigError, match="already"):
        tasks.register_all(folders)
    assert len(tasks.infos()) == 1


@pytest.mark.parametrize("link", ["folder", "file"])
def test_a_link_out_of_the_repository_is_refused(tasks: Tasks, folders: Path, tmp_path: Path, link: str) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    if link == "folder":
        (repository / "lora").symlink_to(folders / "lora")
    else:
        (repository / "lora").mkdir()
        for path in (folders / "lora").iterdir():
            (repository / "lora" / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        tasks.register_all(repository)
    assert tasks.infos() == []


def test_a_link_that_is_made_after_registration_is_refused(
    tasks: Tasks, folders: Path, write_task: WriteTask, tmp_path: Path
) -> None:
    write_task(tmp_path / "all" / "lora", METHODS["lora"])
    tasks.register_all(tmp_path / "all")
    file = tmp_path / "all" / "lora" / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(folders / "lora" / file.name)
    with pytest.raises(CheckpointError, match="symbolic link"):
        tasks.load("lora")


def test_hostile_folders_are_refused(tasks: Tasks, write_task: WriteTask, tmp_path: Path) -> None:
    """Each with an error of this project, and the next task works."""

    def copy(name: str, **entries: Any) -> Path:
        folder = write_task(tmp_path / name, METHODS["lora"])
        config = json.loads((folder / "adapter_config.json").read_bytes())
        (folder / "adapter_config.json").write_text(json.dumps(config | entries))
        return folder

    def use(folder: Path) -> None:
        tasks.register(folder.name, folder)
        tasks.load(folder.name)

    def refused(folder: Path) -> None:
        with pytest.raises(SymbiosisError):
            use(folder)
        assert tasks.bytes == 0

    refused(copy("pattern", target_modules="(.*.*)*(.*.*)*[^x]"))
    refused(copy("rank", r=1 << 30))
    refused(copy("quantised", quantization_config={"quant_method": "x"}))
    refused(copy("method", peft_type="XLORA"))
    damaged = copy("damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    refused(damaged)
    fifo = copy("fifo")
    (fifo / "adapter_model.safetensors").unlink()
    os.mkfifo(fifo / "adapter_model.safetensors")
    refused(fifo)
    use(copy("honest"))


# Memory


def test_tasks_that_do_not_fit_in_memory_are_unloaded_and_loaded(base: Any, folders: Path) -> None:
    """The least recently used one makes room; a task in use does not; every task answers as before."""
    roomy = Tasks(base)
    roomy.register_all(folders)
    expected = {name: logits(roomy, name) for name in ("lora", "lora-b", "lora-r8", "ia3")}
    sizes = {name: roomy[name].bytes for name in expected}
    roomy.close()
    tasks = Tasks(base, memory_limit=sizes["lora"] + sizes["lora-b"] + sizes["ia3"])
    tasks.register_all(folders)
    for name in ("lora", "ia3", "lora-b", "lora", "lora-r8", "lora-b", "ia3"):
        assert torch.equal(logits(tasks, name), expected[name])
        assert tasks.bytes <= tasks.memory_limit
    tasks.load("lora")
    tasks.load("lora-b")
    with tasks.batch(["lora"]):
        tasks.load("lora-r8")
        assert tasks["lora"].bytes
        assert not tasks["lora-b"].bytes
    with pytest.raises(TaskError, match="memory_limit"), tasks.batch(["lora", "lora-b", "lora-r8"]):
        pass
    assert not any(tasks._used.values())
    tasks.close()


def test_a_task_larger_than_the_limit_is_not_read(base: Any, write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "large", LoraConfig(r=256, target_modules="all-linear"))
    size = (folder / "adapter_model.safetensors").stat().st_size
    tasks = Tasks(base, memory_limit=size // 2)
    tasks.register("large", folder)
    tracemalloc.start()
    with pytest.raises(TaskError, match="memory_limit"):
        tasks.load("large")
    assert tracemalloc.get_traced_memory()[1] < size
    tracemalloc.stop()
    tasks.close()


def test_a_trained_task_is_never_unloaded_to_make_room(base: Any, folders: Path, tmp_path: Path) -> None:
    tasks = Tasks(base, memory_limit=300_000)
    tasks.register_all(folders)
    tasks.load("lora", trainable=True)
    with torch.no_grad():
        next(tasks.parameters("lora")).add_(1)
    changed = logits(tasks, "lora")
    for name in ("lora-b", "lora-r8", "ia3", "oft"):
        tasks.memory_limit = tasks["lora"].bytes + 60_000
        tasks.load(name)
    tasks.unload("lora-b")
    tasks.memory_limit = tasks["lora"].bytes + 1000
    with pytest.raises(TaskError, match="memory_limit"):
        tasks.load("lora-b")
    assert torch.equal(logits(tasks, "lora"), changed)
    tasks.save("lora", tmp_path / "lora")
    tasks.unload("lora")
    assert torch.equal(logits(tasks, "lora"), changed)
    tasks.close()


def test_a_task_in_use_is_not_unloaded(tasks: Tasks, folders: Path) -> None:
    tasks.register_all(folders)
    with tasks.batch(["lora", "ia3"]):
        for forget in (tasks.unload, tasks.unregister):
            with pytest.raises(TaskError, match="in use"):
                forget("ia3")
        with pytest.raises(TaskError, match="in use"):
            tasks.load("ia3", trainable=True)
    tasks.unregister("ia3")


def test_another_load_under_the_same_name_has_another_number_and_no_earlier_results(
    tasks: Tasks, folders: Path
) -> None:
    tasks.register("one", folders / "lora")
    tasks.register("other", folders / "lora-b")
    before, expected = logits(tasks, "one"), logits(tasks, "other")
    with tasks.hold("one") as first:
        pass
    tasks.unregister("one")
    tasks.register("one", folders / "lora-b")
    assert torch.equal(logits(tasks, "one"), expected)
    assert not torch.equal(expected, before)
    with tasks.hold("one") as second:
        assert first is not None
        assert second is not None
        assert second > first


def test_threads_share_the_tasks(base: Any, folders: Path) -> None:
    """Threads load, use and push out tasks at the same time; each gets the answer of its own task."""
    names = ["lora", "lora-b", "lora-r8", "ia3", "oft"]
    roomy = Tasks(base)
    roomy.register_all(folders)
    expected = {name: logits(roomy, name) for name in names}
    limit = roomy.bytes
    roomy.close()
    tasks = Tasks(base, memory_limit=limit - 1)
    tasks.register_all(folders)
    answers: list[bool] = []

    def use(order: list[str]) -> None:
        for name in order:
            with contextlib.suppress(TaskError):  # both threads hold tasks that do not fit together
                answers.append(torch.equal(logits(tasks, name), expected[name]))

    with beside(*(partial(use, names[i:] + names[:i]) for i in (0, 2))):
        pass
    assert answers
    assert all(answers)
    tasks.close()
