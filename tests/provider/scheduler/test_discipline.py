"""The policies for comparison. `lockstep`: all tenants are at the same layer group."""

import pytest

from tests.provider.scheduler.playing import POLICY, job, scheduler


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
