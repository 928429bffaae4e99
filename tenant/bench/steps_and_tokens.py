"""`bench step` and `bench token`: a fine-tuning step and a generated token, whole and split, by turns.

The whole model and each split model is a separate process. A turn ends when all processes are idle again, so a turn's
cost includes the pads that a session draws for its next step.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench.cli_options import Effort
from tenant.bench.measured_models import Llama
from tenant.bench.processes import process_costs
from tenant.bench.processes.children import Child
from tenant.bench.processes.providers import provide, relayed, remote_config
from tenant.bench.processes.tenant_process import Cost, Generate, Step, Task, serve_tenant
from tenant.bench.results.result_file import Row

WHOLE = "whole"
TURN_S = 600.0
_WARM_UP = 1
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


class Comparison:
    """Running providers and tenants, made by `comparison`."""

    def __init__(self, local: LocalFederation, tenants: dict[str, Child[Task, list[Cost]]]) -> None:
        self._providers = [local.pid("executor") or 0, local.pid("helper") or 0]
        self._tenants = tenants

    def turn(self, name: str, task: Task) -> TurnCost:
        """Let one tenant run a task while the others wait."""
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
        """Return the peak memory in MiB of a tenant, the executor and the helper."""
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
def comparison(directory: Path, shape: Llama, maskings: Sequence[str], effort: Effort) -> Iterator[Comparison]:
    """Context manager: start an executor, a helper, the whole model (named `WHOLE`), and a tenant for each masking.

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
        yield Comparison(local, tenants)


def measure_step(
    running: Comparison,
    shape: Llama,
    task: Step,
    maskings: Sequence[str],
    *,
    repeat: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """Measure, and return a row per variant with medians over `repeat` turns, after a warm-up turn.

    Args:
        running: a comparison with a tenant per masking scheme.
    """
    turns = _turns(running, task, [WHOLE, *maskings], repeat=repeat, on_turn=on_turn)
    cpu = {name: _median(turns[name], lambda turn: turn.tenant_cpu_s) for name in turns}
    rows: list[Row] = []
    for name in turns:
        tenant, executor, helper = running.peaks_mib(name)
        split = name != WHOLE
        rows.append(
            {
                **_shape(shape),
                "batch": task.batch,
                "tokens": task.tokens,
                "variant": _variant(name),
                "wall_s": _median(turns[name], lambda turn: sum(turn.seconds)),
                "moved_mib": _median(turns[name], lambda turn: turn.moved_mib) if split else None,
                "tenant_cpu_s": cpu[name],
                "executor_cpu_s": _median(turns[name], lambda turn: turn.executor_cpu_s) if split else None,
                "helper_cpu_s": _median(turns[name], lambda turn: turn.helper_cpu_s) if split else None,
                "tenant_cpu_over_whole": _ratio(cpu[name], cpu[WHOLE]),
                "tenant_peak_mib": tenant,
                "executor_peak_mib": executor if split else None,
                "helper_peak_mib": helper if split else None,
            }
        )
    return rows


def measure_token(
    running: Comparison,
    shape: Llama,
    task: Generate,
    maskings: Sequence[str],
    *,
    repeat: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """Measure, and return a row per variant with medians over all tokens of `repeat` turns. Arguments as for
    `measure_step`."""
    turns = _turns(running, task, [WHOLE, *maskings], repeat=repeat, on_turn=on_turn)
    millis = {name: 1e3 * statistics.median(s for turn in turns[name] for s in turn.seconds) for name in turns}
    return [
        {
            **_shape(shape),
            "prompt": task.prompt,
            "tokens": task.tokens,
            "variant": _variant(name),
            "token_ms": millis[name],
            "moved_mib": _median(turns[name], lambda turn: turn.moved_mib) / task.tokens if name != WHOLE else None,
            "token_over_whole": millis[name] / millis[WHOLE],
            "tenant_cpu_ms": 1e3 * _median(turns[name], lambda turn: turn.tenant_cpu_s) / task.tokens,
        }
        for name in turns
    ]


def _turns(
    running: Comparison, task: Task, names: Sequence[str], *, repeat: int, on_turn: Callable[[str], None]
) -> dict[str, list[TurnCost]]:
    turns: dict[str, list[TurnCost]] = {name: [] for name in names}
    for turn in range(_WARM_UP + repeat):
        for name in names:
            on_turn(f"{_variant(name)}, turn {turn + 1} of {_WARM_UP + repeat}")
            turns[name].append(running.turn(name, task))
    return {name: done[_WARM_UP:] for name, done in turns.items()}


def _variant(name: str) -> str:
    return "whole, fp32" if name == WHOLE else f"split, {name}"


def _median(turns: Sequence[TurnCost], figure: Callable[[TurnCost], float]) -> float:
    return statistics.median(map(figure, turns))


def _ratio(part: float, whole: float) -> float | None:
    """Return the ratio; None if `whole` is 0, because the CPU clock has a resolution of 0.01 s."""
    return part / whole if whole else None


def _shape(shape: Llama) -> Row:
    return {"width": shape.width, "inner": shape.inner, "layers": shape.layers}
