"""PEFT's methods that compute with the base weight: PEFT's own losses, from the public checkpoint on disk."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tenant import rounded_model
from tenant.model.remote_linear import RemoteLayer
from tests.adapters import peft_config
from tests.cases import table
from tests.splitting import watched
from tests.tenant.tasks.methods import test_own
from tests.tenant.tasks.methods.conftest import load, logits, same_everywhere, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's own

IDS = torch.arange(3, 19).view(2, 8)
SMALL: dict[str, Any] = {"target_modules": "all-linear", "r": 4}
STARTS, VARIANTS, PASSES = (table(__file__, name) for name in ("starts", "variants", "passes"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_trains_the_same_split_and_plain(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What `tests/compatibility` does not try."""
    model, config = VARIANTS[name]["model"], VARIANTS[name]["config"]
    same_everywhere(lambda: peft_config(**config), request.getfixturevalue(model), tmp_path)


@pytest.mark.parametrize("name", STARTS)
def test_the_adapters_start_has_the_bits_of_pefts_own(name: str, exact_llama: Path) -> None:
    models = []
    for split in (True, False):
        torch.manual_seed(3)
        models.append(peft.get_peft_model(load(exact_llama, split=split), peft_config(**STARTS[name])))
    split_model = models[0]
    split_start, plain_start = (
        {n: t for n, t in model.state_dict().items() if ".base_layer." not in n} for model in models
    )
    assert len(split_start) > 10
    assert all(torch.equal(tensor, plain_start[n]) for n, tensor in split_start.items())
    for module in split_model.modules():
        if isinstance(module, RemoteLayer):
            assert module.weight.untyped_storage().nbytes() == 0  # the weight was at hand for the start only


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("checkpoint", ["llama", "gpt2"])
def test_a_method_that_computes_with_the_weight_uses_the_rounded_one(
    name: str, checkpoint: str, request: pytest.FixtureRequest
) -> None:
    """Rounding changes the weights of these checkpoints, by some 1e-3 of the logits. Only the rounding of activations
    may remain, which is below 1e-4."""
    folder, config = request.getfixturevalue(checkpoint), peft_config(**PASSES[name])
    split = trained(load(folder, split=True), copy.deepcopy(config))
    plain = trained(rounded_model(folder), copy.deepcopy(config))
    assert split.losses == pytest.approx(plain.losses, rel=1e-5)
    assert (split.logits - plain.logits).norm() < 1e-4 * plain.logits.norm()


# DoRA


def test_the_rows_of_a_are_sent_along_once_after_each_step(exact_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request more than without DoRA, r rows per sibling in the first, and none while A is unchanged."""
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(load(exact_llama, split=True), peft.LoraConfig(use_dora=True, **SMALL))
    calls = watched(model, monkeypatch)

    def rows() -> list[int]:
        found = [len(product.inputs[0]) for (product,) in calls]
        calls.clear()
        return found

    ids = torch.arange(10)[None]
    siblings = [3, 1, 2, 1] * 2  # q/k/v, o, gate/up, down: adapters per request, in two layers
    head = [10]
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    for _ in range(2):
        model.train()(input_ids=ids)
        sent = torch.cat(list(calls[0][0].inputs), dim=1)[10:]
        assert any(torch.equal(part, layer.lora_A["default"].weight) for part in sent.split(4))
        assert rows() == [10 + 4 * n for n in siblings] + head
        model(input_ids=ids)
        model.eval()(input_ids=ids)
        with model.disable_adapter():
            model(input_ids=ids)
        assert rows() == ([10] * len(siblings) + head) * 3
        with torch.no_grad():  # as an optimizer does
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    parameter.mul_(0.9)


def test_a_sibling_whose_rows_were_not_sent_along_makes_a_request(exact_llama: Path) -> None:
    """A sibling's adapter that becomes active between two calls with the same input."""
    base = load(exact_llama, split=True)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(use_dora=True, init_lora_weights=False, **SMALL))
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = attention.k_proj(x.clone())
    with torch.no_grad():
        attention.k_proj.lora_A["default"].weight.mul_(2)  # as after a step
    attention.k_proj.enable_adapters(False)
    attention.q_proj(x)
    attention.k_proj.enable_adapters(True)
    changed = attention.k_proj(x)
    assert torch.equal(changed, attention.k_proj(x.clone()))
    assert not torch.equal(changed, expected)


def test_a_copied_model_sends_the_rows_of_its_own_adapter(exact_llama: Path) -> None:
    model: Any = peft.get_peft_model(load(exact_llama, split=True), peft.LoraConfig(use_dora=True, **SMALL))
    twin = copy.deepcopy(model)
    before = logits(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1)
    changed = logits(twin)
    assert torch.equal(logits(model), before)
    assert not torch.equal(changed, before)


# Half precision, with methods that need no weights, too


HALF = table(__file__, "half") | STARTS | test_own.METHODS


@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, exact_gpt2: Path, exact_llama: Path) -> None:
    """The base model in bfloat16, the adapter in float32: outputs keep the base model's dtype."""
    path = exact_gpt2 if name in test_own.METHODS else exact_llama
    model: Any = peft.get_peft_model(load(path, split=True).to(torch.bfloat16), peft_config(**HALF[name]))
    for mode in (False, True):
        output = model.train(mode)(input_ids=IDS, labels=IDS)
        assert output.logits.dtype == torch.bfloat16
    output.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert {grad.dtype for grad in gradients} == {torch.float32}
    assert any(bool(grad.any()) for grad in gradients)
