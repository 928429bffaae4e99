"""Fixtures for the shared package: tiny checkpoints and a choice of torch's thread count."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.kernels import KERNELS, choice
from tests.compatibility.families import build


@pytest.fixture(scope="session", autouse=True)
def _interpreter_without_unused_checks() -> None:
    """Triton's interpreter computes whether integers overflow, and reports it only if it debugs. That took a third of
    its time."""
    if KERNELS["triton-int8"].supports(torch.device("cpu")):
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


@pytest.fixture(scope="module", autouse=True)
def _slow_self_test_is_run_once() -> Iterator[None]:
    """In Triton's interpreter, the self-test takes seconds; `test_triton_kernel.py` runs it once."""
    real = choice.self_test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            choice,
            "self_test",
            lambda kernel, device, weight_bits: kernel.name.startswith("triton") or real(kernel, device, weight_bits),
        )
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """A Llama with grouped queries and an untied LM head."""
    model: PreTrainedModel = build("LlamaForCausalLM")
    return model


@pytest.fixture(scope="session")
def gpt2() -> PreTrainedModel:
    """A GPT-2: Conv1D, biases that are not zero, a tied LM head."""
    model: PreTrainedModel = build("GPT2LMHeadModel")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return model


@pytest.fixture(scope="session")
def llama_path(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama as one safetensors file. Read only."""
    path = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gpt2_path(gpt2: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GPT-2 as one safetensors file. Read only."""
    path = tmp_path_factory.mktemp("gpt2")
    gpt2.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gpt2_cache(gpt2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder that a `WeightStore` of the GPT-2 has written. Copy it before use."""
    cache = tmp_path_factory.mktemp("gpt2") / "cache"
    WeightStore(gpt2_path, cache=cache).manifest()
    return cache


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
