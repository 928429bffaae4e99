"""The recipes of docs/training.md: TRL's trainers give the losses of the plain model with rounded weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from peft import LoraConfig

from symbiosis_priv.errors import UnsupportedMethodError
from symbiosis_priv.harness.base_model import Pretraining, make_base_model
from tenant import RemoteConfig, compute_all_logits, rounded_model
from tenant.model.loading import load_tokenizer
from tenant.training.finetune import finetune
from tenant.training.options import FineTuning

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXT = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
HEAD, *RECIPES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
RECIPES += [recipe.replace("GRPO", "RLOO") for recipe in RECIPES if "GRPO" in recipe]
NAMES = [re.findall(r"(\w+)Trainer\(", recipe)[0] for recipe in RECIPES]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def losses(recipe: str, tiny: Path, folder: Path, masking: str | None) -> list[float]:
    """The losses that a recipe logs, and entropies, with a split model, or with the plain one if `masking` is None."""
    code = (HEAD + recipe).replace("path/to/checkpoint", str(tiny)).replace('"runs"', "RUNS")
    quiet = 'report_to=[], logging_steps=1, disable_tqdm=True, use_cpu=True, save_strategy="no", bf16=False'
    code = re.sub(r"(\w+Config\(RUNS)", rf"\1, {quiet}", code)
    code = code.replace('federation="federation.toml", masking="pad"', f'masking="{masking}"')
    if masking is None:
        code = re.sub(r"^remote = .*$", "remote = None", code, flags=re.MULTILINE)
        code = re.sub(r"^model = .*$", f'model = rounded_model("{tiny}")', code, flags=re.MULTILINE)
    names: dict[str, Any] = {"RUNS": str(folder), "rounded_model": rounded_model, "RemoteConfig": RemoteConfig}
    names["compute_all_logits"] = compute_all_logits
    torch.manual_seed(3)
    exec(code, names)
    logged = names["trainer"].state.log_history
    return [entry[name] for entry in logged if "loss" in entry for name in ("loss", "entropy") if name in entry]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like `tiny`, whose LM head is offloaded."""
    sizes: Any = {"steps": 4, "batch": 2, "window": 16, "sentences": 300, "vocab": 320, "width": 64, "blocks": 2}
    return make_base_model(tmp_path_factory.mktemp("untied") / "model", recipe=Pretraining(**sizes, tied=False))


# a reward model has a head of its own, drawn at random
OF_TEXTS = {name: recipe for name, recipe in zip(NAMES, RECIPES, strict=True) if name != "Reward"}


@pytest.mark.parametrize(
    ("model", "recipe"),
    [*(("tiny", recipe) for recipe in RECIPES), *(("untied", recipe) for recipe in OF_TEXTS.values())],
    ids=[*NAMES, *(f"{name} with an offloaded LM head" for name in OF_TEXTS)],
)
def test_a_recipe_gives_the_losses_of_the_plain_model(
    model: str, recipe: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path, ready = request.getfixturevalue(model), recipe
    if model == "untied":
        with pytest.raises(UnsupportedMethodError, match=r"TRL's product .*compute_all_logits\(trainer\)"):
            losses(recipe, path, tmp_path / "refused", "simulate")
        recipe = recipe.replace("num_generations=2", "num_generations=2, temperature=0.5")
        ready = recipe.replace("trainer.train()", "compute_all_logits(trainer)\ntrainer.train()")
    split = losses(ready, path, tmp_path / "split", "simulate")
    plain = losses(recipe, path, tmp_path / "plain", None)
    assert len(split) in (2, 4)
    assert split == pytest.approx(plain, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("model", ["tiny", "untied"], ids=["tied LM head", "offloaded LM head"])
def test_preferences_are_learned_as_with_the_plain_model(
    model: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Losses and adapters of the same steps, up to the rounding of activations."""
    model = Path(shutil.copytree(request.getfixturevalue(model), tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    asked = [[{"role": "user", "content": f"Report {number}" * (number + 1)}] for number in range(6)]
    asked[2:2] = [[*asked[0], {"role": "assistant", "content": "Which?"}, *asked[1]]]
    answers = {"chosen": "It is short.", "rejected": "It is, well, quite short."}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    pairs = [{"prompt": chat, **said} for chat in asked]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    same: dict[str, Any] = {"beta": 0.3, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "seed": 5}
    renamed: Any = {name.removesuffix("_steps"): value for name, value in same.items()}
    options = FineTuning(**renamed, steps=4, batch_size=2, sequence_length=96)
    found = finetune(model, file, tmp_path / "own", remote=RemoteConfig(masking="simulate"), options=options)
    same |= {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 96, "gradient_checkpointing": False}
    same |= {"report_to": [], "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "bf16": False}
    trainer = trl.DPOTrainer(
        rounded_model(model),
        args=trl.DPOConfig(str(tmp_path / "runs"), **same, save_strategy="no"),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=load_tokenizer(model),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16),
    )
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found.progress.losses == pytest.approx(expected, rel=1e-2)
    assert min(expected) < 0.5  # from 0.69
