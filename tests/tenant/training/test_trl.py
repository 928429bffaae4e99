"""The recipes of docs/training.md: TRL's trainers give the losses of the plain model with rounded weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import set_seed

from tenant import RemoteConfig, rounded_model
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.training.finetune import finetune
from tenant.training.options import FineTuning

datasets: Any = pytest.importorskip("datasets")
trl: Any = pytest.importorskip("trl", reason="TRL is not installed")

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


def test_preferences_are_learned_as_with_its_trainer(tiny: Path, tmp_path: Path) -> None:
    """Losses and adapters of the same steps, up to the rounding of another order of rows."""
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    asked = [[{"role": "user", "content": f"Report {number}" * (number + 1)}] for number in range(6)]
    asked[2:2] = [[*asked[0], {"role": "assistant", "content": "Which?"}, *asked[1]]]
    answers = {"preferred_output": "It is short.", "non_preferred_output": "It is, well, quite short."}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"input": {"messages": chat}, **said}) + "\n" for chat in asked))
    remote = RemoteConfig(masking="simulate")
    same: dict[str, Any] = {"beta": 0.3, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "seed": 5}
    renamed: Any = {name.removesuffix("_steps"): value for name, value in same.items()}
    options = FineTuning(**renamed, steps=4, batch_size=2, sequence_length=96)
    found = finetune(tmp_path / "model", file, tmp_path / "own", remote=remote, options=options)
    set_seed(5)
    same |= {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 96, "gradient_checkpointing": False}
    same |= {"report_to": [], "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "bf16": False}
    arguments = trl.DPOConfig(str(tmp_path / "runs"), **same, save_strategy="no", remove_unused_columns=False)
    pairs = [
        {"prompt": chat, "chosen": said["preferred_output"], "rejected": said["non_preferred_output"]} for chat in asked
    ]
    trainer = trl.DPOTrainer(
        load_language_model(tmp_path / "model", remote=remote),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=load_tokenizer(tmp_path / "model"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16),
    )
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found.losses == pytest.approx(expected, rel=1e-3)
    assert min(expected) < 0.5  # from 0.69
    trainer.save_model(str(tmp_path / "trl"))
    own, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "trl"))
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-2, atol=1e-3)
