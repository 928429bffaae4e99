"""Runs schedulers with jobs of all sizes, including the smallest, and a simulated executor and clock."""

from typing import Any, get_args
from unittest.mock import patch

from hypothesis import strategies as st

from provider.scheduler.jobs import Job, Key, Piece, Stage
from provider.scheduler.scheduler import Scheduler
from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction


def separate(subject: Scheduler[Job]) -> Scheduler[Job]:
    """The scheduler, which multiplies every job separately from now on, for comparison."""
    leaders = subject._waiting.in_turn
    subject._next_leader = lambda now: (next((firsts[0] for _, firsts in leaders()), None), None)  # type: ignore[method-assign]
    subject._batch = lambda leader, room: [Piece.next_of(leader, room)]  # type: ignore[method-assign]
    return subject


STAGES = get_args(Stage)
ROW_WORK = 1000
SLICE_ROWS = 8
RATE = 2e9  # the scheduler's initial assumption
MAX_WAIT_S = 2e-3


def job(
    tenant: str = "alice",
    *,
    rows: int = 1,
    group: int = 0,
    direction: Direction = "forward",
    stage: Stage = "inference",
    arrival: float = 0.0,
    deadline: float = 1e9,
    weight: float = 1.0,
    ready: int | None = None,
    matrices: int | None = None,
) -> Job:
    return Job(
        tenant=tenant,
        stage=stage,
        key=Key(group, direction, "ring", by_expert=matrices is not None),
        rows=rows,
        row_work=ROW_WORK,
        row_cost=ROW_WORK,
        arrival=arrival,
        deadline=deadline,
        matrices=matrices or 1,
        weight=weight,
        ready=rows if ready is None else ready,
    )


def scheduler(
    *,
    reading: float = 0.0,
    slice_s: float = SLICE_ROWS * ROW_WORK / RATE,
    max_wait_s: float = MAX_WAIT_S,
    **constants: Any,
) -> Scheduler[Job]:
    """A scheduler that has learned how long reading weights takes. `constants`: those of the scheduler's module."""
    with patch.multiple("provider.scheduler.scheduler", SLICE_S=slice_s, MAX_WAIT_S=max_wait_s, **constants):
        subject: Scheduler[Job] = Scheduler()
    for direction in DIRECTIONS:
        for _ in range(60 if reading else 0):  # each measurement halves the distance
            subject.pace.record(Key(0, direction, "ring"), rows=1, work=ROW_WORK, seconds=max(reading, ROW_WORK / RATE))
    return subject


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Jobs of a few tenants, groups and sizes, in order of arrival."""
    arrival, drawn = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        arrival += draw(st.sampled_from((0.0, 0.0, 1e-4, 0.01)))
        drawn.append(
            job(
                draw(st.sampled_from("abcd")),
                rows=draw(st.sampled_from((1, 2, 7, 8, 9, 40))),
                group=draw(st.integers(0, 2)),
                direction=draw(st.sampled_from(("forward", "backward"))),
                stage=draw(st.sampled_from(STAGES)),
                arrival=arrival,
            )
        )
    return drawn


def run(subject: Scheduler[Job], arriving: list[Job]) -> list[tuple[float, list[Piece[Job]]]]:
    """Simulate the executor. Returns every batch with its start time."""
    now, waiting, batches = 0.0, list(arriving), []
    while waiting or subject._jobs:
        while waiting and waiting[0].arrival <= now:
            subject.put(waiting.pop(0))
        pieces = subject.take(now)
        if pieces:
            batches.append((now, pieces))
            seconds = sum(p.rows for p in pieces) * ROW_WORK / RATE
            now += seconds
            subject.done(pieces, now=now, seconds=seconds)
            continue
        times = [waiting[0].arrival] if waiting else []
        deadline = subject.next_deadline(now)
        times += [] if deadline is None else [deadline]
        assert times
        assert min(times) > now  # otherwise the executor would spin
        now = min(times)
    return batches
