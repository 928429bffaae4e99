"""Composed groups: in which blocks they are found, and that their integers are those of the composed weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from symbiosis_priv import native
from symbiosis_priv.arithmetic.quantise import quantise
from symbiosis_priv.checkpoints.discovery.skeleton import Skeleton, traced
from symbiosis_priv.checkpoints.layers import GroupSpec, LayerRange, Scope
from symbiosis_priv.checkpoints.manifest import GroupEntry, price_of_composing, while_decoding
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import UnsupportedModelError
from tests.cases import cases

TWO = Scope(round_trips=2)
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def found(kind: str, architecture: str, **more: Any) -> Skeleton:
    config = CONFIG_MAPPING[kind](**SIZES | more)
    config.architectures = [architecture]
    return traced(config, TWO)


def composed(skeleton: Skeleton) -> list[GroupSpec]:
    return [group for group in skeleton.groups if group.composed is not None]


@cases(__file__, "found")
def test_every_block_of_a_pre_norm_model_is_found(kind: str, architecture: str, one_plus: bool, centred: bool) -> None:
    groups = found(kind, architecture).groups
    made = [group for group in groups if group.composed is not None]
    assert len(made) == 5  # after attention in three blocks, after the MLP in two: no block follows the last one
    before = {group.members: place for place, group in enumerate(groups)}
    for spec in made:
        place = before[spec.members]
        first, *second = (member.partition("@")[0] for member in spec.members)
        assert groups[place - 1].members == (first,)  # of the same layer, so that a range of layers holds both
        assert any(group.members == tuple(second) for group in groups)
        assert spec.composed is not None
        assert (spec.composed.one_plus, spec.composed.centred) == (one_plus, centred)
    attention, mlp = made[:2]
    assert attention.composed is not None
    assert mlp.composed is not None
    assert attention.composed.norm == mlp.composed.residual == "model.layers.0.post_attention_layernorm"
    assert mlp.composed.norm == "model.layers.1.input_layernorm"


@cases(__file__, "refused")
def test_a_model_without_such_a_block_is_refused(kind: str, architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match="round_trips = 2: no block of"):
        found(kind, architecture)


def test_other_scopes_have_the_groups_of_before() -> None:
    config = LlamaConfig(**SIZES)
    config.architectures = ["LlamaForCausalLM"]
    every = traced(config, TWO)
    assert [group for group in every.groups if group.composed is None] == [*traced(config).groups]


def test_the_price_of_composed_groups() -> None:
    groups = [GroupEntry(digest="", **vars(group)) for group in found("llama", "LlamaForCausalLM").groups]
    token = while_decoding(groups)
    assert len(token) == 4 * 3 + 1  # as many products as before, with the LM head's
    assert len(token) - sum(group.composed is not None for group in token) == 2 * 3 + 2  # and half the round trips
    memory, work = price_of_composing(groups)
    assert memory > work > 1
    assert price_of_composing([group for group in groups if group.composed is None]) == (1, 1)


@pytest.fixture(params=["llama", "qwen2", "nemotron"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(3)
    kind: Any = CONFIG_MAPPING[request.param]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(kind(**SIZES, attention_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0)
    return model


def test_integers_are_those_of_the_composed_weights(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    store = WeightStore(tmp_path / "model", cache=tmp_path / "cache", scope=TWO)
    manifest = store.manifest()
    modules = dict(model.named_modules())
    for index, entry in enumerate(manifest.groups):
        if entry.composed is None:
            continue
        first, *second = (modules[member.partition("@")[0]] for member in entry.members)
        norm = modules[entry.composed.norm]
        gain = norm.weight.detach().double() + int(entry.composed.one_plus)
        below = first.weight.detach().double()
        centred = below - below.mean(0) if entry.composed.centred else below
        want = torch.cat([below, *(module.weight.detach().double() * gain @ centred for module in second)])
        group = store.group(index)
        made = group.weight.double() * group.channel_scale[:, None]
        assert ((made - want).abs() <= 0.501 * group.channel_scale[:, None]).all()
        bias = torch.zeros(len(below)) if first.bias is None else first.bias.detach()
        shift = torch.zeros(len(below)) if getattr(norm, "bias", None) is None else norm.bias.detach()
        wanted = torch.cat([bias, *(module.weight.detach() @ shift for module in second)])
        made = torch.zeros(len(want)) if group.bias is None else group.bias
        assert torch.allclose(made, wanted, rtol=1e-4, atol=1e-4)
    assert store.is_complete()
    monkeypatch.setattr(native, "library", lambda: None)
    other = WeightStore(tmp_path / "model", cache=tmp_path / "other", scope=TWO)
    assert other.manifest().digest == manifest.digest
    assert WeightStore(tmp_path / "model", cache=tmp_path / "cache").manifest().digest != manifest.digest


def test_a_range_of_layers_has_the_composed_groups_of_its_layers(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    store = WeightStore(tmp_path / "model", cache=tmp_path / "cache", scope=TWO, layers=LayerRange(1, 1))
    names = [store.manifest().groups[index].name for index in store.served]
    assert [name.partition(".1.")[2] for name in names] == [
        *("self_attn.q_proj+2", "self_attn.o_proj", "self_attn.o_proj@again+2"),
        *("mlp.gate_proj+1", "mlp.down_proj", "mlp.down_proj@again+3"),
    ]
    assert quantise(store.floats(store.manifest().groups[store.served[2]].members)).digest() in {
        entry.digest for entry in store.manifest().groups
    }
