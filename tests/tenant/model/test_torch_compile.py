"""`torch.compile` of a split model: no graph break at its layers, the same requests, the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD
from tenant import backend_of
from tenant.model.remote_linear import LayerGroup, RemoteLinear
from tests.splitting import split_model, watched

IDS = torch.arange(3, 19).view(2, 8)

pytestmark = [
    # torch's own warnings, about its own code and autograd's functions
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def load(llama: Path) -> Callable[..., Any]:
    """`load(...)`: a split model with an adapter; always the same one."""

    def load(**options: Any) -> Any:
        model = split_model(llama, **options)
        torch.manual_seed(1)
        lora = LoraConfig(  # one linear of a group of three, and one that is alone
            target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False
        )
        return get_peft_model(model, lora)

    return load


def step(model: Any, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of one training step."""
    out = run(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.logits.detach(), gradients


def test_a_whole_training_step_is_one_graph_and_gives_the_same_bits(
    load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal blocks, so that a graph of one block would be used for the other one."""
    model = load()
    calls = watched(model, monkeypatch)
    expected_logits, expected = step(model, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # any graph break is an error
    for _ in range(2):  # once during compilation, once afterwards
        logits, gradients = step(model, compiled)
        assert torch.equal(logits, expected_logits)
        assert expected
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in gradients)
    made = [(product.group, product.direction) for call in calls for product in call]
    assert made == 3 * made[: len(made) // 3]
    assert {direction for _, direction in made} == {FORWARD, BACKWARD}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_input_changed_in_place_is_another_input(load: Callable[[], Any], backend: str) -> None:
    offloaded = backend_of(load())
    group, entry = LayerGroup(offloaded, 0), offloaded.facts[0].entry
    query, key, value = nn.ModuleList(
        RemoteLinear(entry.inputs, outputs, group=group, member=i) for i, outputs in enumerate(entry.outputs)
    )

    def attend(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * 1.0
        first = query(x)
        x.mul_(2)
        return first, key(x), value(x)

    x = torch.randn(3, entry.inputs, generator=torch.Generator().manual_seed(5)).requires_grad_()
    results = []
    for run in (attend, torch.compile(attend, backend=backend, fullgraph=True)):
        parts: tuple[Tensor, ...] = run(x)
        (gradient,) = torch.autograd.grad(torch.cat(parts, dim=-1).square().sum(), x)
        results.append((*parts, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
