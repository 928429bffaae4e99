"""`bench step` and `bench token`: a fine-tuning step and a generated token, whole and split."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from tenant.bench.contest import LOCAL, Contest, Shape, Turn, contest
from tenant.bench.report import Value
from tenant.bench.worker import Generate, Step, Task

_WARM_UP = 1

Row = dict[str, Value]


def measure_steps(
    directory: Path,
    shape: Shape,
    tasks: Sequence[Step],
    maskings: Sequence[str],
    *,
    repeat: int,
    threads: int,
    pool_memory_mib: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """A row per task and contestant; medians over `repeat` turns, after one that warms up.

    Args:
        directory: new or empty.
        shape: of the model.
        tasks: batches.
        maskings: of the split tenants.
        repeat: turns.
        threads: torch threads of each process.
        pool_memory_mib: for pads drawn ahead.
        on_turn: told what is being measured.
    """
    with contest(directory, shape, maskings, threads=threads, pool_memory_mib=pool_memory_mib) as running:
        rows = []
        for task in tasks:
            turns = _turns(running, task, [LOCAL, *maskings], repeat=repeat, on_turn=on_turn)
            local = _median(turns[LOCAL], "tenant_cpu_s")
            for name in turns:
                tenant, executor, helper = running.peaks_mib(name)
                split = name != LOCAL
                rows.append(
                    {
                        **_shape(shape),
                        "batch": task.batch,
                        "tokens": task.tokens,
                        "variant": name,
                        "wall_s": statistics.median(sum(turn.seconds) for turn in turns[name]),
                        "tenant_cpu_s": _median(turns[name], "tenant_cpu_s"),
                        "executor_cpu_s": _median(turns[name], "executor_cpu_s") if split else None,
                        "helper_cpu_s": _median(turns[name], "helper_cpu_s") if split else None,
                        "tenant_cpu_over_local": _median(turns[name], "tenant_cpu_s") / local,
                        "tenant_peak_mib": tenant,
                        "executor_peak_mib": executor if split else None,
                        "helper_peak_mib": helper if split else None,
                    }
                )
        return rows


def measure_tokens(
    directory: Path,
    shape: Shape,
    task: Generate,
    maskings: Sequence[str],
    *,
    repeat: int,
    threads: int,
    pool_memory_mib: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """A row per contestant: medians over all tokens of `repeat` turns. Arguments as above."""
    with contest(directory, shape, maskings, threads=threads, pool_memory_mib=pool_memory_mib) as running:
        turns = _turns(running, task, [LOCAL, *maskings], repeat=repeat, on_turn=on_turn)
    medians = {name: _median_token_ms(turns[name]) for name in turns}
    return [
        {
            **_shape(shape),
            "prompt": task.prompt,
            "tokens": task.tokens,
            "variant": name,
            "token_ms": medians[name],
            "token_over_local": medians[name] / medians[LOCAL],
            "tenant_cpu_ms": 1e3 * _median(turns[name], "tenant_cpu_s") / task.tokens,
        }
        for name in turns
    ]


def _turns(
    running: Contest, task: Task, names: Sequence[str], *, repeat: int, on_turn: Callable[[str], None]
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(_WARM_UP + repeat):
        for name in names:
            on_turn(f"{name}, turn {turn + 1} of {_WARM_UP + repeat}")
            turns[name].append(running.turn(name, task))
    return {name: done[_WARM_UP:] for name, done in turns.items()}


def _median(turns: Sequence[Turn], figure: str) -> float:
    return statistics.median(getattr(turn, figure) for turn in turns)


def _median_token_ms(turns: Sequence[Turn]) -> float:
    return 1e3 * statistics.median(second for turn in turns for second in turn.seconds)


def _shape(shape: Shape) -> Row:
    return {"width": shape.width, "inner": shape.inner, "layers": shape.layers}
