"""Runs the same work with the whole model and with split models by turns, each in a separate process.

A turn ends when all processes are idle again, so a turn's cost includes the pads that a session draws for its next
step.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import process_costs
from tenant.bench.children import Child
from tenant.bench.cli_options import Effort
from tenant.bench.llama import Llama
from tenant.bench.providers import provide, relayed, remote_config
from tenant.bench.tenant_process import Cost, Task, serve_tenant

WHOLE = "whole"
TURN_S = 600.0
_POLL_S, _IDLE_S, _IDLE_POLLS = 0.1, 0.02, 3  # idle: less CPU time than _IDLE_S in each of _IDLE_POLLS polls


@dataclass(frozen=True, kw_only=True)
class TurnCost:
    """The cost of one task.

    Args:
        moved_mib: bytes that the tenant sent and received, in MiB.
        tenant_cpu_s, executor_cpu_s, helper_cpu_s: CPU seconds until all processes were idle again.
    """

    seconds: list[float]
    moved_mib: float
    tenant_cpu_s: float
    executor_cpu_s: float
    helper_cpu_s: float


class Contest:
    """Running providers and tenants; made by `contest`."""

    def __init__(self, local: LocalFederation, tenants: dict[str, Child[Task, list[Cost]]]) -> None:
        self._providers = [local.pid("executor") or 0, local.pid("helper") or 0]
        self._tenants = tenants

    def turn(self, name: str, task: Task) -> TurnCost:
        """Let one tenant do a task while the others wait."""
        pids = self._pids(name)
        before = _cpu(pids)
        costs = self._tenants[name].ask(task, timeout_s=TURN_S)
        spent = [now - then for now, then in zip(_cpu_when_idle(pids), before, strict=True)]
        moved = sum(n for cost in costs for name, n in cost.counted.items() if name.startswith("bytes_"))
        seconds = [cost.seconds for cost in costs]
        return TurnCost(
            seconds=seconds,
            moved_mib=moved / 2**20,
            tenant_cpu_s=spent[0],
            executor_cpu_s=spent[1],
            helper_cpu_s=spent[2],
        )

    def peaks_mib(self, name: str) -> list[float]:
        """Peak memory so far of a tenant, the executor and the helper."""
        return [process_costs.peak_mib([pid]) for pid in self._pids(name)]

    def _pids(self, name: str) -> list[int]:
        return [self._tenants[name].pid, *self._providers]


def _cpu(pids: Sequence[int]) -> list[float]:
    return [process_costs.cpu_seconds([pid]) for pid in pids]


def _cpu_when_idle(pids: Sequence[int]) -> list[float]:
    until = time.monotonic() + TURN_S
    polls, last = 0, _cpu(pids)
    while polls < _IDLE_POLLS:
        if time.monotonic() > until:
            raise DeadlineExceededError(f"the processes are still busy {TURN_S:g} s after the answer")
        time.sleep(_POLL_S)
        now = _cpu(pids)
        polls = polls + 1 if sum(now) - sum(last) < _IDLE_S else 0
        last = now
    return last


@contextmanager
def contest(directory: Path, shape: Llama, maskings: Sequence[str], effort: Effort) -> Iterator[Contest]:
    """Start an executor, a helper, the whole model (WHOLE), and a tenant for each masking, by its name.

    Args:
        maskings: masking schemes of the split tenants.
        effort: threads of each process, and memory of each split tenant for pads.
    """
    process_costs.check_supported()
    model = shape.save(directory / "model")
    providers = provide(model, directory, threads=effort.threads, relay=relayed(maskings))
    with providers as local, contextlib.ExitStack() as stack:
        remotes = {WHOLE: None, **{masking: remote_config(local, masking, effort) for masking in maskings}}
        tenants = {
            name: stack.enter_context(Child(f"tenant {name}", serve_tenant, model, remote, effort.threads)).wait_ready()
            for name, remote in remotes.items()
        }
        yield Contest(local, tenants)
