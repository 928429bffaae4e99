"""A checkpoint as it is published, in FP8, at real providers: the bits of its simulation, and of the same weights
stored in floats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.harness.local import LocalFederation
from tests import forms
from tests.end_to_end.comparing import config_for, equal
from tests.end_to_end.conftest import Open

IDS = torch.arange(3, 3 + 2 * 7).view(2, 7)


def test_a_model_in_fp8_has_the_bits_of_its_simulation(
    save_llama: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    wide = forms.publish(save_llama(pad_token_id=0), published, "fp8 blocks")

    def seen(path: Path, config: Any) -> dict[str, Tensor]:
        model = open_model(path, config)
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"logits": out.logits}

    with LocalFederation(published, tmp_path / "federation", provider_options={"executor": {"threads": 1}}) as local:
        found = seen(published, config_for(local, "pad-1"))
        assert equal(found, seen(published, config_for(local, "simulate")))
        assert equal(found, seen(wide, config_for(local, "simulate")))
