"""Mixtures of experts, and a tied LM head, at real providers: the bits of the simulation, and what goes over the
wire."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.errors import ConfigError, UnsupportedModelError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of, rounded_model
from tenant.model.ledger import ledger_of, since
from tenant.session.tally import Ledger
from tests.experts import two_steps, write

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TIED: dict[str, Any] = {"tied_head": True, "experts": "local"}
MODES: dict[str, list[dict[str, Any]]] = {
    "GptOss": [{"experts": "all"}, {"experts": "flat"}],  # matrices stored transposed
    "DeepseekV3": [{"experts": "all"}, {"experts": "flat"}],  # and stored one by one; its first layer has no experts
    "Mixtral": [TIED],  # its providers serve the head and no experts
}
only_mixtral = pytest.mark.parametrize("served", ["Mixtral"], indirect=True)


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    directory, tied = tmp_path_factory.mktemp(request.param), request.param == "Mixtral"
    path = write(request.param, directory / request.param, tie_word_embeddings=tied)
    scope = Scope(tied_head=tied, experts=not tied)
    with LocalFederation(path, directory, scope=scope, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


def loaded(served: LocalFederation, **options: Any) -> Any:
    given: dict[str, Any] = {"federation": None if options.get("masking") == "simulate" else served.federation}
    config = RemoteConfig(**given | options)
    return AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32, quantization_config=config)


def trained_and_generated(model: Any, folder: Path, lora: LoraConfig) -> tuple[Ledger | None, list[Tensor]]:
    """Train LoRA for two steps, save it, then generate. Returns the ledger, and every tensor of the run."""
    torch.manual_seed(1)
    model = get_peft_model(model, lora)
    with backend_of(model):
        found = two_steps(model, IDS)
        model.save_pretrained(folder, save_embedding_layers=False)
        with torch.no_grad():
            found.append(model.eval()(input_ids=IDS).logits)
        found.append(model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0))
        return ledger_of(model), found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own
def test_training_and_generation_equal_the_simulation(served: LocalFederation, tmp_path: Path) -> None:
    for options in MODES[served.model.name]:
        tied = options is TIED
        lora: dict[str, Any] = {"target_modules": ["o_proj", "lm_head"] if tied else ["o_proj"], "r": 2}
        lora |= {} if tied else {"target_parameters": STACKS}
        runs = [
            trained_and_generated(
                loaded(served, **options, **masking), tmp_path, LoraConfig(task_type="CAUSAL_LM", **lora)
            )
            for masking in ({"masking": "simulate"}, {})
        ]
        (_, expected), (ledger, found) = runs
        assert ledger is not None
        assert ledger.answers_verified == ledger.rows > 0
        assert len(found) == len(expected) > 5
        assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
        if tied:
            rounded = rounded_model(served.model, **TIED)
            plain: Any = PeftModel.from_pretrained(rounded, tmp_path)
            with torch.no_grad():
                logits = plain.eval()(input_ids=IDS).logits
            assert torch.allclose(found[-2], logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


@only_mixtral
def test_generating_sends_one_row_of_logits_for_each_sequence(served: LocalFederation) -> None:
    model = loaded(served, **TIED)
    sent: list[int] = []
    with backend_of(model), torch.no_grad():
        for run in (model, partial(model.generate, max_new_tokens=1)):
            before = cast(Ledger, ledger_of(model))
            run(input_ids=IDS)
            sent.append(since(before, cast(Ledger, ledger_of(model))).rows)
    assert sent[0] - sent[1] == IDS.numel() - len(IDS)


@only_mixtral
def test_what_providers_do_not_serve_is_refused_or_stays(served: LocalFederation) -> None:
    with pytest.raises(UnsupportedModelError, match="experts='local'"):
        loaded(served, tied_head=True, experts="all")
    model = loaded(served, experts="local")
    backend_of(model).close()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = served.directory / "other.toml"
    other.write_text(served.federation.read_text().replace("tied_head = true", "tied_head = false"))
    with pytest.raises(ConfigError, match="tied_head"):
        loaded(served, federation=other, **TIED)
