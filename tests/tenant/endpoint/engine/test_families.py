"""Families of models: all give the greedy tokens of `generate()`, together or one request at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import ConfigError, UnsupportedModelError
from tenant import RemoteConfig
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.requests import AHEAD, Sampling, Started
from tenant.endpoint.engine.single_model import open_packed
from tenant.model.loading import load_language_model
from tests.cases import cases
from tests.compatibility.families import build
from tests.tenant.endpoint.engine.conftest import Asked, generated


class Letters:
    """Stands for a tokenizer."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


LETTERS: Any = Letters()


@cases(__file__, "served")
def test_greedy_tokens_are_those_of_generate(
    kind: str,
    changes: dict[str, Any] | None,
    context: int | None,
    alone: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = build(kind, **tokens | (changes or {}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # so that tokens differ
    made.save_pretrained(tmp_path)
    experts = {"GptOssForCausalLM": "all", "DeepseekV3ForCausalLM": "all", "Llama4ForCausalLM": "local"}.get(kind)
    remote = RemoteConfig(masking="simulate", experts=experts)  # type: ignore[arg-type]
    model = load_language_model(tmp_path, remote=remote, dtype=torch.float32)
    prompts = [(5, 6, 7, 8, 9), (3, 9, 27) * 5]  # shorter and longer than the window
    prompts += [tuple(3 + i % 50 for i in range((context or 40) - 10))]  # as long as the context
    expected = [generated(model, prompt, 10) for prompt in prompts]
    engine = ContinuousEngine(open_packed(model), LETTERS)
    assert (alone or "") in caplog.text
    assert ("one request at a time" in caplog.text) == (alone is not None)
    asked = [Asked(engine, prompt, max_tokens=10) for prompt in prompts]
    assert [one.tokens for one in asked] == expected
    if context is not None:
        with pytest.raises(ConfigError, match=f"context of {context}"):
            Asked(engine, prompts[-1], max_tokens=11)
    engine.close()


def test_a_model_that_is_computed_one_request_at_a_time_has_its_own_log_probabilities_and_hidden_states() -> None:
    model, prompt = build("GPTJForCausalLM").eval(), tuple(range(5, 25))
    engine = ContinuousEngine(open_packed(model), LETTERS)
    with torch.no_grad():
        found = model.transformer(torch.tensor([prompt])).last_hidden_state[0]
        scores = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    kept = list[bool]()  # whether a pass holds the hidden states of all layers in memory, and not only the last ones
    model.register_forward_hook(lambda *args: kept.append(args[2].hidden_states is not None))
    vector = Asked(engine, prompt, pooling="mean").done().vector
    torch.testing.assert_close(torch.tensor(vector), found.mean(0), rtol=1e-3, atol=1e-3)
    asked = Asked(engine, prompt, max_tokens=0, sampling=Sampling(prompt_logprobs=0))
    asked.done()
    started = asked.events[0]
    assert isinstance(started, Started)
    each = scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [one.logprob for one in started.prompt_logprobs if one] == pytest.approx(each.tolist(), abs=1e-4)
    assert kept == [False]
    with pytest.raises(ConfigError, match="leave out --answer-bucket"):
        Asked(engine, prompt, bucket=2)
    engine.close()
    refused: list[dict[str, Any]] = [{"ahead": AHEAD}, {"limits": EngineLimits(pace_s=1.0)}]
    for options in refused:
        with pytest.raises(ConfigError, match="leave out --draft and --pace"):
            ContinuousEngine(open_packed(model), LETTERS, **options)


def test_a_model_that_cannot_be_computed_is_refused_by_name_and_stays_as_it_was() -> None:
    model: Any = build("XLNetLMHeadModel").eval()
    before = generated(model, (5, 6, 7), 3)
    with pytest.raises(UnsupportedModelError, match=r"XLNetLMHeadModel cannot answer .*model.generate"):
        open_packed(model)
    assert generated(model, (5, 6, 7), 3) == before
