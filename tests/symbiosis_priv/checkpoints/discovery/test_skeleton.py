"""Layer groups found from config.json alone, compared with forward passes of real models of many architectures, also
for images, video and sound."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from symbiosis_priv.checkpoints.discovery.linears import is_linear, widths
from symbiosis_priv.checkpoints.discovery.skeleton import Skeleton, discover, load_config, traced
from symbiosis_priv.checkpoints.layers import GroupSpec, Scope
from symbiosis_priv.errors import UnsupportedModelError
from tests.cases import cases, table
from tests.compatibility.families import build, inputs_of, small

TEXTS, OTHERS, KEPT, UNTRACEABLE = (table(__file__, name) for name in ("texts", "others", "kept", "untraceable"))


def config_of(architecture: str, **changes: Any) -> PreTrainedConfig:
    config = small(getattr(transformers, architecture).config_class, **changes)
    config.architectures = [architecture]
    return config


def save(architecture: str, path: Path, **changes: Any) -> Path:
    config_of(architecture, **changes).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[*TEXTS, *OTHERS])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Skeleton, Path]:
    architecture = request.param
    path = save(architecture, tmp_path_factory.mktemp(architecture))
    return architecture, discover(path), path


def test_every_frozen_linear_is_in_a_group_of_linears_that_share_an_input(found: tuple[str, Skeleton, Path]) -> None:
    """Rule 4: siblings with one input share a mask, and different inputs never share one. A tied head stays."""
    name, skeleton, _ = found
    for training in (False, True) if name in TEXTS else (False,):  # others may leave layers out when they train
        check_groups(name, skeleton, build(name).train(training))


def check_groups(name: str, skeleton: Skeleton, model: transformers.PreTrainedModel) -> None:
    received: dict[str, list[Tensor]] = {}

    def hook(linear: str) -> Any:
        return lambda _module, args: received.setdefault(linear, []).append(args[0])  # alive, so that ids are unique

    linears = {linear: module for linear, module in model.named_modules() if is_linear(module)}
    for linear, module in linears.items():
        module.register_forward_pre_hook(hook(linear))
    model(**inputs_of(model))

    offloaded = [member for group in skeleton.groups for member in group.members]
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {linear for linear, module in linears.items() if any(module.weight is weight for weight in embeddings)}
    kept = tuple((TEXTS | OTHERS)[name])
    assert set(linears) - set(offloaded) == tied | {linear for linear in linears if linear.endswith(kept)}
    assert len(offloaded) == len(set(offloaded))
    for group in skeleton.groups:
        first, *others = [received[member] for member in group.members]
        assert len(first) == 1 or name in OTHERS  # each layer ran once
        assert all(len(xs) == len(first) and all(a is b for a, b in zip(xs, first, strict=True)) for xs in others)
        assert first[0].shape[-1] == group.inputs
        assert [widths(linears[member]) for member in group.members] == [(group.inputs, o) for o in group.outputs]
    inputs = {(id(received[group.members[0]][0]), block(group.members[0])) for group in skeleton.groups}
    assert len(inputs) == len(skeleton.groups)  # no two groups of one block share an input
    assert skeleton.transposed == {n for n in offloaded if not isinstance(linears[n], nn.Linear)}
    assert skeleton.biased == {n for n in offloaded if linears[n].bias is not None}
    assert len({group.name for group in skeleton.groups}) == len(skeleton.groups)


def block(name: str) -> str:
    """Return the repeated block that a linear is in: its name up to the first number."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: first + 1])


def test_a_model_of_which_only_the_tower_runs_is_refused(tmp_path: Path) -> None:
    """Otherwise its language model would stay with the tenant, and nothing would say so."""
    config = config_of("Qwen2VLForConditionalGeneration")
    config.text_config.num_hidden_layers, config.text_config.layer_types = 8, ["full_attention"] * 8
    config.text_config.rope_parameters["mrope_section"] = [1, 1, 1]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Qwen2VLForConditionalGeneration cannot be traced"):
        discover(tmp_path)


def test_tenant_and_provider_find_the_same_groups(found: tuple[str, Skeleton, Path]) -> None:
    _, skeleton, path = found
    assert traced(load_config(path)) == skeleton


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_stays_and_an_untied_one_goes(tied: bool, tmp_path: Path) -> None:
    path = save("LlamaForCausalLM", tmp_path, tie_word_embeddings=tied)
    groups = discover(path).groups
    assert (("lm_head",) in [group.members for group in groups]) is not tied
    assert len(groups) == 8 + (not tied)
    with_head = discover(path, Scope(tied_head=True))
    head = GroupSpec(("lm_head",), 32, (96,))
    assert with_head.groups == (*groups[:8], head)
    assert with_head.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


@pytest.mark.parametrize("architecture", KEPT)
def test_linears_that_are_tied_or_that_the_model_writes_to_stay(architecture: str, tmp_path: Path) -> None:
    groups = discover(save(architecture, tmp_path)).groups
    offloaded = {member for group in groups for member in group.members}
    names = {name for name, m in build(architecture).named_modules() if is_linear(m)}
    assert offloaded < names
    assert {name.rpartition(".")[2] for name in names - offloaded} == set(KEPT[architecture].split())


PRODUCT = nn.Linear.forward
FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "same": lambda self, x: x @ self.weight.T + (0 if self.bias is None else self.bias),
    "twice": lambda self, x: 2 * PRODUCT(self, x),
    "noisy": lambda self, x: PRODUCT(self, x + torch.rand_like(x) if self.training else x),
    "single": lambda self, x: nn.functional.linear(x.float(), self.weight.float(), self.bias),
    "router": lambda self, x: (PRODUCT(self, x), PRODUCT(self, x).argmax(-1)),
    "grouped": lambda self, x: nn.functional.linear(x.view(len(x), 2, -1), self.weight.view(2, -1, 4), self.bias),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_subclass_is_a_linear_if_it_computes_the_same_product(name: str, bias: bool) -> None:
    module = type("Linear", (nn.Linear,), {"forward": FORWARDS[name]})(6, 8, bias=bias, device="meta")
    assert is_linear(module) is (name == "same")
    assert module.weight.is_meta
    assert (module.in_features, module.training) == (6, True)


def test_cross_attention_is_not_fused_over_blocks(tmp_path: Path) -> None:
    """All decoder blocks read the encoder's output. It is one tensor, but the blocks run one after the other."""
    groups = discover(save("T5ForConditionalGeneration", tmp_path)).groups
    cross = [group.members for group in groups if "EncDecAttention.k" in group.members[0]]
    assert [len(members) for members in cross] == [2, 2]


@pytest.mark.parametrize("nothing", [None, []])
def test_a_checkpoint_without_architectures_generates_text(nothing: object, tmp_path: Path) -> None:
    path = save("LlamaForCausalLM", tmp_path) / "config.json"
    expected = discover(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": nothing}))
    assert discover(tmp_path) == expected
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match="architectures"):
        discover(tmp_path)


@cases(__file__, "refused")
def test_configurations_of_no_supported_model_are_refused(
    key: str, values: list[Any], says: str | None, tmp_path: Path
) -> None:
    path = save("LlamaForCausalLM", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    for value in values:
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(UnsupportedModelError, match=says):
            discover(tmp_path)


@pytest.mark.parametrize("architecture", UNTRACEABLE)
def test_a_model_that_cannot_be_split_is_refused_in_one_line(
    architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModelError, match=UNTRACEABLE[architecture]) as refused:
        discover(save(architecture, tmp_path))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_parameters_are_not_initialised(tmp_path: Path) -> None:
    """Marian computes its table of positions number by number, so a hostile number of positions would take hours."""
    folder = save("LlamaForCausalLM", tmp_path, max_position_embeddings=4321)
    with mock.patch.object(transformers.PreTrainedModel, "initialize_weights", side_effect=AssertionError):
        assert discover(folder).groups
