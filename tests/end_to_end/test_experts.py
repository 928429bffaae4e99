"""Mixtures of experts over real sockets and processes give the same results as the simulation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of
from tests.experts import two_steps, write

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module", params=["GptOss", "DeepseekV3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Matrices stored transposed, and stored one by one."""
    directory = tmp_path_factory.mktemp(request.param)
    layers = 2 if request.param == "DeepseekV3" else 1  # its first layer has no experts
    path = write(request.param, directory / "model", num_hidden_layers=layers)
    with LocalFederation(path, directory, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


def trained_and_generated(config: RemoteConfig, path: Path) -> tuple[Any, list[Tensor]]:
    """Train LoRA on linears and experts for two steps, then generate. Returns the ledger, and every tensor of the
    run."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"], target_parameters=STACKS, r=2)
    model = get_peft_model(model, lora)
    with backend_of(model):
        found = two_steps(model, IDS)
        found.append(model.eval().generate(input_ids=IDS, max_new_tokens=2, do_sample=False, pad_token_id=0))
        return ledger_of(model), found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("mode", ["all", "flat"])
def test_masked_experts_give_the_results_of_the_simulation(mode: Any, served: LocalFederation) -> None:
    _, expected = trained_and_generated(RemoteConfig(masking="simulate", experts=mode), served.model)
    config = RemoteConfig(federation=served.federation, masking="pad", experts=mode)
    ledger, found = trained_and_generated(config, served.model)
    assert len(found) == len(expected) > 5
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    assert ledger.answers_verified == ledger.rows > 0
