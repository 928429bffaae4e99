"""A tenant with a model, for `Child`: runs steps, generates tokens, and returns the cost of each."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tenant.cli.options import quiet
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_model
from tenant.model.overlap import overlapped
from tenant.session.tally import Ledger


@dataclass(frozen=True, kw_only=True)
class Step:
    """Optimizer steps of LoRA on q and v, one after the other.

    Args:
        parts: number of parts of a batch, each with its own forward and backward pass.
        overlap: run all parts at the same time (`tenant.overlapped`).
    """

    batch: int
    tokens: int
    steps: int = 1
    parts: int = 1
    overlap: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate `tokens` tokens greedily after a prompt."""

    prompt: int
    tokens: int


Task = Step | Generate


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one step or one token.

    Args:
        counted: the increase of the session's ledger; empty for the whole model.
    """

    seconds: float
    counted: dict[str, float]


class _Tenant:
    def __init__(self, model: Path, remote: RemoteConfig | None) -> None:
        torch.manual_seed(0)
        base = load_model(model, remote=remote, dtype=torch.float32)
        self._backend = None if remote is None else backend_of(base)
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=8)
        self._model: Any = get_peft_model(base, lora)
        self._optimizer = torch.optim.AdamW((p for p in self._model.parameters() if p.requires_grad), lr=1e-4)

    def do(self, task: Task) -> list[Cost]:
        return self._steps(task) if isinstance(task, Step) else self._generate(task)

    def _steps(self, task: Step) -> list[Cost]:
        self._model.train()
        batches = [self._tokens(task.batch, task.tokens).chunk(task.parts) for _ in range(task.steps)]
        return [self._cost_of(partial(self._step, parts, overlap=task.overlap)) for parts in batches]

    def _step(self, parts: Sequence[torch.Tensor], *, overlap: bool) -> None:
        if overlap:
            overlapped(self._model, self._backward, parts)
        else:
            for ids in parts:
                self._backward(ids)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, labels=ids).loss.backward()

    @torch.no_grad()
    def _generate(self, task: Generate) -> list[Cost]:
        self._model.eval()
        self._output = self._model(input_ids=self._tokens(1, task.prompt), use_cache=True)
        return [self._cost_of(self._next_token) for _ in range(task.tokens)]

    def _next_token(self) -> None:
        latest = self._output.logits[:, -1:].argmax(-1)
        self._output = self._model(input_ids=latest, past_key_values=self._output.past_key_values, use_cache=True)

    def _cost_of(self, work: Callable[[], None]) -> Cost:
        before = self._ledger()
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        counted = since(before, self._ledger())
        numbers = {name: value for name, value in asdict(counted).items() if isinstance(value, int | float)}
        return Cost(seconds=seconds, counted=numbers)

    def _ledger(self) -> Ledger:
        return Ledger() if self._backend is None else ledger_of(self._model) or Ledger()

    def _tokens(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(self._model.config.vocab_size, (rows, columns), dtype=torch.long, device="cpu")

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


@contextmanager
def serve_tenant(model: Path, remote: RemoteConfig | None, threads: int) -> Iterator[Callable[[Task], list[Cost]]]:
    """The work of a `Child`: the handler runs a task and returns the cost of each of its steps or tokens.

    Args:
        remote: how to split the model; None for the whole model in float32 in this process.
    """
    quiet()
    torch.set_num_threads(threads)
    with contextlib.closing(_Tenant(model, remote)) as tenant:
        yield tenant.do
