"""The examples run as printed, with real provider processes; only paths, ports and the digest are filled in."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.base_model import private_text
from tests import warm
from tests.waiting import until
from tests.warm import Popen

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(folder: Path) -> dict[str, str]:
    own = {"SYMBIOSIS_PRIV_CACHE": str(folder / "cache")}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start_provider(folder: Path, config: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "symbiosis_priv.cli", "provider", "serve"]
    arguments = ["--config", str(folder / config), "--ready-file", str(folder / f"{config}.ready")]
    return Popen([*command, *arguments], env=environment(folder), cwd=folder)


def bound_port(folder: Path, config: str, process: subprocess.Popen[bytes]) -> str:
    ready = folder / f"{config}.ready"
    until(lambda: ready.exists() or process.poll() is not None, within_s=200)
    return ready.read_text().rpartition(":")[2]


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the examples, a model and keys, and running providers."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(tiny, folder / "model")
    authority = create_authority(folder / "keys")
    for name in ("alpha", "beta"):
        issue(folder / "keys", authority=authority, kind=Kind.PROVIDER, name=name)
    issue(folder / "keys", authority=authority, kind=Kind.TENANT, name="alice")
    federation = (EXAMPLES / "federation.toml").read_text()
    federation = re.sub("sha256:0+", WeightStore(folder / "model").manifest().digest, federation)
    processes = {}
    try:
        for config in ("provider.toml", "helper.toml"):
            text = (EXAMPLES / config).read_text()
            port = re.findall(r'listen = "127.0.0.1:(\d+)"', text)[0]
            (folder / config).write_text(text.replace(f"127.0.0.1:{port}", "127.0.0.1:0"))
            processes[config, port] = start_provider(folder, config)
        for (config, port), process in processes.items():
            federation = federation.replace(f"localhost:{port}", f"localhost:{bound_port(folder, config, process)}")
        (folder / "federation.toml").write_text(federation)
        (folder / "notes.txt").write_text("\n".join(r.replace("\n", " ") for r in private_text(seed=0, records=20)))
        yield folder
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)


def run(folder: Path, *arguments: str) -> str:
    done = warm.run(
        [sys.executable, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scripts(folder: Path) -> Iterator[dict[str, Future[str]]]:
    """Run the example and the README's sample at the same time, because importing transformers takes most of their
    time."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (sample,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    given = """
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("model")
ids = tokenizer("The weather in Halden was fine.")["input_ids"]
dataset = [{"input_ids": ids, "labels": ids}] * 8
"""
    given += sample.replace("path/to/checkpoint", "model").replace("my-adapter", "sample-adapter")
    example = [str(EXAMPLES / "finetune.py"), "--model", "model", "--text", "notes.txt", "--steps", "2"]
    with ThreadPoolExecutor(2) as both:
        yield {"example": both.submit(run, folder, *example), "sample": both.submit(run, folder, "-c", given)}


def test_examples_fine_tune_and_generate(folder: Path, scripts: dict[str, Future[str]]) -> None:
    scripts["example"].result()
    adapter = folder / "my-adapter"
    base = AutoModelForCausalLM.from_pretrained(folder / "model")  # plain PEFT on the plain checkpoint
    plain = PeftModel.from_pretrained(base, str(adapter))
    trained = [p for name, p in plain.named_parameters() if "lora_B" in name]
    assert trained
    assert all(bool(torch.any(p != 0)) for p in trained)

    arguments = ["--model", "model", "--prompt", "The weather", "--max-new-tokens", "4"]
    assert "The weather" in run(folder, str(EXAMPLES / "generate.py"), *arguments)
    answers = run(folder, str(EXAMPLES / "many_tasks.py"), *arguments)
    assert answers.count("The weather") == 2  # the base model's and the task's


def test_the_readmes_sample_runs_as_it_is_printed(folder: Path, scripts: dict[str, Future[str]]) -> None:
    scripts["sample"].result()
    assert (folder / "sample-adapter" / "adapter_config.json").is_file()


def test_federation_example_names_what_the_provider_examples_serve(folder: Path) -> None:
    federation = load_federation(folder / "federation.toml")
    assert [(peer.name, peer.role) for peer in federation.peers] == [("alpha", "executor"), ("beta", "helper")]


def test_the_notebook_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in order; the base model is one that is there already."""
    notebook = json.loads((EXAMPLES / "what_a_provider_sees.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.setattr("symbiosis_priv.harness.base_model.make_base_model", lambda folder: tiny)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    try:
        for cell in cells:
            exec(cell, names)
    finally:
        names["providers"].stop()
    assert len(names["losses"]) == 4
    assert torch.allclose(names["shares"], torch.full((16,), 1 / 16, dtype=torch.float64), atol=0.01)
