"""Overlapped parts of a batch: products at the same time, and the bits of one part after the other."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from symbiosis_priv.errors import UnsupportedMethodError
from tenant import RemoteConfig, backend_of, overlapped
from tenant.masking.backend import Backend, Product
from tenant.model.loading import load_model
from tenant.model.remote_linear import RemoteLayer

TIMEOUT_S = 60.0
PARTS = torch.arange(1, 49).view(3, 2, 8).unbind()  # token ids


class Meeting(Backend):
    """Computes a product once products of all parts have arrived."""

    def __init__(self, backend: Backend, parties: int) -> None:
        self.facts, self._inner, self._all_here = backend.facts, backend, threading.Barrier(parties)

    def compute(self, product: Product) -> None:
        self._all_here.wait(TIMEOUT_S)
        self._inner.compute(product)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module")
def base(save_llama: Callable[..., Path]) -> Any:
    return load_model(save_llama(), remote=RemoteConfig(masking="simulate"), dtype=torch.float32)


@pytest.fixture
def model(base: Any) -> Any:
    torch.manual_seed(0)
    adapted: Any = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    yield adapted
    adapted.unload()


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of a model, which forgets them."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_computed_at_the_same_time_with_the_gradients_of_a_loop(model: Any, count: int) -> None:
    """No product is computed before one of each part has arrived. Sums of three floats depend on their order."""
    parts, step = PARTS[:count], step_of(model.train())
    for _ in range(2):  # the second time, gradients are added to those of the first
        losses = [step(part) for part in parts]
    expected = gradients(model)
    groups = {module.group for module in model.modules() if isinstance(module, RemoteLayer)}
    backend = backend_of(model)
    meeting = Meeting(backend, count)
    for group in groups:
        group.backend = meeting
    try:
        for _ in range(2):
            assert overlapped(model, step, parts) == losses
    finally:
        for group in groups:
            group.backend = backend
    assert all(map(torch.equal, gradients(model), expected))


def test_each_part_draws_random_numbers_of_its_own(base: Any) -> None:
    """So a run can be repeated, whichever part comes first. The caller's numbers go on after one draw per part."""
    torch.manual_seed(0)
    model: Any = get_peft_model(
        base, LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    )
    step, random = step_of(model.train()), torch.get_rng_state()
    together, after = overlapped(model, step, PARTS), torch.get_rng_state()
    found = gradients(model)
    torch.set_rng_state(random)
    assert [loss for part in PARTS for loss in overlapped(model, step, [part])] == together
    assert all(map(torch.equal, gradients(model), found))
    assert torch.equal(torch.get_rng_state(), after)
    assert len(set(map(float, overlapped(model, step, [PARTS[0]] * 2)))) == 2
    model.unload()


def test_an_error_of_a_part_ends_the_others_and_leaves_gradients_as_they_were(model: Any) -> None:
    step_of(model.train())(PARTS[0])
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad.clone() for p in parameters]
    began, ended = threading.Event(), threading.Event()

    def step(ids: Tensor) -> None:
        if ids is PARTS[0]:
            while not began.is_set():
                step_of(model)(ids)
            raise ValueError("no")
        try:
            while True:
                began.set()
                step_of(model)(ids)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="no"):
        overlapped(model, step, PARTS[:2])
    assert ended.wait(TIMEOUT_S)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, before, strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in parameters)


def test_prompt_learning_is_refused_where_it_would_go_wrong(base: Any) -> None:
    """PEFT changes the base model while it generates."""
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with torch.no_grad(), pytest.raises(UnsupportedMethodError, match="prompt learning"):
        overlapped(model, lambda ids: model(input_ids=ids), PARTS)
