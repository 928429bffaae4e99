"""`bench step` and `bench token`: a fine-tuning step and a generated token, whole and split."""

import statistics
from collections.abc import Callable, Sequence

from tenant.bench.contest import WHOLE, Contest, TurnCost
from tenant.bench.llama import Llama
from tenant.bench.result_file import Row
from tenant.bench.tenant_process import Generate, Step, Task

_WARM_UP = 1


def measure_step(
    running: Contest, shape: Llama, task: Step, maskings: Sequence[str], *, repeat: int, on_turn: Callable[[str], None]
) -> list[Row]:
    """A row per variant with medians over `repeat` turns, after a warm-up turn.

    Args:
        running: a contest with a tenant per masking scheme.
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
    running: Contest,
    shape: Llama,
    task: Generate,
    maskings: Sequence[str],
    *,
    repeat: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """A row per variant: medians over all tokens of `repeat` turns. The arguments are those of `measure_step`."""
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
    running: Contest, task: Task, names: Sequence[str], *, repeat: int, on_turn: Callable[[str], None]
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
    """The ratio; None if `whole` is 0, because the CPU clock counts hundredths of a second."""
    return part / whole if whole else None


def _shape(shape: Llama) -> Row:
    return {"width": shape.width, "inner": shape.inner, "layers": shape.layers}
