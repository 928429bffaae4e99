"""Several base models in one process, each with tasks, a session and providers of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig
from torch import Tensor

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Federation
from tenant import RemoteConfig, Tasks, backend_of
from tenant.model.loading import load_model
from tenant.tasks.batch import BASE
from tests.tenant.conftest import NewFederation, NewProvider

NAMES = ["lora", "ia3", BASE, "lora"]
IDS = torch.arange(1, 25).view(4, 6)
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


def served(path: Path, kind: str, remote: RemoteConfig) -> Tasks:
    tasks = Tasks(load_model(path, remote=remote, dtype=torch.float32))
    tasks.register("lora", LoraConfig(r=4, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2"))
    tasks.register(
        "ia3", IA3Config(target_modules=TARGETS[kind], feedforward_modules=[], fan_in_fan_out=kind == "gpt2")
    )
    for name in ("lora", "ia3"):
        torch.manual_seed(7)
        for parameter in tasks.parameters(name):
            torch.nn.init.normal_(parameter, std=0.2)
    return tasks


def step(tasks: Tasks) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of a mixed batch."""
    with tasks.batch(NAMES):
        logits = tasks.model(input_ids=IDS).logits
    logits.square().mean().backward()
    found = [parameter.grad for name in ("lora", "ia3") for parameter in tasks.parameters(name)]
    return logits.detach(), [grad for grad in found if grad is not None]


def equal(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    return (
        torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1])) and len(one[1]) == len(other[1]) > 0
    )


def test_two_models_and_three_executors_in_one_process(
    llama: Path,
    gpt2: Path,
    gpt2_store: WeightStore,
    new_provider: NewProvider,
    new_federation: NewFederation,
    federation_file: Callable[[Federation], Path],
    tmp_path: Path,
) -> None:
    """Mixed batches of both models at the same time, with pads: the bits of each model alone in the simulation."""
    llamas, gpts = [new_provider() for _ in range(3)], [new_provider(store=gpt2_store) for _ in range(2)]
    of_llama = federation_file(new_federation(llamas[:2], llamas[2:])).rename(tmp_path / "llama.toml")
    of_gpt2 = federation_file(new_federation(gpts[:1], gpts[1:], digest=gpt2_store.manifest().digest))
    paths: dict[str, tuple[Path, Path]] = {"llama": (llama, of_llama), "gpt2": (gpt2, of_gpt2)}
    reference: dict[str, Any] = {}
    for kind, (path, _) in paths.items():
        reference[kind] = step(served(path, kind, RemoteConfig(masking="simulate")))
    one, two = (served(path, kind, RemoteConfig(federation=file)) for kind, (path, file) in paths.items())
    with one.batch(NAMES), two.batch(NAMES):  # batches of two models may be nested
        nested = [tasks.model(input_ids=IDS).logits.detach() for tasks in (one, two, one)]
    assert torch.equal(nested[0], reference["llama"][0])
    assert torch.equal(nested[1], reference["gpt2"][0])
    assert torch.equal(nested[2], reference["llama"][0])
    assert equal(step(one), reference["llama"])
    assert equal(step(two), reference["gpt2"])
    assert all(provider.executed for provider in (llamas[0], gpts[0]))
    llamas[0].close()  # its executor is gone: the other one goes on with the same bits
    one.model.zero_grad()
    with torch.no_grad(), one.batch(NAMES):
        assert torch.equal(one.model(input_ids=IDS).logits, reference["llama"][0])
    assert llamas[1].executed
    for tasks in (one, two):
        backend_of(tasks.model).close()
