"""Adapters of several methods for the endpoint's Llama, and a sink that keeps events."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant import RemoteConfig
from tenant.endpoint.engine.queued import Engine
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed, Token, TokenLogprob
from tenant.model.loading import load_language_model
from tenant.tasks import Tasks
from tests.adapters import METHODS, write_adapter

NAMES = ("lora", "lora-b", "lora-r8", "ia3", "oft", "bottleneck", "diff-pruning")
"""Tasks; the last two are of methods of PetS."""


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of each method."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(load_language_model(checkpoint), folder / name, METHODS[name], seed=seed)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tasks(model: Any, adapters: Path) -> Iterator[Tasks]:
    tasks = Tasks(model)
    tasks.register_all(adapters)
    yield tasks
    tasks.close()


def generated(model: Any, prompt: tuple[int, ...], new: int) -> list[int]:
    """The greedy tokens of transformers' `generate()`."""
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class OnlyThese:
    """A grammar that allows some tokens, and ends after two."""

    def __init__(self, *allowed: int) -> None:
        self._allowed, self.accepted = allowed, list[int]()

    def allowed(self) -> bytes:
        bits = bytearray(1)
        for token in self._allowed:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return len(self.accepted) == 2


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
