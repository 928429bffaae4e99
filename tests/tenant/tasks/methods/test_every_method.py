"""What every kind of adapter promises: the plain model's gradients of gradients, and half precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from torch import Tensor

from tests.tenant.tasks.methods import test_from_weights, test_own
from tests.tenant.tasks.methods.conftest import load

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's own

IDS = torch.arange(3, 19).view(2, 8)
METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(target_modules="all-linear", init_lora_weights=False),
    "shira": lambda: peft.ShiraConfig(target_modules="all-linear", r=4, init_weights=False),
    **test_own.METHODS,
    **{name: test_from_weights.METHODS[name] for name in ("dora", "pissa", "delora")},
}


def of_the_norm(model: Any) -> list[Tensor]:
    """The gradients of the squared norm of the loss's gradient, by the parameters and by the embeddings."""
    model.set_attn_implementation("eager")  # torch's fused attention has no second derivative
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(4)
    loss = model.train()(inputs_embeds=embeddings, labels=IDS).loss
    first = torch.autograd.grad(loss, [embeddings, *trained], create_graph=True, allow_unused=True)
    norm = torch.stack([grad.square().sum() for grad in first if grad is not None]).sum()
    second = torch.autograd.grad(norm, [embeddings, *trained], allow_unused=True)
    return [grad for grad in second if grad is not None]


@pytest.mark.parametrize("name", METHODS)
def test_a_gradients_gradient_is_the_plain_models(name: str, exact_gpt2: Path, exact_llama: Path) -> None:
    found, path = [], exact_llama if name in ("shira", "delora") else exact_gpt2
    for split in (True, False):
        torch.manual_seed(3)
        model: Any = get_peft_model(load(path, split=split), METHODS[name]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        found.append(of_the_norm(model))
    assert len(found[0]) == len(found[1]) > 1
    for split_one, plain in zip(*found, strict=True):
        assert (split_one - plain).abs().max() <= 0.01 * plain.abs().max()  # a term that is left out is more


HALF: dict[str, Callable[[], peft.PeftConfig]] = {
    **METHODS,
    **test_from_weights.METHODS,
    "hra": lambda: peft.HRAConfig(target_modules="all-linear", r=4),
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, exact_gpt2: Path, exact_llama: Path) -> None:
    """The base model in bfloat16, the adapter in float32: outputs keep the base model's dtype."""
    path = exact_gpt2 if name in test_own.METHODS else exact_llama
    model: Any = get_peft_model(load(path, split=True).to(torch.bfloat16), HALF[name]())
    for mode in (False, True):
        output = model.train(mode)(input_ids=IDS, labels=IDS)
        assert output.logits.dtype == torch.bfloat16
    output.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert {grad.dtype for grad in gradients} == {torch.float32}
    assert any(bool(grad.any()) for grad in gradients)
