"""A script that follows the README inside `main()` and closes nothing ends with status 0 within seconds.

The script is a new process. It imports the libraries and forks before it imports this project. Both processes run
`main()` and end as Python ends: first the fork while the providers live, then the process itself after their death.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from symbiosis_priv.harness.local import LocalFederation

TIMEOUT_S = 120.0
SOON_S = 20.0  # for busy machines; the session's deadline would be 120

SCRIPT = """
import os
import signal
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

federation, checkpoint, runs = sys.argv[1:]


def main():
    from tenant import RemoteConfig

    torch.set_num_threads(1)
    remote = RemoteConfig(federation=federation, masking="pad")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=remote)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    ids = torch.arange(24) % 60
    dataset = [{"input_ids": ids, "labels": ids}] * 4
    arguments = TrainingArguments(runs, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True)
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
    model.generate(input_ids=ids[None, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    model(input_ids=ids[None], labels=ids[None]).loss.backward()  # leaves pads on order
    print("ready", flush=True)
    sys.stdin.readline()
    print("last line", flush=True)


if fork := os.fork():
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    print("status", status, flush=True)
    if status:
        sys.exit(status)
signal.alarm(300)
main()
"""


@pytest.fixture(scope="module")
def wide(save_llama: Callable[..., Path]) -> Path:
    """A model so wide that a thread is inside a product when the program ends."""
    path = save_llama(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def federation(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    directory = tmp_path_factory.mktemp("federation")
    with LocalFederation(wide, directory, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


def test_a_script_that_closes_nothing_ends_with_status_0(
    wide: Path, federation: LocalFederation, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(federation.federation), str(wide), str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        said = iter(run.stdout.readline, "")
        seconds = {}
        try:
            assert "ready\n" in said, run.communicate(timeout=TIMEOUT_S)[1]
            started = time.monotonic()
            run.stdin.write("go on\n")
            assert "status 0\n" in said, run.communicate(timeout=TIMEOUT_S)[1]
            seconds["alive"] = time.monotonic() - started
            assert "ready\n" in said, run.communicate(timeout=TIMEOUT_S)[1]
            for name in federation.names:
                federation.kill(name)
            started = time.monotonic()
            _, errors = run.communicate("go on\n", timeout=TIMEOUT_S)
            seconds["killed"] = time.monotonic() - started
        finally:
            run.kill()
    assert run.returncode == 0, errors
    assert max(seconds.values()) < SOON_S, errors
