"""The recipes of docs/training.md: TRL's trainers give the losses of the plain model with rounded weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant import RemoteConfig, rounded_model

pytest.importorskip("trl", reason="TRL is not installed")

TEXT = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
HEAD, *RECIPES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
RECIPES += [recipe.replace("GRPO", "RLOO") for recipe in RECIPES if "GRPO" in recipe]
NAMES = [re.findall(r"(\w+)Trainer\(", recipe)[0] for recipe in RECIPES]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def losses(recipe: str, tiny: Path, folder: Path, masking: str | None) -> list[float]:
    """The losses that a recipe logs, with a split model, or with the plain one if `masking` is None."""
    code = (HEAD + recipe).replace("path/to/checkpoint", str(tiny)).replace('"runs"', "RUNS")
    quiet = 'report_to=[], logging_steps=1, disable_tqdm=True, use_cpu=True, save_strategy="no", bf16=False'
    code = re.sub(r"(\w+Config\(RUNS)", rf"\1, {quiet}", code)
    code = code.replace('federation="federation.toml", masking="pad"', f'masking="{masking}"')
    if masking is None:
        code = re.sub(r"^remote = .*$", "remote = None", code, flags=re.MULTILINE)
        code = re.sub(r"^model = .*$", f'model = rounded_model("{tiny}")', code, flags=re.MULTILINE)
    names: dict[str, Any] = {"RUNS": str(folder), "rounded_model": rounded_model, "RemoteConfig": RemoteConfig}
    torch.manual_seed(3)
    exec(code, names)
    logged = names["trainer"].state.log_history
    return [entry["loss"] for entry in logged if "loss" in entry]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_gives_the_losses_of_the_plain_model(recipe: str, tiny: Path, tmp_path: Path) -> None:
    split = losses(recipe, tiny, tmp_path / "split", "simulate")
    plain = losses(recipe, tiny, tmp_path / "plain", None)
    assert len(split) == 2
    assert split == pytest.approx(plain, rel=1e-3, abs=1e-4)
