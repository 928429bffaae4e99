"""Policy `opportunistic`: waiting to be batched, and sharing products."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given

from provider.scheduler.jobs import Job, Piece, Stage
from provider.scheduler.scheduler import Scheduler
from tests.provider.scheduler.playing import POLICY, RATE, ROW_WORK, SLICE_ROWS, job, jobs, run, scheduler


@given(jobs())
def test_only_fine_tuning_and_leading_requests_are_cut(arriving: list[Job]) -> None:
    """Inference requests join whole, before fine-tuning; fine-tuning fills the rest of a slice."""
    for _, pieces in run(scheduler(), arriving):
        stages = [p.job.stage for p in pieces]
        assert stages == sorted(stages, reverse=True)
        cut = [p for p in pieces if not p.last]
        assert [p for p in cut if p.job.stage == "inference"] in ([], [pieces[0]])
        assert sum(p.job.stage == "fine_tuning" for p in cut) <= 1


def test_only_a_tenant_alone_is_served_past_the_queues() -> None:
    """No other tenant waits or is expected meanwhile, and the rows fit in a slice."""
    subject = scheduler()
    for group in range(3):
        assert subject.take_alone(job("alone", rows=SLICE_ROWS + 1)) == []
        (piece,) = subject.take_alone(one := job("alone", rows=SLICE_ROWS, group=group))
        assert piece == (one, 0, SLICE_ROWS)
        assert one.left
        subject.done([piece], now=0.0, seconds=1.0)
    assert subject.take_alone(job("another")) == []  # the first tenant is expected
    subject.put(job("another"))
    assert subject.take_alone(job("alone")) == []  # the other tenant waits
    assert [p.job.tenant for p in subject.take(0.0)] == ["another"]
    assert scheduler("lockstep").take_alone(job()) == []


def test_rows_of_fine_tuning_fill_the_slice_of_an_inference() -> None:
    subject = scheduler()
    subject.put(job("trainer", rows=500, stage="fine_tuning"))
    subject.take(0.0)
    subject.put(job("chat", rows=4))
    subject.put(job("other", rows=3))
    pieces = subject.take(0.0)
    assert [(p.job.tenant, p.rows) for p in pieces] == [("chat", 4), ("other", 3), ("trainer", SLICE_ROWS - 7)]


@pytest.mark.parametrize(("reading_rows", "riders"), [(0, 2), (20, 10)])
def test_added_fine_tuning_delays_inference_by_half_at_most(reading_rows: int, riders: int) -> None:
    """When inference is due, a flood of large requests for the same layer group has less priority."""
    row_s = ROW_WORK / RATE
    subject = scheduler(reading=reading_rows * row_s, slice_s=200 * row_s)
    subject.put(job("flood", rows=5000, stage="fine_tuning"))
    subject.take(0.0)
    subject.put(chat := job("chat", rows=4))
    pieces = subject.take(0.0)
    assert [p.job.tenant for p in pieces] == ["chat", "flood"]
    assert pieces[1].rows == pytest.approx(riders, abs=1)
    alone, together = (subject.pace.seconds(chat, rows) for rows in (4, 4 + pieces[1].rows))
    assert together <= 1.5 * alone + 1e-12


def test_added_fine_tuning_gets_no_more_than_its_share() -> None:
    """Only one of two training tenants waits for the layer group of the inference request."""
    subject = scheduler()
    served: Counter[object] = Counter()
    for group, tenant in enumerate(("rides", "does not")):
        subject.put(job(tenant, rows=100_000, group=group, stage="fine_tuning"))
    for now in range(1, 300):
        subject.put(job("chat", rows=2, arrival=now))
        for piece in subject.take(now):
            served[piece.job.tenant] += piece.rows
    assert served["does not"] > 5 * SLICE_ROWS  # and it does get its share
    assert served["rides"] - served["does not"] <= 3 * SLICE_ROWS


def test_inference_joins_fine_tuning_which_keeps_half_of_its_slice() -> None:
    subject = scheduler()
    subject.put(job("chat", rows=1, group=1))
    subject.take(0.0)  # fine-tuning has been charged less now
    subject.put(job("trainer", rows=500, stage="fine_tuning"))
    for tenant in "abc":
        subject.put(job(tenant, rows=3))
    pieces = subject.take(0.0)
    assert [(p.job.tenant, p.rows) for p in pieces] == [("a", 3), ("trainer", SLICE_ROWS - 3)]


@pytest.mark.parametrize(
    ("wait_share", "reading", "max_wait", "wait"),
    [
        (0.5, 1.0, 1.0, 0.5),  # a share of the time of its own product
        (9.0, 0.01, 1.0, 0.01),  # no longer than batching saves
        (9.0, 1.0, 0.02, 0.02),  # nor longer than the policy's limit
    ],
)
def test_a_job_waits_for_an_expected_tenant_and_no_longer(
    wait_share: float, reading: float, max_wait: float, wait: float
) -> None:
    subject = scheduler(slice_s=1.0, max_wait_s=max_wait, wait_share=wait_share, reading=reading)
    first, second = job("alice", rows=100, arrival=1.0), job("bob", rows=100, arrival=1.0 + wait / 2)
    subject.put(job("bob", arrival=1.0))
    subject.done(subject.take(1.0), now=1.0, seconds=reading + ROW_WORK / RATE)  # bob was served a moment ago
    subject.put(first)
    assert subject.take(1.0) == []
    assert subject.next_deadline(1.0) == pytest.approx(1.0 + wait)
    subject.put(second)
    # immediately, because no other tenant is expected
    assert [p.job for p in subject.take(second.arrival)] == [first, second]


def test_several_waiting_tenants_wait_for_a_shorter_time() -> None:
    """Waiting costs all waiting tenants, and one more request saves one reading of the weights: three wait a third of
    it."""
    reading = 0.003
    subject = scheduler(slice_s=1.0, max_wait_s=1.0, wait_share=9.0, reading=reading)
    subject.put(job("late", arrival=1.0))
    subject.done(subject.take(1.0), now=1.0, seconds=reading + ROW_WORK / RATE)
    for tenant in "abc":
        subject.put(job(tenant, arrival=1.0))
    assert subject.take(1.0) == []
    assert subject.next_deadline(1.0) == pytest.approx(1.0 + reading / 3, rel=1e-3)


def served_in_order(subject: Scheduler[Job], tenant: str, groups: int, *, pause: float, stage: Stage) -> float:
    """A tenant goes through a model, `pause` between an answer and the next request. Returns the time of its last
    answer."""
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


def test_no_job_waits_for_a_tenant_that_will_ask_for_another_group() -> None:
    """Bob goes from group 0 to 1 to 2 to 3: he is expected at group 3, soon, and nowhere else."""
    patient: dict[str, Any] = {"slice_s": 1.0, "max_wait_s": 0.01, "wait_share": 1e6, "reading": 1.0}
    for group, waits in ((3, True), (2, False), (0, False)):
        subject = scheduler(**patient)
        served_in_order(subject, "bob", 4, pause=0.001, stage="inference")
        now = served_in_order(subject, "bob", 3, pause=0.001, stage="inference")
        subject.put(job("alice", group=group, arrival=now))
        assert (subject.take(now) == []) == waits
        if waits:  # but not when he is late
            assert subject.take(now + 0.0021) != []


def test_fine_tuning_waits_a_moment_for_a_generating_tenant() -> None:
    """After fine-tuning has had its share, it waits between two requests of the generating tenant, up to the limit."""
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


def test_a_single_tenant_never_waits() -> None:
    subject = scheduler(max_wait_s=10.0, wait_share=10.0, reading=10.0)
    for turn in range(5):
        subject.put(job("alice", rows=5, arrival=float(turn)))
        pieces = subject.take(float(turn))
        assert len(pieces) == 1
        subject.done(pieces, now=turn + 0.1, seconds=0.1)


def test_the_larger_batch_is_first_and_no_request_is_passed_over_for_longer_than_a_slice() -> None:
    subject = scheduler(slice_s=0.01)
    subject.put(job("alone", group=1))
    for tenant in "abc":
        subject.put(job(tenant, group=2))
    assert {p.job.tenant for p in subject.take(0.0)} == {"a", "b", "c"}
    for tenant in "abc":
        subject.put(job(tenant, group=2, arrival=0.006))
    assert [p.job.tenant for p in subject.take(0.011)] == ["alone"]
    for _ in range(3):
        subject.put(job("many", group=3, arrival=0.012))  # three connections are one tenant
    subject.put(job("d", group=2, arrival=0.012))
    assert {p.job.tenant for p in subject.take(0.012)} == {"a", "b", "c", "d"}


def test_tenants_behind_are_first_and_share_products_with_the_tenants_they_reach() -> None:
    """Even a single tenant precedes a crowd that is one layer group ahead."""
    subject = scheduler(slice_s=0.01)
    now = served_in_order(subject, "behind", 5, pause=0.0001, stage="inference")
    for tenant in "abc":
        subject.put(job(tenant, group=3, arrival=now))
    subject.put(job("behind", group=2, arrival=now))
    pieces = subject.take(now)
    assert [p.job.tenant for p in pieces] == ["behind"]
    subject.done(pieces, now=now, seconds=1e-6)
    subject.put(job("behind", group=3, arrival=now))
    assert {p.job.tenant for p in subject.take(now)} == {"a", "b", "c", "behind"}


def test_a_tenant_ahead_of_its_fair_share_is_not_first() -> None:
    subject = scheduler(slice_s=1.0, max_wait_s=0.005)
    now = served_in_order(subject, "behind", 5, pause=0.0001, stage="inference")
    subject.put(job("ahead", group=3, arrival=now))
    subject.put(job("behind", group=2, rows=int(0.01 * RATE / ROW_WORK), arrival=now))
    first = subject.take(now)
    assert [p.job.tenant for p in first] == ["behind"]  # for ten milliseconds
    subject.done(first, now=now + 0.01, seconds=0.01)
    subject.put(job("behind", group=2, arrival=now + 0.01))
    assert [p.job.tenant for p in subject.take(now + 0.01)] == ["ahead"]
