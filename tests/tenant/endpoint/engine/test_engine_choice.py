"""Which engine drives which family of models; either gives the greedy tokens of `generate()`."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import ConfigError
from tenant import RemoteConfig
from tenant.endpoint.engine.continuous import ContinuousEngine
from tenant.endpoint.engine.sequential import SequentialEngine, open_engine
from tenant.endpoint.engine.speculation import PromptLookup
from tenant.model.loading import load_language_model
from tests.cases import cases
from tests.compatibility.families import build
from tests.tenant.endpoint.engine.conftest import Asked, generated


class Letters:
    """Stands for a tokenizer."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def save(model: str, folder: Path, **changes: Any) -> Path:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = build(model, **tokens | changes)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # so that tokens differ
    made.save_pretrained(folder)
    return folder


@cases(__file__, "families")
def test_greedy_tokens_are_those_of_generate(
    kind: str, together: bool, changes: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = RemoteConfig(masking="simulate", experts="all" if kind == "GptOssForCausalLM" else None)
    model = load_language_model(save(kind, tmp_path, **(changes or {})), remote=remote, dtype=torch.float32)
    prompts = [(5, 6, 7, 8, 9), (3, 9, 27) * 5]  # shorter and longer than the window
    expected = [generated(model, prompt, 10) for prompt in prompts]
    tokenizer: Any = Letters()
    with caplog.at_level(logging.INFO, logger="tenant.endpoint"):
        engine = open_engine(model, tokenizer)
    assert type(engine) is (ContinuousEngine if together else SequentialEngine)
    assert ("because" in caplog.text) != together
    asked = [Asked(engine, prompt, max_tokens=10) for prompt in prompts]
    assert [one.tokens for one in asked] == expected
    engine.close()


def test_guesses_for_a_model_that_is_driven_with_generate_are_refused() -> None:
    model, tokenizer = build("GPTJForCausalLM"), Letters()
    with pytest.raises(ConfigError, match="--draft"):
        open_engine(model, tokenizer, drafter=PromptLookup())  # type: ignore[arg-type]


def test_the_context_is_that_of_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = save("LlamaForCausalLM", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    model: Any = load_language_model(folder, remote=RemoteConfig(masking="simulate"))
    tokenizer: Any = Letters()
    for engine in (open_engine(model, tokenizer), SequentialEngine(model, tokenizer)):
        prompt = tuple(3 + i % 90 for i in range(100))
        assert Asked(engine, prompt, max_tokens=3).tokens == generated(model, prompt, 3)
        with pytest.raises(ConfigError, match="context of 128"):
            Asked(engine, prompt, max_tokens=29)
        engine.close()
