"""A sample of the families that `python -m tests.compatibility.sweep` tries."""

import pytest
from torch import Tensor

from tenant.model.remote_linear import RemoteLayer
from tests.compatibility import families, sweep

# PEFT and transformers warn of many things that one may know about them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SAMPLE = {"qwen3": "FBGH", "gpt2": "FBGH", "bamba": "FBGH", "bert": "FBH", "t5": "FBGH"}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_works(family: str) -> None:
    result = sweep.attempt(family, families.head(family))
    assert (result.status, result.stages) == ("works", SAMPLE[family]), result.error


def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own judgement, on a layer whose product is 5 % too large in one group of all."""
    forward = RemoteLayer.forward

    def faulty(self: RemoteLayer, x: Tensor) -> Tensor:
        return forward(self, x) * (1.05 if self.group.index == 2 else 1)

    monkeypatch.setattr(RemoteLayer, "forward", faulty)
    result = sweep.attempt("qwen3", "Qwen3ForCausalLM")
    assert result.status == "wrong", result
    assert "forward" in result.error
