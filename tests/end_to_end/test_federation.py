"""Executors and helpers that are killed, or that move to other layers, while a tenant trains: the bits are those of the
simulation."""

import itertools
import random
import re
import statistics
import threading
import time
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
from tests.end_to_end.comparing import adapter_of, equal
from tests.end_to_end.conftest import Open, Train
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


def test_an_executor_moves_to_other_layers_while_a_tenant_trains(
    llama: Path, open_model: Open, train: Train, tmp_path: Path
) -> None:
    """Layer 1 has one operator and layer 0 gets a third one, so the executor that chose layer 0 moves to layer 1. The
    tenant trains until after the move, and has the bits of the simulation. Prints the pause that it had.
    """
    options: dict[str, dict[str, object]] = {
        "registry": {"rebalance_s": 1.0, "capacity_layers": 1},
        "executor": {"threads": 1},
    }
    with LocalFederation(llama, tmp_path / "run", registry=True, provider_options=options) as federation:
        federation.add("mover", layers="auto", listed=False)
        ends: list[float] = []  # of the steps

        class UntilMoved(TrainerCallback):
            """Ends training four steps after the move."""

            moved = 0

            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                ends.append(time.monotonic())
                if len(ends) == 2:
                    federation.add("third", layers="0", listed=False)
                if not self.moved and federation.logs("mover").count('"event": "started"') == 2:
                    self.moved = len(ends)
                control.should_training_stop = bool(self.moved) and len(ends) == self.moved + 4

        remote = RemoteConfig(federation=federation.federation, masking="pad")
        model = open_model(llama, remote)
        train(model, steps=5000, callbacks=[UntilMoved()])
        announced = re.findall(r'"event": "announced".*"layers": "(.*?)"', federation.logs("mover"))
        assert (announced[0], announced[-1]) == ("0", "1")
        adapter = adapter_of(model)
    steps_s = [end - begin for begin, end in itertools.pairwise(ends[2:])]
    print(f"a step beside the move, s: median {statistics.median(steps_s):.3f}, longest {max(steps_s):.3f}")
    simulated = open_model(llama, RemoteConfig(masking="simulate"))
    train(simulated, steps=5000, callbacks=[Until(lambda step: step >= len(ends))])
    assert equal(adapter, adapter_of(simulated))


class Until(TrainerCallback):
    """Ends training when `over(step)` is true; the schedule of the learning rate is that of longer training."""

    def __init__(self, over: Callable[[int], bool]) -> None:
        self.over = over

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = self.over(state.global_step)
