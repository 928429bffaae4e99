"""An adapter that is loaded as a copy of a loaded one is the adapter that PEFT loads, and has tensors of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tenant.model.loading import load_model
from tenant.tasks.adapter import TENSORS
from tenant.tasks.registry import Tasks
from tests.adapters import METHODS
from tests.tenant.tasks.conftest import WriteTask

IDS = torch.arange(1, 11).view(1, 10)
COPIED = {"lora", "lora-r8", "ia3", "oft", "bottleneck"}
"""Methods whose adapters are computed together."""


@pytest.fixture(scope="module")
def base(llama: Path) -> Any:
    return load_model(llama, dtype=torch.float32)


def answers(tasks: Tasks, names: list[str]) -> torch.Tensor:
    with torch.no_grad(), tasks.batch(names):
        found: torch.Tensor = tasks.model(input_ids=IDS.expand(len(names), -1)).logits
    return found


def by_peft(base: Any, folder: Path) -> torch.Tensor:
    """The answer of a task that is loaded first, so that there is nothing to copy."""
    tasks = Tasks(base)
    tasks.register("first", folder)
    found = answers(tasks, ["first"])
    tasks.close()
    return found


@pytest.mark.parametrize("method", [name for name in METHODS if not name.endswith("-b")])
def test_a_copied_adapter_answers_as_the_one_that_peft_loads(
    base: Any, write_task: WriteTask, tmp_path: Path, method: str
) -> None:
    tasks = Tasks(base)
    for seed in range(3):
        tasks.register(f"task-{seed}", write_task(tmp_path / f"task-{seed}", METHODS[method], seed=seed))
        tasks.load(f"task-{seed}")
    expected = [by_peft(base, tmp_path / f"task-{seed}") for seed in range(3)]
    assert not torch.equal(expected[0], expected[1])
    for order in ([0, 1, 2], [2, 1, 0]):  # the first one is unloaded, and then loaded as a copy of the last one
        for seed in order:
            assert torch.equal(answers(tasks, [f"task-{seed}"]), expected[seed])
        tasks.unload("task-0")
    bases = {id(next(iter(one.layers.values())).get_base_layer()) for one in tasks._loaded.values()}
    assert len(bases) == (1 if method in COPIED else 2)
    assert tasks["task-1"].bytes <= tasks["task-2"].bytes
    tasks.close()


def test_a_file_that_changes_after_loading_changes_no_adapter(base: Any, write_task: WriteTask, tmp_path: Path) -> None:
    for method in METHODS:
        write_task(tmp_path / method, METHODS[method])
    tasks = Tasks(base)
    tasks.register_all(tmp_path)
    expected = {method: answers(tasks, [method]) for method in METHODS}
    for method in METHODS:
        file = tmp_path / method / TENSORS
        with file.open("r+b") as stream:
            stream.write(b"\0" * file.stat().st_size)
    for method in METHODS:
        assert torch.equal(answers(tasks, [method]), expected[method])
    tasks.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["lora", "lora-b", "vera", "diff-pruning"]), st.booleans()), max_size=8)
)
def test_the_memory_is_the_sum_of_all_tasks(base: Any, folders: Path, steps: list[tuple[str, bool]]) -> None:
    tasks = Tasks(base)
    tasks.register_all(folders)
    for name, load in steps:
        (tasks.load if load else tasks.unload)(name)
        assert tasks.bytes == sum(info.bytes for info in tasks.infos())
    tasks.close()
    assert tasks.bytes == 0
