"""Which parameters stay with the tenant: each is counted once, under the right kind."""

from typing import Any

import pytest
import torch

from symbiosis_priv.checkpoints.discovery.skeleton import traced
from tenant.model.division import OTHERS, division
from tests.cases import cases
from tests.compatibility.families import build


@cases(__file__, "models")
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_parameter_is_counted_once(kind: str, changes: dict[str, Any], kept: dict[str, int], device: str) -> None:
    with torch.device(device):
        model = build(kind, **changes)
    model.config.architectures = [kind]
    divided = division(model, [member for group in traced(model.config).groups for member in group.members])
    assert divided.parameters == sum(p.numel() for p in build(kind, **changes).parameters())
    assert kept.items() <= divided.kept.items()
    assert OTHERS not in kept or divided.kept.keys() == kept.keys()
