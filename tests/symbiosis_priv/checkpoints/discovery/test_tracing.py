"""The trace finds the linears whose rows do not depend on unknown values."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from symbiosis_priv.checkpoints.discovery.known_values import KnownValues
from symbiosis_priv.checkpoints.discovery.tracing import trace_calls


class Routed(PreTrainedModel):
    """Sends all rows to one linear, and the rows that a router chooses to another."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(8, 4)
        self.router, self.every, self.some, self.never = (
            nn.Linear(4, 2),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embedding(input_ids)
        chosen = self.router(x).argmax(-1) == 0
        y: Tensor = self.every(x)
        y[chosen] = self.some(x[chosen])
        if y.sum() > 0:
            y = self.never(y)
        return y


def test_a_linear_of_the_rows_that_are_routed_to_it_is_not_found() -> None:
    """Offloaded, it would show a provider how many rows go there."""
    values = KnownValues()
    with values, torch.device("meta"):
        model = Routed(PreTrainedConfig())
    linears: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    with values:
        calls, computed_with = trace_calls(model, linears)
    assert [call.name for call in calls] == ["router", "every"]
    assert calls[0].input == calls[1].input
    assert computed_with == set()
