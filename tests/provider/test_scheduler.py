"""The scheduler as a pure object: whose rows are taken, in which order, and how long anybody waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.scheduler import Job, Key, Piece, Policy, PolicyName, Scheduler, Stage
from symbiosis_priv.ring import Direction

POLICIES = get_args(PolicyName)
STAGES = get_args(Stage)
ROW_WORK = 1000
SLICE_ROWS = 8
RATE = 2e9  # what a scheduler assumes at first
POLICY = Policy(slice_s=SLICE_ROWS * ROW_WORK / RATE, max_wait_s=0.002)


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
) -> Job:
    return Job(
        tenant=tenant,
        stage=stage,
        key=(group, direction, "ring"),
        rows=rows,
        row_work=ROW_WORK,
        row_cost=ROW_WORK,
        arrival=arrival,
        deadline=deadline,
        weight=weight,
        ready=rows if ready is None else ready,
    )


def scheduler(name: PolicyName = "opportunistic", **changes: Any) -> Scheduler[Job]:
    return Scheduler(replace(POLICY, name=name, **changes))


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Jobs of a few tenants, groups and sizes, in order of arrival."""
    arrival, drawn = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        arrival += draw(st.sampled_from((0.0, 0.0, 1e-4, 0.01)))
        drawn.append(
            job(
                draw(st.sampled_from("abcd")),
                rows=draw(st.sampled_from((0, 1, 2, 7, 8, 9, 40))),
                group=draw(st.integers(0, 2)),
                direction=draw(st.sampled_from(("forward", "backward"))),
                stage=draw(st.sampled_from(STAGES)),
                arrival=arrival,
            )
        )
    return drawn


def run(subject: Scheduler[Job], arriving: list[Job]) -> list[tuple[float, list[Piece[Job]]]]:
    """Play the executor on a clock of its own; every batch with the time at which it began."""
    now, waiting, batches = 0.0, list(arriving), []
    while waiting or len(subject):
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
        assert min(times) > now  # or the executor would spin
        now = min(times)
    return batches


@given(jobs(), st.sampled_from(POLICIES))
def test_every_row_is_taken_once_and_in_order(arriving: list[Job], name: PolicyName) -> None:
    batches = run(scheduler(name), arriving)
    taken: dict[int, int] = Counter()
    for _, pieces in batches:
        for piece in pieces:
            assert piece.start == taken[id(piece.job)]
            taken[id(piece.job)] = piece.stop
    assert all(taken[id(j)] == j.rows == j.taken for j in arriving)
    assert {id(p.job) for _, pieces in batches for p in pieces} == {id(j) for j in arriving}


@given(jobs(), st.sampled_from(POLICIES), st.integers(1, 10))
def test_a_batch_is_of_one_kind_and_bounded(arriving: list[Job], name: PolicyName, max_rows: int) -> None:
    for _, pieces in run(scheduler(name, max_batch_rows=max_rows), arriving):
        assert len({p.job.key for p in pieces}) == 1
        assert len({id(p.job) for p in pieces}) == len(pieces)
        assert sum(p.rows for p in pieces) <= min(max_rows, SLICE_ROWS)
        if name == "none":
            assert len(pieces) == 1


@given(jobs())
def test_fine_tuning_does_not_ride_with_inference(arriving: list[Job]) -> None:
    for _, pieces in run(scheduler(), arriving):
        if pieces[0].job.stage == "inference":
            assert {p.job.stage for p in pieces} == {"inference"}


@given(jobs(), st.sampled_from(POLICIES))
def test_nothing_waits_for_company_longer_than_the_policy_allows(arriving: list[Job], name: PolicyName) -> None:
    """Work conserving within policy: whoever goes after idle time has been there, while nothing was multiplied, for no
    longer than its wait.
    """
    subject = scheduler(name)
    longest = {"none": 0.0, "opportunistic": POLICY.max_wait_s, "lockstep": POLICY.lockstep_wait_s}[name]
    end = 0.0
    for begun, pieces in run(subject, arriving):
        if begun > end:  # it was idle until now
            late = max(begun - max(end, p.job.arrival) - longest for p in pieces)
            assert late <= 1e-9, late
        end = begun + sum(p.rows for p in pieces) * ROW_WORK / RATE


@given(
    st.lists(st.sampled_from((1, 2, 8, 30, 200)), min_size=2, max_size=4),
    st.sampled_from(POLICIES),
    st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=4, max_size=4),
)
def test_tenants_with_work_waiting_get_equal_shares(sizes: list[int], name: PolicyName, weights: list[float]) -> None:
    """Whatever the size of their requests and the number of their connections: by rows per weight, to a slice."""
    subject = scheduler(name)
    served: Counter[object] = Counter()
    if name == "lockstep":  # its order is by layer group; within one, by arrival
        weights = [1.0] * 4

    def ask(tenant: int) -> None:  # a group of its own, so that nobody rides
        subject.put(job(str(tenant), rows=sizes[tenant], group=tenant, stage="fine_tuning", weight=weights[tenant]))

    for tenant in range(len(sizes)):
        for _ in range(tenant + 1):
            ask(tenant)
    for _ in range(300):
        pieces = subject.take(1.0)
        for piece in pieces:
            served[piece.job.tenant] += piece.rows
            if piece.last:
                ask(int(str(piece.job.tenant)))
        if name != "lockstep":
            shares = [served[str(t)] / weights[t] for t in range(len(sizes))]
            assert max(shares) - min(shares) <= 2 * SLICE_ROWS / min(weights)
    assert sum(served.values())


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    subject = scheduler("none")
    subject.put(job("busy", rows=800, stage="fine_tuning"))
    for _ in range(90):
        subject.take(1.0)
    subject.put(job("new", rows=800, group=1, stage="fine_tuning"))
    turns = [subject.take(1.0)[0].job.tenant for _ in range(20)]
    assert 9 <= turns.count("new") <= 11


def test_inference_goes_ahead_and_starves_nobody() -> None:
    """Both want everything: by their weights."""
    subject = scheduler("none", inference_weight=4.0)
    served: Counter[str] = Counter()
    subject.put(job("trainer", rows=10_000, stage="fine_tuning"))
    for _ in range(200):
        while subject.waiting()["inference"] < 3:
            subject.put(job("chat", rows=4, group=1))
        for piece in subject.take(1.0):
            served[piece.job.stage] += piece.rows
    assert served["inference"] / served["fine_tuning"] == pytest.approx(4, rel=0.2)


def test_one_row_of_inference_overtakes_what_waits() -> None:
    subject = scheduler()
    for tenant in "abc":
        subject.put(job(tenant, rows=1000, stage="fine_tuning"))
    for _ in range(10):
        subject.take(1.0)
    subject.put(job("chat", rows=1, group=5, arrival=1.0))
    assert subject.take(1.0)[0].job.tenant == "chat"


def test_a_job_waits_for_who_is_expected_and_no_longer() -> None:
    subject = scheduler(slice_s=1.0, max_wait_s=1.0, wait_share=0.5)
    wait = 0.5 * 100 * ROW_WORK / RATE
    first, second = job("alice", rows=100, arrival=1.0), job("bob", rows=100, arrival=1.0 + wait / 2)
    subject.put(job("bob", arrival=1.0))
    subject.done(subject.take(1.0), now=1.0, seconds=1e-6)  # bob was here a moment ago
    subject.put(first)
    assert subject.take(1.0) == []
    assert subject.next_deadline(1.0) == pytest.approx(1.0 + wait)
    subject.put(second)
    assert [p.job for p in subject.take(second.arrival)] == [first, second]  # at once: nobody else is expected


def served_in_order(subject: Scheduler[Job], tenant: str, groups: int, *, pause: float, stage: Stage) -> float:
    """A tenant goes through a model, `pause` between an answer and the next request; returns when it has its last."""
    now = 1.0
    for group in range(groups):
        subject.put(job(tenant, group=group, stage=stage, arrival=now))
        pieces: list[Piece[Job]] = []
        while not pieces:
            pieces = subject.take(now)
            now = max(now, subject.next_deadline(now) or now) if not pieces else now
        subject.done(pieces, now=now, seconds=1e-6)
        now += pause
    return now - pause


def test_nobody_waits_for_who_will_ask_for_something_else() -> None:
    """Bob goes from group 0 to 1 to 2 to 3: he is expected at 3, soon, and nowhere else."""
    patient: dict[str, Any] = {"slice_s": 1.0, "max_wait_s": 0.01, "wait_share": 1e6}
    for group, waits in ((3, True), (2, False), (0, False)):
        subject = scheduler(**patient)
        served_in_order(subject, "bob", 4, pause=0.001, stage="inference")
        now = served_in_order(subject, "bob", 3, pause=0.001, stage="inference")
        subject.put(job("alice", group=group, arrival=now))
        assert (subject.take(now) == []) == waits
        if waits:  # but not when he is late
            assert subject.take(now + 0.0021) != []


def test_fine_tuning_waits_a_moment_for_a_tenant_that_generates() -> None:
    """When it has had its share, between two requests of the other; and no longer than it may."""
    subject = scheduler()
    now = served_in_order(subject, "chat", 4, pause=0.001, stage="inference")
    subject.put(job("trainer", rows=500, group=1, stage="fine_tuning", arrival=now))
    slices = 0
    while pieces := subject.take(now):
        slices += 1
        subject.done(pieces, now=now, seconds=SLICE_ROWS * ROW_WORK / RATE)
    assert slices < 10
    again = subject.next_deadline(now)
    assert again is not None
    assert now < again <= now + POLICY.max_wait_s
    assert subject.take(again)[0].job.tenant == "trainer"


def test_a_tenant_alone_waits_for_nobody() -> None:
    subject = scheduler(max_wait_s=10.0, wait_share=10.0)
    for turn in range(5):
        subject.put(job("alice", rows=5, arrival=float(turn)))
        pieces = subject.take(float(turn))
        assert len(pieces) == 1
        subject.done(pieces, now=turn + 0.1, seconds=0.1)


def test_the_larger_batch_goes_first_and_nobody_is_passed_over_for_longer_than_a_slice() -> None:
    subject = scheduler(slice_s=0.01)
    subject.put(job("alone", group=1))
    for tenant in "abc":
        subject.put(job(tenant, group=2))
    assert {p.job.tenant for p in subject.take(0.005)} == {"a", "b", "c"}
    for tenant in "abc":
        subject.put(job(tenant, group=2, arrival=0.006))
    assert [p.job.tenant for p in subject.take(0.011)] == ["alone"]
    for _ in range(3):
        subject.put(job("many", group=3, arrival=0.012))  # three connections are one tenant
    subject.put(job("d", group=2, arrival=0.012))
    assert {p.job.tenant for p in subject.take(0.012)} == {"a", "b", "c", "d"}


def test_lockstep_lets_those_behind_go_first() -> None:
    subject = scheduler("lockstep")
    ahead, behind = job("alice", group=3), job("bob", group=1)
    subject.put(ahead)
    subject.put(behind)
    assert subject.take(0.0)[0].job is behind
    subject.put(job("bob", group=3))
    assert {p.job.tenant for p in subject.take(0.0)} == {"alice", "bob"}


@given(jobs(), st.lists(st.integers(0, 29)), st.sampled_from(POLICIES))
def test_dropped_and_expired_jobs_are_forgotten(arriving: list[Job], dropped: list[int], name: PolicyName) -> None:
    subject = scheduler(name)
    for number, one in enumerate(arriving):
        one.deadline = 5.0 if number % 3 else 50.0
        subject.put(one)
    gone = [arriving[i] for i in dropped if i < len(arriving)]
    for one in gone:
        subject.drop(one)
        subject.drop(one)  # once more does nothing
    subject.take(1.0)
    expired = subject.expire(5.0)
    assert all(one.deadline == 5.0 and one not in gone for one in expired)
    subject.expire(50.0)
    assert not len(subject)
    assert subject.take(60.0) == []
    assert subject.next_deadline(60.0) is None
    assert set(subject.waiting().values()) == {0}


def test_rows_that_are_not_there_yet_are_not_taken() -> None:
    subject = scheduler()
    effect = job(rows=10, ready=0)
    subject.put(effect)
    assert subject.take(1.0) == []
    subject.make_ready(effect, 3)
    assert [(p.start, p.stop) for p in subject.take(1.0)] == [(0, 3)]
    assert subject.take(1.0) == []
    subject.make_ready(effect, 7)
    assert [(p.start, p.stop) for p in subject.take(1.0)] == [(3, 10)]
    assert effect.left
    subject.make_ready(effect, 1)
    assert subject.take(1.0) == []


def test_slices_follow_the_pace() -> None:
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    big = job(rows=1000)
    for _ in range(20):  # a fast machine
        subject.pace.record(key, rows=100, work=100 * ROW_WORK, seconds=100 * ROW_WORK / (RATE * 8))
    before = subject.pace.rows(big)
    for _ in range(20):  # what a single row takes longer for is not said of many
        subject.pace.record(key, rows=1, work=ROW_WORK, seconds=1.0)
    assert subject.pace.rows(big) >= before // 8
    subject.pace.record(key, rows=100, work=100 * ROW_WORK, seconds=100.0)  # one hiccup
    assert subject.pace.rows(big) >= 1


def test_a_pace_that_has_collapsed_recovers() -> None:
    """A machine that was busy for a while: slices stay large enough to notice when it is not any more."""
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    big = job(rows=1000)
    for seconds in [1e3] * 40 + [1e-9] * 60:
        rows = subject.pace.rows(big)
        subject.pace.record(key, rows=rows, work=rows * ROW_WORK, seconds=rows * seconds)
    assert subject.pace.rows(big) > 1000
