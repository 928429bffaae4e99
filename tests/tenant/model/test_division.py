"""Which parameters stay with the tenant: each is counted once, under the right kind."""

from typing import Any

import pytest
import torch

from symbiosis_priv.checkpoints.discovery.skeleton import traced
from tenant.model.division import CONVOLUTIONS, EMBEDDINGS, HEADS, OTHERS, ROUTERS, TIED_HEAD, division
from tests.compatibility.families import build

NORMS = {OTHERS: 5 * 32}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Llama": ("LlamaForCausalLM", {}, {EMBEDDINGS: 96 * 32, **NORMS}),
    "a tied head": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {TIED_HEAD: 96 * 32, **NORMS}),
    "Mixtral": ("MixtralForCausalLM", {}, {EMBEDDINGS: 96 * 32, ROUTERS: 2 * 4 * 32, **NORMS}),
    "BERT": ("BertForSequenceClassification", {}, {HEADS: 2 * 32}),
    "ViT": ("ViTForImageClassification", {}, {CONVOLUTIONS: 3 * 16 * 32}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_parameter_is_counted_once(name: str, device: str) -> None:
    kind, changes, kept = MODELS[name]
    with torch.device(device):
        model = build(kind, **changes)
    model.config.architectures = [kind]
    divided = division(model, [member for group in traced(model.config).groups for member in group.members])
    assert divided.parameters == sum(p.numel() for p in build(kind, **changes).parameters())
    assert kept.items() <= divided.kept.items()
    assert OTHERS not in kept or divided.kept.keys() == kept.keys()
