"""Mixtures of experts in miniature, one for each layout of experts in transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = _LATENT | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # stored one by one, and joined on loading
    "Qwen2Moe": _QWEN | {"shared_expert_intermediate_size": 24},  # a shared expert with its own gate
    "Qwen3Moe": _QWEN | {"head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},  # interleaved, transposed, biased
    "DeepseekV2": _DEEPSEEK,
    "DeepseekV3": _DEEPSEEK,  # its first layer has no experts
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "Glm4Moe": _QWEN
    | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # stored as stacks under other names
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "MiniMax": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
}

DBRX: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 96,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
}
"""Experts that transformers does not call through its experts interface."""


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of a family, with biases, and weights that are large enough to make experts differ."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = kind(getattr(transformers, f"{family}Config")(**deepcopy(SIZES | FAMILIES[family] | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def two_steps(model: Any, ids: Tensor) -> list[Tensor]:
    """Train the parameters that require gradients for two steps. Returns all logits and gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    found = []
    for _ in range(2):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found += [out.logits.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return found
