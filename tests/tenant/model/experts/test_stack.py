"""LoRA on expert stacks: the factors work on rows, and the saved adapter gives the plain model the same logits.
And where rows stand in a request with counts, for any choice of experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from symbiosis_priv.errors import UnsupportedMethodError
from tenant import backend_of, rounded_model
from tenant.model.experts.stack import Flat
from tests.splitting import split_model

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CLOSE = 1e-3

# PEFT says that it found no modules, for parameters only
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


def load(path: Path) -> Any:
    return split_model(path, experts="all", weight_bits=12)


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    lora = LoraConfig(
        task_type="CAUSAL_LM", target_modules=[], target_parameters=STACKS, r=3, init_lora_weights=False, **options
    )
    return get_peft_model(model, lora).eval()


def close(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= CLOSE * scale).all())


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Qwen3Moe"])
def test_a_saved_adapter_of_experts_works_in_the_plain_model(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Logits and gradients are close to those of plain PEFT. So are logits of the saved adapter."""
    path = checkpoint(family)
    split, plain = adapted(load(path)), adapted(rounded_model(path, weight_bits=12, experts="all"))
    with backend_of(split):
        seen = []
        for model in (split, plain):
            out = model(input_ids=IDS, labels=IDS)
            out.loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            seen.append((out.logits.detach(), gradient))
        (logits, gradient), (expected, expected_gradient) = seen
        with torch.no_grad(), plain.disable_adapter():
            effect = (expected - plain(input_ids=IDS).logits).abs().max()
        assert close(logits, expected, effect)
        assert close(gradient, expected_gradient, expected_gradient.abs().max())
        split.save_pretrained(tmp_path)
    home: Any = PeftModel.from_pretrained(rounded_model(path, weight_bits=12, experts="all"), tmp_path).eval()
    with torch.no_grad():
        assert close(logits, home(input_ids=IDS).logits, effect)


def test_a_method_that_needs_expert_weights_is_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    split = adapted(load(checkpoint("Mixtral")))
    with backend_of(split):
        with pytest.raises(UnsupportedMethodError, match="merg"):
            split.merge_adapter()
        split.add_adapter("second", split.peft_config["default"])
        split.base_model.set_adapter(["default", "second"])
        with pytest.raises(UnsupportedMethodError, match=r"experts.*one active adapter"):
            split(input_ids=IDS)


EXPERTS = 5
CHOICES = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), max_size=9).map(
    lambda pairs: torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
)


@given(CHOICES, st.integers(1, 3))
def test_every_row_is_among_the_rows_of_its_expert(index: Tensor, bucket: int) -> None:
    route = Flat(index, experts=EXPERTS, bucket=bucket)
    places, most = route.places.tolist(), route.counts[0]
    assert len(set(places)) == len(places) == index.numel()
    assert route.counts == (most,) * EXPERTS
    assert most % bucket == 0
    assert 0 <= most - (int(index.flatten().bincount().max()) if index.numel() else 0) < bucket
    assert [place // most for place in places] == index.flatten().tolist()
