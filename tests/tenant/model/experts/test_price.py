"""What mode "all" costs: the table of docs/experts.md is computed, by a formula that a small model confirms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tenant import RemoteConfig, backend_of

DOCUMENT = Path(__file__).parents[4] / "docs" / "experts.md"
PUBLISHED = {  # layers of experts, experts, experts per token, hidden and intermediate size; from each config.json
    "Mixtral-8x7B": (32, 8, 2, 4096, 14336),
    "gpt-oss-20b": (24, 32, 4, 2880, 2880),
    "Qwen3-30B-A3B": (48, 128, 8, 2048, 768),
    "DeepSeek-V3": (58, 256, 8, 7168, 2048),
}


def traffic(layers: int, experts: int, hidden: int, width: int) -> tuple[int, int, int]:
    """(bytes to the executor, bytes of its answers, requests) of one token's forward pass through gated experts."""
    return 4 * layers * (hidden + experts * width), 4 * layers * (2 * experts * width + hidden), 2 * layers


def test_the_table_is_computed() -> None:
    text = (
        DOCUMENT.read_text(encoding="utf-8").partition("<!-- experts:begin -->")[2].partition("<!-- experts:end -->")[0]
    )
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]
    expected = []
    for name, (layers, experts, chosen, hidden, width) in PUBLISHED.items():
        up, down, requests = traffic(layers, experts, hidden, width)
        price = f"x{experts // chosen}"
        cells = (name, experts, chosen, price, f"{up / 1e6:.1f} MB", f"{down / 1e6:.1f} MB", requests)
        expected.append([str(cell) for cell in cells])
    assert found == expected


def test_a_small_model_costs_what_is_computed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RemoteConfig(masking="simulate", experts="all")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("Mixtral"), quantization_config=config)
    backend = backend_of(model)
    up = down = requests = 0
    multiply = backend.multiply

    def counted(index: int, direction: Any, inputs: Any, outputs: Any, **options: Any) -> None:
        nonlocal up, down, requests
        if backend.facts[index].entry.experts > 1:
            up += 4 * sum(part.numel() for part in inputs)
            down += 4 * sum(part.numel() for part in outputs)
            requests += 1
        multiply(index, direction, inputs, outputs, **options)

    monkeypatch.setattr(backend, "multiply", counted)
    with backend, torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    assert (up, down, requests) == traffic(layers=2, experts=4, hidden=32, width=48)
