"""Real providers in separate processes over TLS, and the same work with `masking = "simulate"`."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of


@pytest.fixture(scope="session")
def llama(save_llama: Callable[..., Path]) -> Path:
    """A Llama whose widths differ from those of all other tensors."""
    return save_llama(hidden_size=72, intermediate_size=200, pad_token_id=0)


@pytest.fixture(scope="session")
def gpt2(save_gpt2: Callable[..., Path]) -> Path:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return save_gpt2(bias_std=0.1, vocab_size=97, n_positions=128, n_embd=64, n_layer=2, **tokens)


@pytest.fixture(scope="session")
def llama_federation(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """An executor and two helpers."""
    directory = tmp_path_factory.mktemp("llama-federation")
    with LocalFederation(llama, directory, helpers=2, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


@pytest.fixture(scope="session")
def gpt2_federation(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """An executor and two helpers."""
    directory = tmp_path_factory.mktemp("gpt2-federation")
    with LocalFederation(gpt2, directory, helpers=2, provider_options={"executor": {"threads": 1}}) as federation:
        yield federation


Tensors = dict[str, Tensor]


def with_helpers(federation: LocalFederation, count: int) -> Path:
    """A federation file with one executor and fewer helpers."""
    path = federation.directory / f"{count}-helpers.toml"
    head, *providers = federation.federation.read_text().split("[[provider]]")
    path.write_text("[[provider]]".join([head, *providers[: 1 + count]]))
    return path


def config_for(federation: LocalFederation, scheme: str, **options: Any) -> RemoteConfig:
    """The configuration for the scheme "pad-1", "pad-2", "local", "none" or "simulate"."""
    masking: Any = scheme.partition("-")[0]
    if masking == "simulate":
        return RemoteConfig(masking=masking)
    path = with_helpers(federation, 1) if scheme == "pad-1" else federation.federation
    return RemoteConfig(federation=path, masking=masking, **{"deadline_s": 120.0, **options})


def adapter_of(model: Any) -> Tensors:
    """The trained tensors of a PEFT model."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def equal(a: Tensors, b: Tensors) -> bool:
    """Returns True if two sets of tensors have the same bits and are not empty."""
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


Open = Callable[..., Any]


@pytest.fixture
def open_model() -> Iterator[Open]:
    """`open_model(path, config, adapter=True)`: a split model, closed after the test."""
    with contextlib.ExitStack() as opened:

        def open_model(path: Path, config: RemoteConfig, *, adapter: bool = True) -> Any:
            model: Any = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
            opened.callback(backend_of(model).close)
            if not adapter:
                return model
            torch.manual_seed(11)
            lora = LoraConfig(
                task_type="CAUSAL_LM",
                target_modules="all-linear",
                r=4,
                init_lora_weights=False,
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            )
            return get_peft_model(model, lora)

        yield open_model


class Text(Dataset[dict[str, Tensor]]):
    """Rows of token ids with a pattern that a model can learn."""

    def __init__(self, rows: int, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        start = torch.randint(3, 97, (rows, 1), generator=generator)
        self.ids = 3 + (start + 5 * torch.arange(length)) % 94

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


Train = Callable[..., Trainer]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train(model, steps=..., resume=..., callbacks=..., **TrainingArguments)`: trains with a `Trainer` and returns
    it."""

    def train(
        model: Any, *, steps: int = 20, resume: str | None = None, callbacks: Any = None, **arguments: Any
    ) -> Trainer:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": steps,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 5,
        }
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**{**defaults, **arguments}),
            train_dataset=Text(60, 12),
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


@pytest.fixture(scope="module")
def simulated() -> dict[tuple[Any, ...], Any]:
    """Results of the simulation, shared by all tests of a file."""
    return {}
