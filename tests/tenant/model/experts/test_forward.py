"""A split mixture of experts beside the plain model with the same rounded weights: logits, gradients, tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.errors import UnsupportedMethodError
from tenant import RemoteConfig, backend_of, rounded_model
from tests.experts import FAMILIES

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
CLOSE = 1e-3  # of the largest value; an expert that is left out changes a tenth


def load(path: Path, mode: Any = "all", **options: Any) -> Any:
    config = RemoteConfig(masking="simulate", experts=mode, weight_bits=12)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config, **options).eval()


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= CLOSE * b.abs().max()).all())


def logits_and_gradient(model: Any) -> tuple[Tensor, Tensor]:
    table = model.get_input_embeddings().weight.requires_grad_(True)  # its gradient goes through every layer
    out = model(input_ids=IDS, labels=IDS)
    (gradient,) = torch.autograd.grad(out.loss, table)
    return out.logits.detach(), gradient


@pytest.mark.parametrize("mode", ["all", "local"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_is_the_plain_one(family: str, mode: Any, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(family)
    split, plain = load(path, mode), rounded_model(path, weight_bits=12, experts=mode)
    with backend_of(split):
        for mine, expected in zip(logits_and_gradient(split), logits_and_gradient(plain), strict=True):
            assert close(mine, expected)
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(split.generate(input_ids=IDS, **options), plain.generate(input_ids=IDS, **options))


def test_two_requests_per_layer(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    split = load(checkpoint("Mixtral"))
    backend = backend_of(split)
    calls: list[str] = []
    multiply = backend.multiply

    def counted(index: int, *rest: Any) -> None:
        calls.append(backend.facts[index].entry.name)
        multiply(index, *rest)

    monkeypatch.setattr(backend, "multiply", counted)
    split(input_ids=IDS)
    assert sum(".experts." in name for name in calls) == 2 * 2
    assert len(calls) == 2 * (2 + 2) + 1  # q/k/v, o, the experts' two, and the head
    backend.close()


def test_a_state_has_no_stack_and_is_loaded_again(checkpoint: Callable[[str], Path]) -> None:
    split = load(checkpoint("GptOss"))
    with backend_of(split):
        state = split.state_dict()
        assert not any(name.endswith(("gate_up_proj", "down_proj")) for name in state)
        assert any(name.endswith("down_proj_bias") for name in state)
        split.load_state_dict(state, strict=True)


def test_other_implementations_of_experts_are_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    split = load(checkpoint("Mixtral"))
    split.set_experts_implementation("eager")
    with backend_of(split), pytest.raises(UnsupportedMethodError, match="experts"):
        split(input_ids=IDS)


def test_a_token_may_go_to_no_expert(checkpoint: Callable[[str], Path]) -> None:
    """Some routers give an index beyond the last expert."""
    split = load(checkpoint("Mixtral"))
    experts = split.model.layers[0].mlp.experts
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    weights = torch.full((3, 2), 0.5)
    with backend_of(split), torch.no_grad():
        some = experts(x, torch.tensor([[0, 4], [4, 4], [1, 2]]), weights)
        first = experts(x, torch.tensor([[0, 0]] * 3), weights * torch.tensor([1.0, 0.0]))
    assert torch.allclose(some[0], first[0], rtol=1e-4, atol=1e-5)
    assert not some[1].any()
