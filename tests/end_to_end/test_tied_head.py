"""A tied LM head and no experts at real providers: the bits of the simulation, and what goes over the wire."""

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Providers of a Mixtral with a tied head: they serve the head and no experts."""
    directory = tmp_path_factory.mktemp("tied")
    path = write("Mixtral", directory / "model", tie_word_embeddings=True)
    scope = Scope(tied_head=True, experts=False)
    with LocalFederation(path, directory, scope=scope, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


def loaded(served: LocalFederation, **options: Any) -> Any:
    given: dict[str, Any] = {"federation": served.federation, "tied_head": True, "experts": "local"}
    config = RemoteConfig(**given | options)
    return AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32, quantization_config=config)


def trained_and_generated(model: Any, folder: Path) -> list[Tensor]:
    """Train LoRA for two steps, save it, then generate. Returns every tensor of the run."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj", "lm_head"], r=2))
    found = two_steps(model, IDS)
    model.save_pretrained(folder, save_embedding_layers=False)
    with torch.no_grad():
        found.append(model.eval()(input_ids=IDS).logits)
    found.append(model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))
    backend_of(model).close()
    return found


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_training_and_generation_equal_the_simulation(served: LocalFederation, tmp_path: Path) -> None:
    expected = trained_and_generated(loaded(served, masking="simulate", federation=None), tmp_path / "simulated")
    found = trained_and_generated(loaded(served), tmp_path / "adapter")
    assert len(found) == len(expected) > 5
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    rounded = rounded_model(served.model, tied_head=True, experts="local")
    plain: Any = PeftModel.from_pretrained(rounded, tmp_path / "adapter")
    with torch.no_grad():
        logits = plain.eval()(input_ids=IDS).logits
    assert torch.allclose(found[-2], logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


def test_generating_sends_one_row_of_logits_for_each_sequence(served: LocalFederation) -> None:
    model = loaded(served)
    sent: list[int] = []
    with backend_of(model), torch.no_grad():
        for run in (model, partial(model.generate, max_new_tokens=1)):
            before = cast(Ledger, ledger_of(model))
            run(input_ids=IDS)
            sent.append(since(before, cast(Ledger, ledger_of(model))).rows)
    assert sent[0] - sent[1] == IDS.numel() - len(IDS)


def test_what_providers_do_not_serve_is_refused_or_stays(served: LocalFederation) -> None:
    with pytest.raises(UnsupportedModelError, match="experts='local'"):
        loaded(served, experts="all")
    model = loaded(served, tied_head=False)
    backend_of(model).close()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = served.directory / "other.toml"
    other.write_text(served.federation.read_text().replace("tied_head = true", "tied_head = false"))
    with pytest.raises(ConfigError, match="tied_head"):
        loaded(served, federation=other)
