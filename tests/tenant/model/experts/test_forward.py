"""A split mixture of experts beside the plain model with the same rounded weights: logits, gradients, tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis_priv.errors import UnsupportedMethodError
from tenant import backend_of, rounded_model
from tests.experts import FAMILIES
from tests.splitting import split_model, watched

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
CLOSE = 1e-3  # of the largest value; an expert that is left out changes a tenth


def load(path: Path, mode: Any = "all") -> Any:
    return split_model(path, experts=mode, weight_bits=12)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= CLOSE * b.abs().max()).all())


def logits_and_gradient(model: Any) -> tuple[Tensor, Tensor]:
    table = model.get_input_embeddings().weight.requires_grad_(True)  # its gradient goes through every layer
    out = model(input_ids=IDS, labels=IDS)
    (gradient,) = torch.autograd.grad(out.loss, table)
    return out.logits.detach(), gradient


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, "all") for family in FAMILIES]
    + [(family, mode) for family in ("Mixtral", "GptOss") for mode in ("flat", "local")],
)
def test_a_split_model_gives_the_results_of_the_plain_one(
    family: str, mode: Any, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    split, plain = load(path, mode), rounded_model(path, weight_bits=12, experts=mode)
    with backend_of(split):
        for mine, expected in zip(logits_and_gradient(split), logits_and_gradient(plain), strict=True):
            assert close(mine, expected)
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(split.generate(input_ids=IDS, **options), plain.generate(input_ids=IDS, **options))


@pytest.mark.parametrize(("mode", "bucket"), [("all", 1), ("flat", 1), ("flat", 64)])
def test_a_layer_takes_two_requests_with_the_counts_of_its_mode(
    mode: Any, bucket: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_model(checkpoint("Mixtral"), experts=mode, row_bucket=bucket)
    calls, routes = watched(split, monkeypatch), list[Tensor]()
    for layer in split.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: routes.append(args[1].flatten()))
    with backend_of(split) as backend:
        split(input_ids=IDS)
    assert len(calls) == 2 * (2 + 2) + 1  # q/k/v, o, the experts' two, and the head
    of_experts = [".experts." in backend.facts[call[0].group].entry.name for call in calls]
    seen = [call[0].counts for call, is_of_experts in zip(calls, of_experts, strict=True) if is_of_experts]
    busiest = [(max(int(route.bincount().max()), bucket),) * 4 for route in routes for _ in range(2)]
    assert seen == (busiest if mode == "flat" else [None] * 4)
    assert not any(call[0].counts for call, is_of_experts in zip(calls, of_experts, strict=True) if not is_of_experts)


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
