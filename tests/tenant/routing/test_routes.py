"""The choice of providers by coverage, admissibility, health and measured cost, and what is remembered of them. No
sockets; the test sets the clock."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import QuarantinedError, RangeError
from symbiosis_priv.federation import Company, Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.core.masked import Quarantine
from tenant.routing.known_provider import USUAL, KnownProvider, ProviderHealth, State
from tenant.routing.routes import Routes
from tenant.session.part_queue import PartQueue, multiply_parts
from tenant.worker import Worker
from tests.tenant.conftest import Identities
from tests.vouching import Vouching

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
    """Routes of one provider of each operator, named by a letter; all serve everything."""
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
    alone = routes_of(clock, "A")
    alone.failed(alone.executors[0], "lost")
    assert alone.choose(GROUP, SMALL, holders=()) is alone.executors[0]  # in every state of its breaker


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
    """A company is more than an operator."""
    holding = routes_of(clock, "AB", "CD", pad_helpers=1, companies=(Company("Holding", (), ("A", "C")),))
    first = holding.executors[0]
    assert [provider.peer.operator for provider in holding.holders(GROUP, first)] == ["D"]
    assert first not in holding.able(GROUP, [holding.helpers[0].peer])
    routes = routes_of(clock, "AB", "BC", pad_helpers=1)
    assert [provider.peer.operator for provider in routes.holders(GROUP)] == ["C"]
    assert routes.can_replace(GROUP, [routes.helpers[1].peer])  # the other helper, for the first executor
    assert not routes.can_replace(GROUP, [provider.peer for provider in routes.helpers])


def test_the_providers_left_after_quarantines_must_suffice_for_a_product(clock: Clock, identities: Identities) -> None:
    certificates = [identities.provider(number).certificate for number in range(3)]
    routes = routes_of(clock, "A", "BC", certificates=certificates, pad_helpers=1)
    routes.check(GROUP)
    routes.quarantine(routes.helpers[0].peer)
    routes.check(GROUP)
    routes.quarantine(routes.helpers[1].peer)
    with pytest.raises(QuarantinedError, match="too many helpers"):
        routes.check(GROUP)
    everybody = (*routes.executors, *routes.helpers)
    assert [provider.peer in routes.quarantined for provider in everybody] == [False, True, True]


# Circuit breakers and costs of one provider


def steady() -> ProviderHealth:
    return ProviderHealth(jitter=lambda: 0.5)


def test_pauses_double_with_every_failure_in_a_row_until_a_trial_is_answered() -> None:
    health, now, pauses = steady(), 0.0, []
    for number in range(12):
        assert health.failed(now) == (not number)  # afterwards it is not up
        assert health.state is State.DOWN
        pauses.append(health.retry_at - now)
        now = health.retry_at
        health.connected()
        assert str(health.state) == "trial"
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0
    assert health.answered(now, seconds=0.1, size=10)
    assert str(health.state) == "up"
    assert health.failed(now)
    assert health.retry_at == now + 0.25


@given(latency=st.floats(1e-4, 1.0), rate=st.floats(1e-9, 1e-6))
def test_cost_is_latency_and_bytes(latency: float, rate: float) -> None:
    health, large = steady(), 1 << 24
    for now in range(8):
        health.answered(float(now), seconds=latency, size=1000)
        health.answered(float(now), seconds=latency + large * rate, size=large)
    assert health.seconds_for(100) == pytest.approx(latency + 100 * rate, rel=1e-2)
    assert health.seconds_for(large // 2) == pytest.approx(latency + large // 2 * rate, rel=1e-2)


@given(sizes=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=30))
def test_a_provider_that_becomes_slower_does_not_increase_its_own_patience(sizes: list[int]) -> None:
    """A provider chooses its own cost, so the cost of other providers is the measure."""
    health = steady()
    for now, size in enumerate(sizes):
        patience = health.patience_s(size, others_s=0.3)
        assert patience <= max(2.0, 8 * 0.3)
        health.answered(float(now), seconds=0.99 * patience, size=size)


def test_a_wait_without_an_answer_brings_a_penalty_of_many_times_its_length() -> None:
    health = steady()
    for now in (0.0, 1000.0):
        health.failed(now, wasted_s=2.0)
        assert health.retry_at == now + 40.0
        health.connected()
        health.answered(now + 50.0, seconds=0.001, size=10)  # it makes no difference to the next pause
    health.failed(2000.0)
    assert health.retry_at == 2000.25
    health.failed(2000.1, wasted_s=2.0)  # another request that was lost at the same time
    assert health.retry_at == pytest.approx(2040.1)
    health.failed(3000.0, wasted_s=100.0)
    assert health.retry_at == 3600.0


# What is remembered of executors that come and go


def found(vouching: Vouching, who: str, **changes: object) -> Peer:
    """An executor as a registry lists it."""
    certificate = load_certificates(vouching.identity(who, operator="Liar AG").certificate)[0]
    peer = Peer(who, "Liar AG", "executor", "liar.example", 7401, certificate, layers=LayerRange(0, 3))
    return replace(peer, **changes)  # type: ignore[arg-type]


def test_announcing_other_layers_does_not_reset_an_executors_health(
    new_federation: Callable[..., Federation], vouching: Vouching
) -> None:
    """Otherwise it would get a trial, and cause a wait, after each new announcement."""
    gamma, delta = found(vouching, "liar"), found(vouching, "fresh", port=7402)
    routes = Routes(new_federation([]), with_helpers=False)
    routes.update([gamma])
    [first] = routes.executors
    routes.failed(first, "late")
    routes.update([replace(gamma, layers=LayerRange(0, 4))])
    [second] = routes.executors
    assert second is not first
    assert second.health.state is State.DOWN
    routes.update([])
    routes.update([delta, replace(gamma, layers=LayerRange(1, 3))])
    assert [str(provider.health.state) for provider in routes.executors] == ["up", "down"]


@given(name=st.booleans(), key=st.booleans(), address=st.booleans(), layers=st.integers(3, 5))
def test_one_unchanged_trait_identifies_a_quarantined_provider(
    vouching: Vouching, name: bool, key: bool, address: bool, layers: int
) -> None:
    """A provider can change each trait with the help of its authority; one unchanged trait is enough."""
    quarantine = Quarantine()
    quarantine.add(found(vouching, "liar"))
    again = found(
        vouching,
        "liar" if key else "fresh",
        name="LIAR" if name else "somebody",
        port=7401 if address else 7402,
        layers=LayerRange(0, layers),
    )
    assert (again in quarantine) == (name or key or address)


def test_changes_of_a_pinned_file_make_no_difference(vouching: Vouching, tmp_path: Path) -> None:
    pinned = tmp_path / "liar.pem"
    pinned.write_bytes(vouching.identity("liar").certificate.read_bytes())
    peer = found(vouching, "liar", certificate=pinned)
    quarantine = Quarantine()
    quarantine.add(peer)
    pinned.unlink()
    assert peer in quarantine


# Splitting


class LargePart:
    size = LARGE


def split(costs: Sequence[float], parts: int) -> tuple[list[int], float]:
    """Simulate parts over executors that take `costs` seconds for each. Returns the parts of each, and the time."""
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


def test_a_part_that_fails_ends_the_product_without_waiting_for_slots_that_have_not_begun() -> None:
    busy = threading.Event()
    providers = [KnownProvider(Peer(name, "", "executor", "", 1, None)) for name in ("free", "busy")]  # type: ignore[arg-type]
    executors: list[Any] = [SimpleNamespace(provider=one, workers=[Worker(one.peer.name)]) for one in providers]
    other = executors[1].workers[0].submit(busy.wait, 20.0)  # another product

    def fail(*_: object) -> None:
        raise RangeError("a part has failed")

    with pytest.raises(RangeError):
        multiply_parts([LargePart()] * 2, executors, fail)  # type: ignore[list-item]
    assert not other.done()
    busy.set()
    assert other.result(20.0)
    executors[1].workers[0].stop()
