"""The default mode, what is said about it, and refusals. And what mode "all" costs: the table of docs/experts.md is
computed, by a formula that a small model confirms.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError
from tenant import RemoteConfig, backend_of
from tenant.model.experts.stack import OffloadedStack
from tenant.preparation.own_tensors import write_slim
from tests.compatibility.families import build
from tests.experts import write
from tests.splitting import logits, split_model, watched


@pytest.mark.parametrize(
    ("experts", "said"), [(4, ["experts='all'", "x4"]), (8, ["experts='local'", "x8", "memory"])], ids=["low", "high"]
)
def test_experts_are_offloaded_by_default_at_a_low_price_only(
    experts: int, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("Mixtral", tmp_path, num_local_experts=experts, num_experts_per_tok=1)
    with caplog.at_level(logging.INFO, "tenant.model.experts.modes"):
        model = split_model(path)
    with backend_of(model):
        assert all(words in caplog.text for words in said)
        assert any(isinstance(parameter, OffloadedStack) for parameter in model.parameters()) == (experts == 4)


def test_experts_outside_the_interface_stay_or_are_refused_by_name(tmp_path: Path) -> None:
    build("DbrxForCausalLM").save_pretrained(tmp_path)
    backend_of(split_model(tmp_path)).close()
    with pytest.raises(UnsupportedModelError, match=r"DbrxExperts.*experts='local'"):
        split_model(tmp_path, experts="all")


def test_a_slim_checkpoint_has_experts_only_if_it_is_made_with_them(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would make them at random, with a warning."""
    path = checkpoint("Mixtral")
    store = WeightStore(path)
    write_slim(store, store.manifest(), tmp_path / "slim")
    backend_of(split_model(tmp_path / "slim", checkpoint=path, experts="all")).close()
    write_slim(store, store.manifest(), tmp_path / "with experts", keep_experts=True)
    backend_of(split_model(tmp_path / "with experts", checkpoint=path, experts="local")).close()
    with pytest.raises(CheckpointError, match=r"experts.*full checkpoint"):
        split_model(tmp_path / "slim", checkpoint=path, experts="local")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="experts"):
        RemoteConfig(masking="simulate", experts="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"choose one of 'all', 'flat'.*no 'counts' any more"):
        RemoteConfig(masking="simulate", experts="counts")  # type: ignore[arg-type]


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
    model = split_model(checkpoint("Mixtral"), experts="all")
    calls = watched(model, monkeypatch)
    with backend_of(model) as backend:
        logits(model, torch.tensor([[5]]))
    asked = [product for (product,) in calls if backend.facts[product.group].entry.experts > 1]
    up, down = (
        4 * sum(part.numel() for parts in sides for part in parts)
        for sides in ([one.inputs for one in asked], [one.outputs for one in asked])
    )
    assert (up, down, len(asked)) == traffic(layers=2, experts=4, hidden=32, width=48)
