"""The scheduler: all rows are taken once, in bounded products, in bounded time."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from provider.scheduler import scheduler as scheduling
from provider.scheduler.jobs import Job, Key, Piece, Stage
from provider.scheduler.scheduler import Scheduler
from tests.cases import cases
from tests.provider.scheduler.playing import (
    MAX_WAIT_S,
    RATE,
    ROW_WORK,
    SLICE_ROWS,
    job,
    jobs,
    run,
    scheduler,
    separate,
)
from tests.provider.scheduler.rehearsal import ONE_CORE, Executor, Hardware, Outcome, Tenant, play, rehearse


@given(jobs())
def test_every_row_is_taken_once_and_in_order(arriving: list[Job]) -> None:
    batches = run(scheduler(), arriving)
    taken: dict[int, int] = Counter()
    for _, pieces in batches:
        for piece in pieces:
            assert piece.start == taken[id(piece.job)]
            taken[id(piece.job)] = piece.stop
    assert all(taken[id(j)] == j.rows == j.taken for j in arriving)
    assert {id(p.job) for _, pieces in batches for p in pieces} == {id(j) for j in arriving}


@given(jobs(), st.integers(1, 10))
def test_a_batch_is_of_one_kind_and_bounded(arriving: list[Job], max_rows: int) -> None:
    for _, pieces in run(scheduler(MAX_BATCH_ROWS=max_rows), arriving):
        assert len({p.job.key for p in pieces}) == 1
        assert len({id(p.job) for p in pieces}) == len(pieces)
        slices = 1 if any(p.job.stage == "inference" for p in pieces) else scheduling._SLICES_OF_TRAINING
        assert sum(p.rows for p in pieces) <= min(max_rows, slices * SLICE_ROWS)


@given(jobs())
def test_no_job_waits_to_be_batched_longer_than_it_may(arriving: list[Job]) -> None:
    """A product that begins after idle time has jobs that have waited, while nothing was computed, within the limit."""
    subject = scheduler()
    end = 0.0
    for begun, pieces in run(subject, arriving):
        if begun > end:  # it was idle until now
            late = max(begun - max(end, p.job.arrival) - MAX_WAIT_S for p in pieces)
            assert late <= 1e-9, late
        end = begun + sum(p.rows for p in pieces) * ROW_WORK / RATE


@given(jobs(), st.lists(st.integers(0, 29)))
def test_dropped_and_expired_jobs_are_forgotten(arriving: list[Job], dropped: list[int]) -> None:
    subject = scheduler()
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
    assert not subject._jobs
    assert subject.take(60.0) == []
    assert subject.next_deadline(60.0) is None
    assert set(subject.waiting().values()) == {0}


@given(jobs())
def test_a_runnable_job_is_never_left_waiting_while_the_executor_sleeps(arriving: list[Job]) -> None:
    subject = scheduler()
    for one in arriving:
        subject.put(one)
    now = 1.0
    while subject._jobs:
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


# Throughput and latency of many tenants, simulated


ONE_ROW = (1,) * 8
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
TRAINING = (2, 16, 64, 256)


def all_of(generating: Sequence[int], training: Sequence[int]) -> list[Tenant]:
    tenants = [Tenant(f"generating-{i}", rows) for i, rows in enumerate(generating)]
    return tenants + [Tenant(f"training-{i}", rows, trains=True) for i, rows in enumerate(training)]


@pytest.mark.parametrize(
    ("generating", "training"),
    [(ONE_ROW, TRAINING), (BATCHES, TRAINING), (BATCHES, ()), ((2, 16, 64, 256, 2, 16), (2, 16))],
)
def test_batching_increases_throughput_and_reduces_latency(generating: Sequence[int], training: Sequence[int]) -> None:
    """Tenants have one row each or batches of 2 to 256, and some may train. Batches take 0.8 of the time at most."""
    found: list[Outcome] = []
    for subject in (Scheduler[Job](), separate(Scheduler())):
        tenants = all_of(generating, training)
        found.append(rehearse(subject, tenants, seconds=40))
        assert all(tenant.turns for tenant in tenants), "somebody starves"
    batched, single = found
    assert batched.latency < (0.8 if generating is BATCHES else 1.0) * single.latency
    assert batched.tokens_per_s > single.tokens_per_s


@pytest.mark.parametrize("layers", [1, 8])
def test_tenants_meet_and_stay_together(layers: int) -> None:
    """Two groups of tenants take turns, and no tenant is left behind, even with delays, and in a model of many layer
    groups, where tenants would rarely meet by chance."""
    tenants = [Tenant(f"generating-{i}", 1, layers=layers) for i in range(16)]
    outcome = rehearse(Scheduler(), tenants, seconds=20, held_up=0.1)
    assert outcome.batch_requests > 5
    assert outcome.idle < 0.05
    slowest = max(max(tenant.turns) for tenant in tenants)
    assert slowest < 2.5 * outcome.latency


# Fine-tuning beside inference, simulated


class Watched(Scheduler[Job]):
    """Records the seconds of fine-tuning, and how long it waits after the executor first idles without inference."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_wait = 0.0
        self._fine_tuning: list[tuple[float, float]] = []  # ends of products, and seconds
        self._idle_since: dict[Job, float] = {}

    def put(self, job: Job) -> None:
        super().put(job)
        if job.stage == "fine_tuning":
            self._idle_since[job] = math.inf

    def take(self, now: float) -> list[Piece[Job]]:
        pieces = super().take(now)
        self._idle_since = {job: since for job, since in self._idle_since.items() if not job.left}
        if not pieces and not self.waiting()["inference"]:
            self._idle_since = {job: min(since, now) for job, since in self._idle_since.items()}
            self.longest_wait = max([self.longest_wait, *(now - since for since in self._idle_since.values())])
        return pieces

    def done(self, pieces: Sequence[Piece[Job]], *, now: float, seconds: float, matrices: int = 1) -> None:
        super().done(pieces, now=now, seconds=seconds, matrices=matrices)
        rows = sum(piece.rows for piece in pieces if piece.job.stage == "fine_tuning")
        self._fine_tuning.append((now, seconds * rows / sum(piece.rows for piece in pieces)))

    def trained(self, begin: float, end: float) -> float:
        return sum(seconds for when, seconds in self._fine_tuning if begin < when <= end)


def beside(hardware: Hardware, others: Sequence[tuple[int, float]], *, rows: int, seconds: float = 2.0) -> Watched:
    """Let a tenant fine-tune without pauses beside others: the rows of their requests, and the pauses between."""
    pauses = {f"other-{i}": pause for i, (_, pause) in enumerate(others)}
    tenants = [Tenant(name, size) for name, (size, _) in zip(pauses, others, strict=True)]
    tenants.append(Tenant("trainer", rows, trains=True))
    executor = Executor(hardware, watched := Watched())

    def think(tenant: Tenant, now: float) -> float:
        tenant.hear(now)
        return now + pauses.get(tenant.name, 0.0)

    play(executor, [(0.0, tenant) for tenant in tenants], think=think, seconds=seconds)
    return watched


@settings(max_examples=20)
@given(
    st.builds(
        Hardware,
        weight_s=st.sampled_from((20e-12, 50e-12)),
        row_s=st.sampled_from((1e-12, 8.6e-12)),
        product_s=st.just(0.0),
        request_s=st.just(0.0),
    ),
    st.lists(st.tuples(st.integers(1, 16), st.sampled_from((0.0, 1e-4, 5e-4, 1.5e-3, 3e-3, 0.02))), max_size=6),
    st.sampled_from((512, 1024, 4000)),
)
def test_fine_tuning_gets_its_share_of_any_second_whatever_others_send(
    hardware: Hardware, others: list[tuple[int, float]], rows: int
) -> None:
    """A stage gets its share by weight of the seconds with products; of those without, waits of inference to be batched
    are at most `WAIT_SHARE` of its products. A slice may lie across each end of the second."""
    share = 1 / (1 + scheduling.INFERENCE_WEIGHT) / (1 + scheduling.WAIT_SHARE)
    watched = beside(hardware, others, rows=rows)
    least = min(watched.trained(begin / 20, begin / 20 + 1) for begin in range(20))
    assert least >= share - 2 * scheduling.SLICE_S
    assert watched.longest_wait <= scheduling.MAX_WAIT_S + 1e-9


@pytest.mark.parametrize("pause_ms", [0.5, 1.5, 3.0])
def test_a_generating_tenant_leaves_the_time_that_it_does_not_use(pause_ms: float) -> None:
    """Each product began the wait again: rows in short intervals held fine-tuning back while the executor idled."""
    alone, together = (
        beside(ONE_CORE, others, rows=1024, seconds=8.0).trained(2.0, 8.0) for others in ([], [(1, pause_ms / 1000)])
    )
    assert together >= 0.8 * alone


def test_a_tenant_is_charged_with_the_time_that_a_product_took() -> None:
    """The scheduler expected a hundred times as long, and fine-tuning paid for it with a tenth of its share."""
    subject = separate(scheduler(INFERENCE_WEIGHT=1.0))
    stages: tuple[Stage, ...] = ("inference", "fine_tuning")
    seconds = dict.fromkeys(stages, 0.0)
    for step in range(400):
        for stage in stages:
            if not subject.waiting()[stage]:
                subject.put(job(stage, rows=8, group=int(stage == "inference"), stage=stage, arrival=step))
        ((one, start, stop),) = pieces = subject.take(step)
        took = (stop - start) * ROW_WORK / RATE * (0.01 if one.stage == "fine_tuning" else 1.0)
        seconds[one.stage] += took
        subject.done(pieces, now=step, seconds=took)
    assert seconds["fine_tuning"] > 0.4 * sum(seconds.values())


def test_one_late_product_costs_its_tenant_two_turns() -> None:
    """Another program has used the machine: the tenant does not pay for a thousand products."""
    subject, took = separate(scheduler()), SLICE_ROWS * ROW_WORK / RATE
    late = job("alice", rows=SLICE_ROWS)
    subject.put(late)
    subject.done(subject.take(0.0), now=0.0, seconds=1000 * took)
    subject.put(job("alice", rows=SLICE_ROWS, group=1, arrival=2.0))
    turns = 0
    while turns < 100:
        subject.put(job("bob", rows=SLICE_ROWS, group=2, arrival=1.0))
        (piece,) = pieces = subject.take(3.0)
        if piece.job.tenant == "alice":
            break
        subject.done(pieces, now=3.0, seconds=took)
        turns += 1
    assert turns <= 4


def test_products_are_longer_while_nobody_generates() -> None:
    """Eight slices, in products of equal size, however many tenants train; one slice from the first token on."""
    subject, times = separate(scheduler()), scheduling._SLICES_OF_TRAINING

    def rows_of(*, now: float) -> int:
        return sum(piece.rows for piece in subject.take(now))

    for group, tenant in enumerate(("one", "other")):
        subject.put(job(tenant, rows=3 * times * SLICE_ROWS - 3, group=group, stage="fine_tuning"))
    assert [rows_of(now=0.0) for _ in range(2)] == 2 * [times * SLICE_ROWS - 1]
    subject.put(job("chat", group=2, arrival=1.0))
    assert [rows_of(now=1.0) for _ in range(3)] == [1, SLICE_ROWS, SLICE_ROWS]
    later = 1.1 + scheduling._GENERATING_S
    subject.put(job("third", rows=times * SLICE_ROWS, group=3, stage="fine_tuning", arrival=later))
    while (rows := rows_of(now=later)) == SLICE_ROWS:
        pass
    assert rows == times * SLICE_ROWS


def test_a_request_that_has_begun_is_finished_before_the_tenants_next() -> None:
    subject = separate(scheduler())
    begun = job(rows=4, ready=2)
    subject.put(begun)
    assert [piece.rows for piece in subject.take(0.0)] == [2]
    subject.put(job(rows=4, arrival=1.0))
    subject.make_ready(begun, 2)
    assert [piece.job for piece in subject.take(1.0)] == [begun]


def test_a_request_is_multiplied_at_once_only_if_nobody_else_waits_or_is_expected() -> None:
    subject = scheduler()
    assert subject.is_alone(job("alice"))
    subject.put(job("bob"))
    assert not subject.is_alone(job("alice"))
    subject.done(subject.take(0.0), now=0.0, seconds=1e-5)
    assert not subject.is_alone(job("alice"))
    assert subject.is_alone(job("bob"))


# Fair shares of tenants and of stages, by their weights


def somebody_generates(subject: Scheduler[Job]) -> None:
    """Products take one slice from now on."""
    subject.put(job("chat", group=99))
    subject.take(0.0)


@given(
    st.lists(st.sampled_from((1, 2, 8, 30, 200)), min_size=2, max_size=4),
    st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=4, max_size=4),
)
def test_tenants_with_work_waiting_get_equal_shares(sizes: list[int], weights: list[float]) -> None:
    """Tenants get equal numbers of rows per weight, within one slice, whatever their request sizes and connections."""
    subject = scheduler()
    somebody_generates(subject)
    served: Counter[object] = Counter()

    def ask(tenant: int) -> None:  # separate groups, so that no tenant joins another one's product
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
        shares = [served[str(t)] / weights[t] for t in range(len(sizes))]
        assert max(shares) - min(shares) <= 2 * SLICE_ROWS / min(weights)
    assert sum(served.values())


def test_an_idle_tenant_accrues_no_credit() -> None:
    subject = separate(scheduler())
    somebody_generates(subject)
    subject.put(job("busy", rows=800, stage="fine_tuning"))
    for _ in range(90):
        subject.take(1.0)
    subject.put(job("new", rows=800, group=1, stage="fine_tuning"))
    turns = [subject.take(1.0)[0].job.tenant for _ in range(20)]
    assert 9 <= turns.count("new") <= 11


def test_inference_has_priority_and_does_not_starve_fine_tuning() -> None:
    """Both stages have more work than the executor can do; shares follow the weights."""
    subject = separate(scheduler(INFERENCE_WEIGHT=4.0))
    served: Counter[str] = Counter()
    subject.put(job("trainer", rows=10_000, stage="fine_tuning"))
    for _ in range(200):
        while subject.waiting()["inference"] < 3:
            subject.put(job("chat", rows=4, group=1))
        for piece in subject.take(1.0):
            served[piece.job.stage] += piece.rows
    assert served["inference"] / served["fine_tuning"] == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("rows", [1, 16])
def test_requests_for_a_narrow_layer_group_are_not_free(rows: int) -> None:
    """A product of a narrow group takes its fixed time, a hundred times longer per multiply-add than a wide group's. It
    made the wide products of other tenants look slow: an honest tenant got a hundredth of the executor."""
    subject, now = scheduler(), 0.0
    narrow = replace(job("mallory", rows=rows, group=0), row_work=2048, row_cost=2048)
    wide = replace(job("alice", group=1), row_work=1 << 24, row_cost=1 << 24)
    subject.pace.record(Key(2, "forward", "ring"), rows=1, work=1 << 24, seconds=3.4e-3)  # of an earlier tenant
    waiting, seconds = Counter[str](), {"alice": 0.0, "mallory": 0.0}
    while now < 1.0:
        for like, most in ((narrow, 2), (wide, 1)):
            tenant = str(like.tenant)
            for _ in range(most - waiting[tenant]):
                subject.put(replace(like, arrival=now))
                waiting[tenant] += 1
        if not (pieces := subject.take(now)):
            now = max(now + 1e-5, subject.next_deadline(now) or now)
            continue
        leader = pieces[0].job
        took = 60e-6 + 0.2e-9 * leader.row_work + sum(piece.rows for piece in pieces) * leader.row_work / 50e9
        now += took
        seconds[str(leader.tenant)] += took
        waiting.subtract(str(piece.job.tenant) for piece in pieces if piece.last)
        subject.done(pieces, now=now, seconds=took)
    assert seconds["alice"] > 0.4 * sum(seconds.values())


# Waiting to be batched, and sharing products


@given(jobs())
def test_only_fine_tuning_and_leading_requests_are_cut(arriving: list[Job]) -> None:
    """Inference requests join whole, before fine-tuning; fine-tuning fills the rest of a slice."""
    for _, pieces in run(scheduler(), arriving):
        stages = [p.job.stage for p in pieces]
        assert stages == sorted(stages, reverse=True)
        cut = [p for p in pieces if not p.last]
        assert [p for p in cut if p.job.stage == "inference"] in ([], [pieces[0]])
        assert sum(p.job.stage == "fine_tuning" for p in cut) <= 1


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


@cases(__file__, "waits")
def test_a_job_waits_for_an_expected_tenant_and_no_longer(
    wait_share: float, reading: float, max_wait: float, wait: float
) -> None:
    subject = scheduler(slice_s=1.0, max_wait_s=max_wait, WAIT_SHARE=wait_share, reading=reading)
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
    subject = scheduler(slice_s=1.0, max_wait_s=1.0, WAIT_SHARE=9.0, reading=reading)
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
    patient: dict[str, Any] = {"slice_s": 1.0, "max_wait_s": 0.01, "WAIT_SHARE": 1e6, "reading": 1.0}
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
    subject = scheduler(WAIT_SHARE=10.0)
    now = served_in_order(subject, "chat", 4, pause=0.001, stage="inference")
    subject.put(job("trainer", rows=500, group=1, stage="fine_tuning", arrival=now))
    slices = 0
    while pieces := subject.take(now):
        slices += 1
        subject.done(pieces, now=now, seconds=SLICE_ROWS * ROW_WORK / RATE)
    assert slices < 10
    again = subject.next_deadline(now)
    assert again is not None
    assert now < again <= now + MAX_WAIT_S
    assert subject.take(again)[0].job.tenant == "trainer"


def test_a_single_tenant_never_waits() -> None:
    subject = scheduler(max_wait_s=10.0, WAIT_SHARE=10.0, reading=10.0)
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
