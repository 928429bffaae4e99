"""The scheduler under every policy: all rows are taken once, in bounded products, in bounded time."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from provider.config.schema import PolicyName
from provider.scheduler.jobs import Job
from tests.provider.scheduler.playing import POLICIES, POLICY, RATE, ROW_WORK, SLICE_ROWS, job, jobs, run, scheduler


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


@given(jobs(), st.sampled_from(POLICIES))
def test_no_job_waits_to_be_batched_longer_than_the_policy_allows(arriving: list[Job], name: PolicyName) -> None:
    """A product that begins after idle time has jobs that have waited, while nothing was computed, within the limit."""
    subject = scheduler(name)
    longest = {"none": 0.0, "opportunistic": POLICY.max_wait_s, "lockstep": POLICY.lockstep_wait_ms / 1000}[name]
    end = 0.0
    for begun, pieces in run(subject, arriving):
        if begun > end:  # it was idle until now
            late = max(begun - max(end, p.job.arrival) - longest for p in pieces)
            assert late <= 1e-9, late
        end = begun + sum(p.rows for p in pieces) * ROW_WORK / RATE


@given(jobs(), st.lists(st.integers(0, 29)), st.sampled_from(POLICIES))
def test_dropped_and_expired_jobs_are_forgotten(arriving: list[Job], dropped: list[int], name: PolicyName) -> None:
    subject = scheduler(name)
    for number, one in enumerate(arriving):
        one.deadline = 5.0 if number % 3 else 50.0
        subject.put(one)
    gone = [arriving[i] for i in dropped if i < len(arriving)]
    for one in gone:
        subject.drop(one)
        subject.drop(one)  # dropping twice does nothing
    subject.take(1.0)
    expired = subject.expire(5.0)
    assert all(one.deadline == 5.0 and one not in gone for one in expired)
    subject.expire(50.0)
    assert not len(subject)
    assert subject.take(60.0) == []
    assert subject.next_deadline(60.0) is None
    assert set(subject.waiting().values()) == {0}


@given(jobs(), st.sampled_from(POLICIES))
def test_a_runnable_job_is_never_left_waiting_while_the_executor_sleeps(arriving: list[Job], name: PolicyName) -> None:
    subject = scheduler(name)
    for one in arriving:
        subject.put(one)
    now = 1.0
    while len(subject):
        again = subject.next_deadline(now)
        assert again is not None
        assert bool(subject.take(now)) == (again <= now)
        now = max(now, again)


def test_a_job_without_rows_is_refused() -> None:
    """A job without rows would have no cost, and its tenant would always be first."""
    with pytest.raises(ValueError, match="at least one row"):
        job(rows=0)


def test_rows_that_are_not_ready_are_not_taken() -> None:
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


def test_lockstep_serves_tenants_behind_first() -> None:
    subject = scheduler("lockstep")
    ahead, behind = job("alice", group=3), job("bob", group=1)
    subject.put(ahead)
    subject.put(behind)
    assert subject.take(0.0)[0].job is behind
    subject.put(job("bob", group=3))
    assert {p.job.tenant for p in subject.take(0.0)} == {"alice", "bob"}


def test_lockstep_waits_for_recently_active_tenants() -> None:
    subject = scheduler("lockstep")
    subject.put(job("bob"))
    subject.done(subject.take(0.0), now=1.0, seconds=1.0)
    subject.put(job("alice", arrival=0.5))  # while that product was computed
    assert subject.take(1.0) == []
    assert subject.next_deadline(1.0) == pytest.approx(1.0 + POLICY.lockstep_wait_ms / 1000)
    subject.put(job("bob", arrival=1.05))
    assert {p.job.tenant for p in subject.take(1.05)} == {"alice", "bob"}


def test_no_tenant_starts_a_second_pass_before_the_others_have_finished_their_first() -> None:
    """A generating tenant waits for the backward half of the others' step; otherwise that half would never be
    computed."""
    subject = scheduler("lockstep")
    subject.put(job("trainer", group=1))
    subject.put(job("chat", group=1))
    subject.take(0.0)
    subject.put(job("chat", group=0))
    subject.put(job("trainer", group=1, direction="backward"))
    assert subject.take(0.0)[0].job.tenant == "trainer"
    subject.put(job("trainer", group=0, direction="backward"))
    assert [subject.take(0.0)[0].job.tenant for _ in range(2)] == ["trainer", "chat"]
