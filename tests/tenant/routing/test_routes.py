"""The choice of providers by coverage, admissibility, health and measured cost. No sockets; the test sets the clock."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from symbiosis_priv.errors import QuarantinedError
from symbiosis_priv.federation import Company, Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.routing.known_provider import USUAL, KnownProvider, State
from tenant.routing.routes import Routes
from tenant.session.part_queue import PartQueue
from tests.tenant.conftest import Identities
from tests.waiting import beside

GROUP = GroupIndex(0)


SMALL, LARGE = 1000, 1 << 24


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def routes_of(
    clock: Clock, executors: str, helpers: str = "", *, certificates: Sequence[Path] = (), **options: Any
) -> Routes:
    """Routes of one provider of each operator, named by a letter; all serve everything. Most tests look nothing up in
    certificates, so they need none."""
    nowhere = Path("nowhere")
    roles: list[wire.Role] = [*["executor"] * len(executors), *["helper"] * len(helpers)]  # type: ignore[list-item]
    peers = [
        Peer(f"p{n}", operator, role, "127.0.0.1", 7000 + n, certificates[n] if certificates else nowhere)
        for n, (operator, role) in enumerate(zip(executors + helpers, roles, strict=True))
    ]
    federation = Federation("sha256:0", 10, nowhere, nowhere, tuple(peers), **options)
    routes = Routes(federation, with_helpers=bool(helpers), clock=clock)
    for provider in (*routes.executors, *routes.helpers):
        hear(provider)
    return routes


def hear(provider: KnownProvider, first: int = 0, end: int = 9) -> None:
    provider.welcome = wire.Welcome(
        version=wire.VERSION, model_digest="", first_group=first, end_group=end, max_rows=100, max_payload=1 << 20
    )


def ask(routes: Routes, clock: Clock, cost: dict[str, float], *, size: int = SMALL, times: int = 1) -> Counter[str]:
    """Send `times` requests, whose answers take the seconds in `cost`. Returns how often each provider was asked."""
    asked: Counter[str] = Counter()
    for _ in range(times):
        provider = routes.choose(GROUP, size, holders=())
        assert provider is not None
        asked[provider.peer.name] += 1
        clock.now += cost[provider.peer.name]
        routes.answered(provider, seconds=cost[provider.peer.name], size=size)
    return asked


@given(noise=st.lists(st.floats(0.85, 1.15), min_size=60, max_size=60))
def test_small_differences_do_not_move_rows(noise: list[float]) -> None:
    """Rows stay where they are unless another executor is clearly better."""
    clock = Clock()
    routes = routes_of(clock, "AB")
    for _ in range(6):
        ask(routes, clock, {"p0": 0.01, "p1": 0.01})
    asked = Counter[str]()
    for factor in noise:
        asked += ask(routes, clock, {"p0": 0.01 * factor, "p1": 0.01 / factor})
    assert max(asked.values()) == len(noise)


def test_rows_leave_a_slow_executor_and_find_a_fast_one(clock: Clock) -> None:
    routes = routes_of(clock, "AB")
    cost = {"p0": 0.01, "p1": 0.05}
    assert ask(routes, clock, cost, times=200)["p0"] > 190
    cost["p0"] = 0.2
    assert ask(routes, clock, cost, times=200)["p1"] > 180
    cost["p0"] = 0.001
    clock.now += 30.0
    assert ask(routes, clock, cost, times=600)["p0"] > 300


def test_a_failed_executor_gets_no_request_until_it_is_probed(clock: Clock) -> None:
    routes = routes_of(clock, "AB")
    ask(routes, clock, {"p0": 0.01, "p1": 0.01}, times=10)
    first = routes.executors[0]
    routes.failed(first, "lost")
    assert ask(routes, clock, {"p1": 0.01}, times=5)["p1"] == 5
    assert routes.to_probe() == []
    clock.now += 1.0
    assert routes.to_probe() == [first]
    assert first.welcome is not None
    routes.connected(first, first.welcome)
    trial = routes.choose(GROUP, SMALL, holders=())
    assert trial is first  # one request, and no other until its answer
    assert routes.choose(GROUP, SMALL, holders=()) is not first
    routes.answered(first, seconds=0.01, size=SMALL)
    assert first.health.state is State.UP


def test_a_single_executor_is_asked_in_every_state_of_its_breaker(clock: Clock) -> None:
    routes = routes_of(clock, "A")
    routes.failed(routes.executors[0], "lost")
    assert routes.choose(GROUP, SMALL, holders=()) is routes.executors[0]


@given(failures=st.integers(0, 40), left_s=st.floats(0.0, 120.0), all_fail=st.booleans())
def test_an_executor_that_hangs_repeatedly_leaves_time_for_others(failures: int, left_s: float, all_fail: bool) -> None:
    clock = Clock()
    routes = routes_of(clock, "AB")
    hanging, other = routes.executors
    for _ in range(failures):
        for provider in (hanging, other) if all_fail else (hanging,):
            clock.now += 1000.0
            routes.failed(provider, "late")
            hear(provider)
    patience = routes.patience_s(hanging, GROUP, SMALL, left_s=left_s)
    assert patience <= left_s / 2
    if not (all_fail and failures):
        assert patience <= 8 * USUAL.unknown_s + 0.1


class SlowOnPurpose:
    """A provider that delays or drops requests in a repeated pattern, next to an honest one."""

    honest_s = 0.1

    def __init__(self, tricks: Sequence[str]) -> None:
        self._tricks = itertools.cycle(tricks)

    def answer(self, patience: float) -> tuple[bool, float]:
        """Returns True if it answers, and the seconds until then."""
        trick = next(self._tricks)
        seconds = {"quick": 1e-3, "busy": 1e-3, "hangs": patience}.get(trick, 0.99 * patience)
        return trick in ("quick", "in time"), seconds

    def costs_a_tenth(self, seconds: float, products: int) -> bool:
        """The bound: more than if it were away, plus the default time of an unknown provider once."""
        first = 8 * USUAL.unknown_s + 4 * USUAL.least_patience_s
        return seconds <= 1.1 * products * self.honest_s + first


TRICKS = st.lists(st.sampled_from(["quick", "in time", "hangs", "refuses in time", "busy"]), min_size=1, max_size=12)
PRODUCTS = 1000


@pytest.mark.parametrize("helper", [False, True], ids=["executor", "helper"])
@settings(max_examples=15)
@given(tricks=TRICKS)
def test_a_provider_that_is_slow_on_purpose_costs_a_tenth(helper: bool, tricks: list[str]) -> None:
    clock, adversary = Clock(), SlowOnPurpose(tricks)
    routes = routes_of(clock, "A", "BC", pad_helpers=1) if helper else routes_of(clock, "AB")
    began = clock.now
    for _ in range(PRODUCTS):
        done = False
        while not done:
            probe(routes)
            if helper:
                [provider] = routes.holders(GROUP)
                patience = routes.patience_with_helpers_s(GROUP, [provider.peer], SMALL, left_s=120.0)
            else:
                chosen = routes.choose(GROUP, SMALL, holders=())
                assert chosen is not None
                provider, patience = chosen, routes.patience_s(chosen, GROUP, SMALL, left_s=120.0)
            evil = provider is (routes.helpers if helper else routes.executors)[0]
            done, seconds = adversary.answer(patience) if evil else (True, adversary.honest_s)
            clock.now += seconds
            if done:
                routes.answered(provider, seconds=seconds, size=SMALL)
            elif helper:
                routes.late([provider.peer], waited_s=seconds)
            else:
                routes.failed(provider, "whatever it says", waited_s=seconds)
            # one honest helper is enough
            assert not helper or routes.replacements(GROUP, [routes.helpers[1].peer], SMALL, waited_s=1.0) == []
    assert adversary.costs_a_tenth(clock.now - began, PRODUCTS)


def probe(routes: Routes) -> None:
    """Let every provider answer a probe."""
    for provider in routes.to_probe():
        hear(provider)
        provider.health.connected()


@given(
    companies=st.lists(st.sampled_from("ABCD"), min_size=2, max_size=6),
    executors=st.integers(1, 3),
    k=st.integers(1, 3),
    down=st.sets(st.integers(0, 5)),
)
def test_holders_are_of_k_companies_without_the_executors_company(
    companies: list[str], executors: int, k: int, down: set[int]
) -> None:
    """Any helpers may be absent. If k suitable helpers are left, they are found."""
    executors = min(executors, len(companies) - 1)
    routes = routes_of(Clock(), "".join(companies[:executors]), "".join(companies[executors:]), pad_helpers=k)
    for number, provider in enumerate((*routes.executors, *routes.helpers)):
        if number in down:
            routes.failed(provider, "lost")
    for executor in routes.executors:
        holders = [provider.peer.operator for provider in routes.holders(GROUP, executor)]
        assert len(set(holders)) == len(holders)
        assert executor.peer.operator not in holders
        possible = {provider.peer.operator for provider in routes.helpers} - {executor.peer.operator}
        assert len(holders) == min(routes.helpers_per_pad, len(possible))
        assert set(routes.able(GROUP, [h.peer for h in routes.holders(GROUP, executor)])) >= {executor}


def test_holders_that_leave_more_executors_a_choice_are_preferred(clock: Clock) -> None:
    routes = routes_of(clock, "AB", "BC", pad_helpers=1)
    assert [provider.peer.operator for provider in routes.holders(GROUP)] == ["C"]
    assert routes.can_replace(GROUP, [routes.helpers[1].peer])  # the other helper, for the first executor
    assert not routes.can_replace(GROUP, [provider.peer for provider in routes.helpers])


def test_a_company_is_more_than_an_operator(clock: Clock) -> None:
    routes = routes_of(clock, "AB", "CD", pad_helpers=1, companies=(Company("Holding", (), ("A", "C")),))
    first = routes.executors[0]
    assert [provider.peer.operator for provider in routes.holders(GROUP, first)] == ["D"]
    assert first not in routes.able(GROUP, [routes.helpers[0].peer])


def test_the_providers_left_after_quarantines_must_suffice_for_a_product(clock: Clock, identities: Identities) -> None:
    certificates = [identities.provider(number).certificate for number in range(3)]
    routes = routes_of(clock, "A", "BC", certificates=certificates, pad_helpers=1)
    routes.check(GROUP)
    routes.quarantine(routes.helpers[0].peer)
    routes.check(GROUP)
    routes.quarantine(routes.helpers[1].peer)
    with pytest.raises(QuarantinedError, match="too many helpers"):
        routes.check(GROUP)
    assert [provider.peer in routes.quarantined for provider in (*routes.executors, *routes.helpers)] == [
        False,
        True,
        True,
    ]


# Splitting


class LargePart:
    size = LARGE


def split(costs: Sequence[float], parts: int) -> tuple[list[int], float]:
    """Simulate parts over executors that take `costs` seconds for each. Returns the parts of each, and the time of
    the last."""
    routes = [KnownProvider(Peer(f"p{n}", "", "executor", "", 1, None)) for n in range(len(costs))]  # type: ignore[arg-type]
    for provider, cost in zip(routes, costs, strict=True):
        for now in range(4):
            provider.health.answered(float(now), seconds=cost, size=LARGE)
    slots = [n for n in range(len(costs)) for _ in range(PARALLEL_CHANNELS)]
    queue = PartQueue([LargePart()] * parts, [routes[n] for n in slots])  # type: ignore[list-item]
    free_at = dict.fromkeys(range(len(slots)), 0.0)
    done, end = [0] * len(costs), 0.0
    while free_at:
        slot = min(free_at, key=lambda slot: (free_at[slot], slot))
        provider = routes[slots[slot]]
        if queue.take(provider, only_if_faster=slot > 0) is None:
            del free_at[slot]
            continue
        done[slots[slot]] += 1
        free_at[slot] += costs[slots[slot]]
        end = max(end, free_at[slot])
    return done, end


@given(costs=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), parts=st.integers(1, 24))
def test_all_parts_are_done_and_a_slow_executor_delays_them_little(costs: list[float], parts: int) -> None:
    """Compared with the time of the fastest executor alone."""
    costs = sorted(costs)
    done, end = split(costs, parts)
    assert sum(done) == parts
    alone = -(-parts // PARALLEL_CHANNELS) * costs[0]
    assert end <= alone + 2 * costs[0] + 1e-9


def test_each_part_is_taken_once_by_many_threads() -> None:
    provider = KnownProvider(Peer("p", "", "executor", "", 1, None))  # type: ignore[arg-type]
    parts = [LargePart() for _ in range(500)]
    queue = PartQueue(parts, [provider] * 8)  # type: ignore[arg-type]
    taken: list[object] = []

    def work() -> None:
        while (part := queue.take(provider, only_if_faster=True)) is not None:
            taken.append(part)

    with beside(*[work] * 8):
        pass
    assert {id(part) for part in taken} == {id(part) for part in parts}
    assert len(taken) == 500
