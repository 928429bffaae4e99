"""Several processes of one job train as one process does (DDP), over real providers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.harness.local import LocalFederation
from tests import warm

TIMEOUT_S = 300
WORK = """
import json, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tenant import RemoteConfig, backend_of

torch.set_num_threads(1)
federation, checkpoint, folder, batch = sys.argv[1:]
arguments = TrainingArguments(
    folder, max_steps=4, per_device_train_batch_size=int(batch), logging_steps=1, learning_rate=1e-2, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, seed=5,
)
masking = "simulate" if federation == "none" else "pad"
remote = RemoteConfig(federation=None if federation == "none" else federation, masking=masking)
model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=remote)
with backend_of(model):
    torch.manual_seed(5)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    dataset = [{"input_ids": (ids := (torch.arange(12) * (i + 3)) % 97), "labels": ids} for i in range(16)]
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    adapter = {name: p.tolist() for name, p in model.named_parameters() if p.requires_grad and "layers.0" in name}
    if trainer.is_world_process_zero():
        print("RESULT", json.dumps([losses, adapter, trainer.args.world_size]))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "ignore", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return warm.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


LAUNCHER = "torch.distributed.run --standalone --nproc-per-node 2"  # accelerate's own launcher runs it, too


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "work.py"
    path.write_text(WORK)
    return path


@pytest.fixture(scope="module")
def alone(script: Path, llama: Path) -> Any:
    """One process with the same batches."""
    return result(run(str(script), "none", str(llama), str(script.parent / "alone"), "4"))


def test_two_processes_train_as_one(
    script: Path, alone: Any, llama: Path, llama_federation: LocalFederation, tmp_path: Path
) -> None:
    words = [str(script), str(llama_federation.federation), str(llama), str(tmp_path / "runs"), "2"]
    losses, adapter, processes = result(run("-m", *LAUNCHER.split(), *words))
    assert (processes, alone[2]) == (2, 1)
    assert losses == pytest.approx(alone[0], rel=1e-4)
    for name, values in adapter.items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(alone[1][name]), atol=1e-3, rtol=1e-3)


def test_sharding_of_base_weights_is_refused(script: Path, llama: Path, tmp_path: Path) -> None:
    done = run(str(script), "none", str(llama), str(tmp_path / "runs"), "4", ACCELERATE_USE_FSDP="true")
    assert done.returncode == 1
    assert "each trains the same adapter (DDP)" in done.stderr
