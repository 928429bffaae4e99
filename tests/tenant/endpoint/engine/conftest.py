"""Adapters of several methods for the endpoint's Llama, and a sink that keeps events."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, get_peft_model

from tenant.endpoint.engine.requests import Done, Engine, EngineRequest, Event, Failed, Token, TokenLogprob
from tenant.model.loading import load_language_model
from tenant.tasks.methods import BottleneckConfig, DiffPruningConfig

ATTENTION = ["q_proj", "v_proj"]
METHODS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
    "lora-b": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
    "lora-r8": LoraConfig(r=8, target_modules=ATTENTION),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "bottleneck": BottleneckConfig(bottleneck_dim=6, target_modules=["o_proj", "down_proj"]),
    "diff-pruning": DiffPruningConfig(density=0.05, target_modules=ATTENTION),
}
"""By task name; the last two are methods of PetS."""

WriteAdapter = Callable[[Path, PeftConfig, int], Path]


@pytest.fixture(scope="session")
def write_adapter(checkpoint: Path) -> WriteAdapter:
    """`write_adapter(folder, config, seed)`: an adapter with random parameters."""

    def write(folder: Path, config: PeftConfig, seed: int) -> Path:
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(load_language_model(checkpoint), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def adapters(write_adapter: WriteAdapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of each method."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate(METHODS.items()):
        write_adapter(folder / name, config, seed)
    return folder


class Asked:
    """A request in an engine, and its events.

    Args:
        engine: the engine.
        prompt: token ids.
        at: by number of tokens: what to do when so many have come, in the engine's thread.
        said: other fields of the request.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: tuple[int, ...],
        *,
        at: Mapping[int, Callable[[], object]] | None = None,
        **said: Any,
    ) -> None:
        self.events: list[Event] = []
        self.got: list[Token] = []
        self._ended = threading.Event()
        self._at = at or {}
        self.handle = engine.submit(EngineRequest(id="test", prompt=prompt, **said), self._take)

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Token):
            self.got.append(event)
            if (act := self._at.get(len(self.got))) is not None:
                act()
        elif isinstance(event, Done | Failed):
            self._ended.set()

    def last(self) -> Event:
        """Wait for the last event."""
        assert self._ended.wait(60)
        return self.events[-1]

    def done(self) -> Done:
        last = self.last()
        assert isinstance(last, Done), last
        return last

    def error(self) -> Exception:
        last = self.last()
        assert isinstance(last, Failed), last
        return last.error

    @property
    def tokens(self) -> list[int]:
        self.done()
        return [token.id for token in self.got]

    @property
    def logprobs(self) -> list[TokenLogprob | None]:
        self.done()
        return [token.logprob for token in self.got]
