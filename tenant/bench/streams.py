"""`bench endpoint`: many answers at once by the endpoint's engine, beside one after another with `generate()`.

All requests are submitted at the same time, over eight adapters (the base model, LoRA, IA3, OFT and an adapter of
PetS), to one session with masked rows. So the time to the first token of the second variant includes its queue.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, get_peft_model

from symbiosis_priv.harness.local import LocalFederation
from tenant.bench.cli_options import Effort
from tenant.bench.llama import Llama
from tenant.bench.result_file import Row
from tenant.endpoint.engine.opening import open_engine
from tenant.endpoint.engine.requests import Done, Engine, Event, Failed, Request, Token
from tenant.endpoint.engine.whole import WholeEngine
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_model
from tenant.session.tally import Ledger
from tenant.tasks import Tasks
from tenant.tasks.methods import BottleneckConfig

_START_S, _ANSWER_S = 900.0, 3600.0
_ATTENTION = ["q_proj", "v_proj"]
_ADAPTERS: Final[dict[str, PeftConfig]] = {
    "lora-1": LoraConfig(r=8, target_modules="all-linear"),
    "lora-2": LoraConfig(r=8, target_modules="all-linear"),
    "lora-3": LoraConfig(r=16, target_modules=_ATTENTION),
    "ia3-1": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ia3-2": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=32, target_modules=_ATTENTION),
    "bottleneck": BottleneckConfig(bottleneck_dim=16, target_modules=["o_proj", "down_proj"]),
}


def measure_streams(
    directory: Path,
    shape: Llama,
    *,
    streams: int,
    prompt: int,
    tokens: int,
    masking: str,
    effort: Effort,
    on_turn: Callable[[str], None],
) -> Iterator[Row]:
    """Measure both ways to answer, by turns in one session; the figures are those of all turns.

    Args:
        directory: new or empty folder.
        shape: shape of the model.
        streams: number of requests.
        prompt: tokens of each prompt; each turn has other prompts.
        tokens: new tokens of each answer.
        masking: the masking scheme.
        effort: turns, and torch threads of each process.
        on_turn: called with the name of the current measurement.
    """
    torch.set_num_threads(effort.threads)
    path = shape.save(directory / "model")
    on_turn("writing adapters")
    _write_adapters(path, directory / "adapters")
    options = {"executor": {"threads": effort.threads}}
    with LocalFederation(path, directory / "federation", provider_options=options, deadline_s=_START_S) as local:
        remote = RemoteConfig(
            federation=local.federation,
            masking=masking,
            cache=local.cache,
            pool_memory_mib=effort.pool_memory_mib,
        )
        model = load_model(path, remote=remote, dtype=torch.float32)
        tasks = Tasks(model)
        names = [None, *(task.name for task in tasks.register_all(directory / "adapters"))]
        tokenizer: Any = _NoText()
        ways: dict[str, Callable[[], Engine]] = {
            "one after another": lambda: WholeEngine(model, tokenizer, tasks=tasks, max_waiting=streams),
            "all together": lambda: open_engine(model, tokenizer, tasks=tasks),
        }
        found = {way: _Figures() for way in ways}
        for turn in range(effort.repeat + 1):
            for way, open_way in ways.items():
                on_turn(f"{way}, {f'turn {turn}' if turn else 'warming up'}")
                engine = open_way()
                size = streams if turn else 1
                requests = [_request(turn * streams + i, names[i % len(names)], prompt, tokens) for i in range(size)]
                figures = _Figures() if not turn else found[way]
                _measured(engine, model, requests, figures)
                engine.close()
        backend_of(model).close()
    slow = found["one after another"].per_s
    for way, figures in found.items():
        yield {
            "variant": way,
            "streams": streams,
            "prompt": prompt,
            "tokens": tokens,
            "tokens_per_s": figures.per_s,
            "over_one_after_another": figures.per_s / slow,
            "first_token_p50_s": figures.quantile(figures.first, 0.5),
            "first_token_p99_s": figures.quantile(figures.first, 0.99),
            "token_p50_ms": figures.quantile(figures.between, 0.5) * 1e3,
            "token_p99_ms": figures.quantile(figures.between, 0.99) * 1e3,
            "round_trips": figures.round_trips // effort.repeat,
        }


@dataclass
class _Figures:
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    round_trips: int = 0

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @staticmethod
    def quantile(times: list[float], part: float) -> float:
        return float(np.quantile(times, part))


class _NoText:
    """Stands for a tokenizer: the text of the answers is not measured."""

    def decode(self, *_: object, **__: object) -> str:
        return ""


def _measured(engine: Engine, model: Any, requests: list[Request], figures: _Figures) -> None:
    before, began = ledger_of(model) or Ledger(), time.perf_counter()
    answers = [_Answer(engine, request) for request in requests]
    for answer in answers:
        answer.wait()
        figures.tokens += len(answer.times)
        figures.first.append(answer.times[0] - began)
        figures.between += np.diff(answer.times).tolist()
    figures.seconds += time.perf_counter() - began
    figures.round_trips += since(before, ledger_of(model) or Ledger()).executor_round_trips


class _Answer:
    """A request, and the times of its tokens."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.times: list[float] = []
        self._last: Event | None = None
        self._ended = threading.Event()
        engine.submit(request, self._take)

    def wait(self) -> None:
        if not self._ended.wait(_ANSWER_S):
            raise TimeoutError
        if isinstance(self._last, Failed):
            raise self._last.error

    def _take(self, event: Event) -> None:
        if isinstance(event, Token):
            self.times.append(time.perf_counter())
        elif isinstance(event, Done | Failed):
            self._last = event
            self._ended.set()


def _request(number: int, adapter: str | None, prompt: int, tokens: int) -> Request:
    generator = np.random.default_rng(number)
    ids = tuple(generator.integers(1, 500, size=prompt).tolist())
    return Request(id=str(number), prompt=ids, adapter=adapter, max_tokens=tokens)


def _write_adapters(path: Path, folder: Path) -> None:
    torch.manual_seed(0)
    base = load_model(path, dtype=torch.float32)
    for name, config in _ADAPTERS.items():
        adapted: Any = get_peft_model(base, config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        adapted.save_pretrained(str(folder / name))
        base = adapted.unload()
