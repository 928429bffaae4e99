"""Which parameters stay with the tenant: each is counted once, under the right kind."""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from symbiosis_priv.checkpoints.discovery.skeleton import traced
from tenant import RemoteConfig, backend_of
from tenant.model.division import CONVOLUTIONS, EMBEDDINGS, HEADS, OTHERS, ROUTERS, TIED_HEAD, division

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = transformers.LlamaConfig(**_SIZES, vocab_size=97, tie_word_embeddings=False)
_TIED = transformers.LlamaConfig(**_SIZES, vocab_size=97, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("kind", "config", "kept"),
    [
        (transformers.LlamaForCausalLM, _LLAMA, {EMBEDDINGS: 97 * 32, OTHERS: 5 * 32}),
        (transformers.LlamaForCausalLM, _TIED, {TIED_HEAD: 97 * 32, OTHERS: 5 * 32}),
        (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig(**_SIZES, vocab_size=97, num_key_value_heads=4, num_local_experts=4),
            {EMBEDDINGS: 97 * 32, OTHERS: 5 * 32, ROUTERS: 2 * 4 * 32},
        ),
        (
            transformers.BertForSequenceClassification,
            transformers.BertConfig(**_SIZES, vocab_size=97, max_position_embeddings=8),
            None,
        ),
        (transformers.ViTForImageClassification, transformers.ViTConfig(**_SIZES, image_size=8, patch_size=4), None),
    ],
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_parameter_is_counted_once(
    kind: type[transformers.PreTrainedModel], config: Any, kept: dict[str, int] | None, device: str
) -> None:
    config = deepcopy(config)
    config.architectures = [kind.__name__]
    with torch.device(device):
        model = kind(config)
    divided = division(model, [member for group in traced(config).groups for member in group.members])
    assert divided.parameters == sum(p.numel() for p in kind(config).parameters())
    if kept is not None:
        assert dict(divided.kept) == kept
    if kind is transformers.BertForSequenceClassification:
        assert divided.kept[HEADS] == 2 * 32
    if kind is transformers.ViTForImageClassification:
        assert divided.kept[CONVOLUTIONS] == 3 * 16 * 32


def test_loading_logs_what_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers.LlamaForCausalLM(deepcopy(_LLAMA)).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "tenant.model.hf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=RemoteConfig(masking="simulate"), trust_remote_code=False
        )
    backend_of(model).close()
    assert "parameters are offloaded; here stay embeddings 3,104" in caplog.text
