"""bfloat16 and float16 checkpoints with an empty cache: no weights cached, no kernel chosen yet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tests.end_to_end.conftest import Open

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)
# Each has widths that no other test has, so that its kernels are chosen here. The last column's index rounds up in the
# checkpoint's dtype, so code that computes indices in this dtype would index outside the matrix.
MLP_WIDTHS = {torch.float32: 4099, torch.bfloat16: 4125, torch.float16: 4103}


@pytest.mark.parametrize("dtype", MLP_WIDTHS, ids=str)
def test_a_cold_start_is_bit_exact(
    dtype: torch.dtype, save_llama: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    path = save_llama(hidden_size=48, intermediate_size=MLP_WIDTHS[dtype], num_hidden_layers=1, pad_token_id=0)
    full: Any = AutoModelForCausalLM.from_pretrained(path)
    full.to(dtype).save_pretrained(path)
    outcomes = []
    with LocalFederation(path, tmp_path / "run") as local:
        masking: Any
        for masking in ("pad", "simulate"):
            federation: Any = {"federation": local.federation} if masking == "pad" else {}
            config = RemoteConfig(masking=masking, cache=tmp_path / masking, **federation)
            outcomes.append(forward_backward_generate(open_model(path, config)))
    assert {t.dtype for t in outcomes[0].values() if t.is_floating_point()} >= {dtype}
    assert outcomes[0].keys() == outcomes[1].keys()
    for name, tensor in outcomes[0].items():
        assert torch.equal(tensor, outcomes[1][name]), name


def forward_backward_generate(model: Any) -> dict[str, Tensor]:
    """Logits, every gradient (including the embedding's, so through all layers) and greedy tokens."""
    model.get_input_embeddings().weight.requires_grad_(True)
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    tokens = model.eval().generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, min_new_tokens=3, pad_token_id=0
    )
    return gradients | {"logits": out.logits, "tokens": tokens}


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_digest_does_not_depend_on_the_default_dtype(
    default: torch.dtype, llama: Path, gpt2: Path, tmp_path: Path
) -> None:
    """transformers sets the default dtype while it loads a model, and scripts may set it permanently."""
    for path in (llama, gpt2):
        want = WeightStore(path).manifest().digest
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            assert WeightStore(path, cache=tmp_path / path.name).manifest().digest == want
        finally:
            torch.set_default_dtype(before)
