"""The same work by the whole model here and by split ones, each in a process of its own, by turns.

A turn ends when everybody is idle again: the pads that a session draws for its next step are part of what this one
costs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.system import processes as start
from tenant.bench import processes
from tenant.bench.pipes import read_line
from tenant.bench.worker import Cost, Setup, Task

WHOLE = "whole"
START_S, _TURN_S = 900.0, 600.0
_POLL_S, _IDLE_S, _IDLE_POLLS = 0.1, 0.02, 3  # idle: less CPU than this in each of so many polls
_HEAD = 64  # dimensions of an attention head
_TAIL = 2000  # characters of a log that an error quotes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama: `width`, `inner` (of the MLP) and the number of layers. One key head for four query heads."""

    width: int
    layers: int
    inner: int

    def config(self) -> LlamaConfig:
        """The vocabulary is small, because its head is not what is measured."""
        heads = max(1, self.width // _HEAD)
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            vocab_size=4096,
            tie_word_embeddings=True,
        )

    def save(self, folder: Path) -> Path:
        """Write it with random weights."""
        torch.manual_seed(0)
        LlamaForCausalLM(self.config()).save_pretrained(folder)
        return folder


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one task has cost.

    Args:
        seconds: as the tenant has measured them: of a step, or of each token.
        tenant_cpu_s, executor_cpu_s, helper_cpu_s: until everybody was idle again.
    """

    seconds: list[float]
    tenant_cpu_s: float
    executor_cpu_s: float
    helper_cpu_s: float


class Contest:
    """Providers and tenants that run; from `contest`."""

    def __init__(self, local: LocalFederation, tenants: dict[str, Tenant]) -> None:
        self._providers = {name: [local.pid(name) or 0] for name in local.names}
        self._tenants = tenants

    def turn(self, name: str, task: Task) -> Turn:
        """Let one tenant do something while the others wait."""
        tenant = self._tenants[name]
        before = self._cpu(tenant)
        seconds = [cost.seconds for cost in tenant.do(task)]
        after = self._when_idle(tenant)
        spent = [now - then for now, then in zip(after, before, strict=True)]
        return Turn(seconds=seconds, tenant_cpu_s=spent[0], executor_cpu_s=spent[1], helper_cpu_s=spent[2])

    def peaks_mib(self, name: str) -> tuple[float, float, float]:
        """Peak memory so far of a tenant, the executor and the helper."""
        return (
            processes.peak_mib([self._tenants[name].pid]),
            processes.peak_mib(self._providers["executor"]),
            processes.peak_mib(self._providers["helper"]),
        )

    def _cpu(self, tenant: Tenant) -> tuple[float, float, float]:
        return (
            processes.cpu_seconds([tenant.pid]),
            processes.cpu_seconds(self._providers["executor"]),
            processes.cpu_seconds(self._providers["helper"]),
        )

    def _when_idle(self, tenant: Tenant) -> tuple[float, float, float]:
        until = time.monotonic() + _TURN_S
        polls, last = 0, self._cpu(tenant)
        while polls < _IDLE_POLLS:
            if time.monotonic() > until:
                raise DeadlineExceededError(f"the processes are still busy {_TURN_S:g} s after the answer")
            time.sleep(_POLL_S)
            now = self._cpu(tenant)
            polls = polls + 1 if sum(now) - sum(last) < _IDLE_S else 0
            last = now
        return last


class Tenant:
    """A `worker` as a child process. A context manager.

    Args:
        name: for its log and messages.
        setup: what it loads.
        directory: for its log.
        start: makes the command that starts it of that which would start it here.
    """

    def __init__(
        self,
        name: str,
        setup: Setup,
        directory: Path,
        *,
        start: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self._name = name
        self._setup = setup
        self._start = start
        self._log = directory / f"tenant-{name.replace(' ', '-')}.log"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def do(self, task: Task) -> list[Cost]:
        """See `worker.Tenant.do`."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        return self._answer(_TURN_S)

    def _answer(self, timeout_s: float) -> list[Cost]:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, timeout_s=timeout_s, whose=repr(self._name))
        if line is None:
            raise SymbiosisError(f"{self._name!r} has ended: {self._log.read_text(errors='replace')[-_TAIL:]}")
        return msgspec.json.decode(line, type=list[Cost])

    def __enter__(self) -> Self:
        command = start.command("tenant.bench.worker", msgspec.json.encode(self._setup).decode())
        threads = {"OMP_NUM_THREADS": str(self._setup.threads), "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._start(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**os.environ, **threads},
            )
        try:
            self._answer(START_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._process.stdout.close()


@contextmanager
def contest(
    directory: Path, shape: Shape, maskings: Sequence[str], *, threads: int, pool_memory_mib: int
) -> Iterator[Contest]:
    """Start everybody: an executor, a helper, the whole model (WHOLE), and a tenant per masking, by its name.

    Args:
        directory: new or empty.
        shape: of the model.
        maskings: of the split tenants.
        threads: torch threads of each process.
        pool_memory_mib: of each split tenant, for pads drawn ahead.
    """
    processes.check_supported()
    model = shape.save(directory / "model")
    options = {"executor": {"threads": threads}}
    with (
        LocalFederation(model, directory / "federation", provider_options=options, deadline_s=START_S) as local,
        contextlib.ExitStack() as stack,
    ):
        tenants = {}
        for name, masking in [(WHOLE, None), *((masking, masking) for masking in maskings)]:
            setup = Setup(
                model=str(model),
                masking=masking,
                federation=str(local.federation),
                cache=str(local.directory / "cache"),
                threads=threads,
                pool_memory_mib=pool_memory_mib,
            )
            tenants[name] = stack.enter_context(Tenant(name, setup, directory))
        yield Contest(local, tenants)
