"""In models for images, video and sound, the towers are offloaded too, and linears with the same input form one
group."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from symbiosis_priv.checkpoints.discovery.skeleton import discover
from symbiosis_priv.errors import UnsupportedModelError
from tests.cases import cases
from tests.compatibility.families import build, inputs_of, small


@cases(__file__, "models")
def test_every_frozen_linear_is_in_a_group_of_linears_that_share_an_input(
    name: str, kept: list[str] | None, tmp_path: Path
) -> None:
    """`kept`: endings of the names of the linears that stay with the tenant."""
    model = build(name)
    model.config.architectures = [name]
    model.config.save_pretrained(tmp_path)
    groups = discover(tmp_path).groups

    received: dict[str, list[Tensor]] = {}

    def hook(linear: str) -> Any:
        return lambda _module, args: received.setdefault(linear, []).append(args[0])

    linears = {linear: module for linear, module in model.named_modules() if is_linear(module)}
    for linear, module in linears.items():
        module.register_forward_pre_hook(hook(linear))
    model(**inputs_of(model))

    offloaded = [member for group in groups for member in group.members]
    assert set(linears) - set(offloaded) == {linear for linear in linears if linear.endswith((*(kept or ()),))}
    assert len(offloaded) == len(set(offloaded))
    for group in groups:
        first, *others = [received[member] for member in group.members]
        assert all(len(xs) == len(first) and all(a is b for a, b in zip(xs, first, strict=True)) for xs in others)
    inputs = {(id(received[group.members[0]][0]), block(group.members[0])) for group in groups}
    assert len(inputs) == len(groups)  # no two groups of one block share an input


def test_a_model_of_which_only_the_tower_runs_is_refused(tmp_path: Path) -> None:
    """Otherwise its language model would stay with the tenant, and nothing would say so."""
    config = small("qwen2_vl")
    config.text_config.num_hidden_layers, config.text_config.layer_types = 8, ["full_attention"] * 8
    config.text_config.rope_parameters["mrope_section"] = [1, 1, 1]
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Qwen2VLForConditionalGeneration cannot be traced"):
        discover(tmp_path)


def block(name: str) -> str:
    """Return the repeated block that a linear is in: its name up to the first number."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: first + 1])
