"""Which engine drives which family of models; either gives the greedy tokens of `generate()`."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant import RemoteConfig
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.kv import BLOCK, Shape
from tenant.endpoint.engine.requests import Sampling
from tenant.endpoint.engine.sequential import SequentialEngine, open_engine
from tenant.endpoint.engine.speculation import PromptLookup
from tenant.model.loading import load_language_model
from tests.tenant.endpoint.engine.conftest import Asked

WINDOW = 8
TOKENS: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS: dict[str, Any] = {**SIZES, "head_dim": 16}
GEMMA: dict[str, Any] = {**HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
EXPERTS: dict[str, Any] = {**HEADS, "num_experts_per_tok": 2}
GPT: dict[str, Any] = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 112,
    "word_embed_proj_dim": 64,
}
MIXED = ["sliding_attention", "full_attention"]
LONG_ROPE: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[transformers.PreTrainedConfig, type]] = {
    "qwen2": (transformers.Qwen2Config(**SIZES), ContinuousEngine),
    "qwen3": (transformers.Qwen3Config(**HEADS), ContinuousEngine),
    "mistral": (transformers.MistralConfig(**SIZES, sliding_window=WINDOW), ContinuousEngine),
    "gemma2": (transformers.Gemma2Config(**GEMMA, layer_types=MIXED), ContinuousEngine),
    "gemma3": (transformers.Gemma3TextConfig(**GEMMA, layer_types=MIXED), ContinuousEngine),
    "gpt2": (transformers.GPT2Config(**GPT), ContinuousEngine),
    "opt": (transformers.OPTConfig(**OPT), ContinuousEngine),
    "gpt-oss": (
        transformers.GptOssConfig(**EXPERTS, num_local_experts=4, sliding_window=WINDOW, layer_types=MIXED),
        ContinuousEngine,
    ),
    "gptj": (transformers.GPTJConfig(**GPT, rotary_dim=16), SequentialEngine),
    "falcon": (transformers.FalconConfig(**SIZES), SequentialEngine),
    "dynamic rope": (transformers.LlamaConfig(**SIZES, rope_parameters=LONG_ROPE), SequentialEngine),
}


class Letters:
    """Stands for a tokenizer."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def save(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # so that tokens differ
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, kind = FAMILIES[family]
    remote = RemoteConfig(masking="simulate", experts="all" if hasattr(config, "num_experts_per_tok") else None)
    model = load_language_model(save(config, tmp_path), remote=remote, dtype=torch.float32)
    prompts = [(5, 6, 7, 8, 9), (3, 9, 27) * 5]  # shorter and longer than the window
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        expected.append(output[0, len(prompt) :].tolist())
    tokenizer: Any = Letters()
    with caplog.at_level(logging.INFO, logger="tenant.endpoint"):
        engine = open_engine(model, tokenizer)
    assert type(engine) is kind
    assert ("because" in caplog.text) == (kind is SequentialEngine)
    asked = [Asked(engine, prompt, max_tokens=10) for prompt in prompts]
    assert [one.tokens for one in asked] == expected
    engine.close()


def test_experts_that_would_show_routes_are_refused_in_decoding_as_by_generate(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=48)
    remote = RemoteConfig(masking="simulate", experts="counts")
    model = load_language_model(save(config, tmp_path), remote=remote, dtype=torch.float32)
    tokenizer: Any = Letters()
    with pytest.raises(UnsupportedMethodError, match="counts"):
        open_engine(model, tokenizer)


def test_guesses_for_a_model_that_is_driven_with_generate_are_refused() -> None:
    model, tokenizer = transformers.AutoModelForCausalLM.from_config(FAMILIES["gptj"][0]).eval(), Letters()
    with pytest.raises(ConfigError, match="--draft"):
        open_engine(model, tokenizer, drafter=PromptLookup())  # type: ignore[arg-type]


def test_what_a_sliding_window_hides_takes_no_memory(tmp_path: Path) -> None:
    """The limit admits a prompt that fits because of the window. A known beginning is used if its window is there."""
    config = transformers.MistralConfig(**SIZES, sliding_window=WINDOW, max_position_embeddings=2048)
    model = load_language_model(save(config, tmp_path), remote=RemoteConfig(masking="simulate"), dtype=torch.float32)
    prompt = tuple(3 + i * i % 89 for i in range(6 * BLOCK))
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    tokenizer: Any = Letters()
    block = Shape.from_config(config, torch.float32).block_bytes
    engine = open_engine(model, tokenizer, limits=EngineLimits(memory=5 * block, step_rows=BLOCK))
    first = Asked(engine, prompt, max_tokens=8)
    assert first.tokens == output[0, len(prompt) :].tolist()
    assert engine.load().memory <= 2 * block
    again = Asked(engine, (*prompt, *first.tokens, 5), max_tokens=2)
    assert again.done().ledger.cached_tokens == len(prompt) + 7
    shorter = Asked(engine, prompt[:BLOCK], max_tokens=2, sampling=Sampling(logprobs=1))
    assert shorter.done().ledger.cached_tokens == 0
    alone = open_engine(model, tokenizer, limits=EngineLimits(memory=5 * block))
    assert shorter.logprobs == Asked(alone, prompt[:BLOCK], max_tokens=2, sampling=Sampling(logprobs=1)).logprobs
    alone.close()
    engine.close()
