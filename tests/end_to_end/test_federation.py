"""Executors and helpers that are killed while a tenant trains, or found in a registry: the bits are those of the
simulation."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of
from tests.end_to_end.conftest import Open, Train, adapter_of, equal
from tests.waiting import beside


@contextmanager
def killed_at_random(local: LocalFederation, *, left: int) -> Iterator[list[str]]:
    """Kill providers (SIGKILL) at random times, and start them again meanwhile; `left` of each role stay up. Yields the
    names of those that were killed so far."""
    rng, over, kills = random.Random(0), threading.Event(), list[str]()
    starts: dict[str, Future[None]] = {}

    def kill() -> None:
        with ThreadPoolExecutor(len(local.names)) as pool:
            while not over.wait(rng.uniform(0.15, 0.45)):
                up = [name for name in local.names if name not in starts or starts[name].done()]
                roles = Counter(name.partition("-")[0] for name in up)
                if victims := [name for name in up if roles[name.partition("-")[0]] > left]:
                    kills.append(rng.choice(victims))
                    local.kill(kills[-1])
                    starts[kills[-1]] = pool.submit(local.restart, kills[-1])
        for start in starts.values():
            start.result()

    with beside(kill, over=over):
        yield kills


def test_providers_that_are_killed_at_random_change_no_bit(
    llama: Path, open_model: Open, train: Train, tmp_path: Path
) -> None:
    """A tenant trains until three were killed, and generates."""
    options = {"executor": {"threads": 1}}
    sizes: dict[str, Any] = {"executors": 2, "helpers": 2, "pad_helpers": 1}
    prompt = torch.arange(3, 9)[None]

    def text(model: Any) -> Tensor:
        found: Tensor = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12)
        return found

    with LocalFederation(llama, tmp_path / "run", **sizes, provider_options=options) as local:
        model = open_model(llama, RemoteConfig(federation=local.federation))
        with killed_at_random(local, left=1) as kills:
            trained = train(model, steps=5000, callbacks=[Until(lambda _: len(kills) >= 3)])
            tokens = text(model)
        assert backend_of(model).products.ledger().answers_rejected == 0  # type: ignore[attr-defined]
        adapter = adapter_of(model)
    steps = trained.state.global_step
    simulated = open_model(llama, RemoteConfig(masking="simulate"))
    train(simulated, steps=5000, callbacks=[Until(lambda step: step >= steps)])
    assert equal(adapter, adapter_of(simulated))
    assert torch.equal(tokens, text(simulated))


def test_a_tenant_trains_with_an_executor_that_chose_its_layer_and_is_listed_by_a_registry_only(
    llama: Path, open_model: Open, train: Train, tmp_path: Path
) -> None:
    """Layer 1 is served by nobody else."""
    options: dict[str, dict[str, object]] = {"executor": {"threads": 1}}
    only_0 = {"executor": "0"}
    run = tmp_path / "run"
    with LocalFederation(llama, run, layers=only_0, registry=True, provider_options=options) as federation:
        federation.add("found", layers="auto:1", listed=False)
        model = open_model(llama, RemoteConfig(federation=federation.federation))
        train(model, steps=2)
        adapter = adapter_of(model)
    simulated = open_model(llama, RemoteConfig(masking="simulate"))
    train(simulated, steps=2)
    assert equal(adapter, adapter_of(simulated))


class Until(TrainerCallback):
    """Ends training when `over(step)` is true; the schedule of the learning rate is that of longer training."""

    def __init__(self, over: Callable[[int], bool]) -> None:
        self.over = over

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = self.over(state.global_step)
