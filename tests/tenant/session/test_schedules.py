"""The rules of a session over random schedules, as a state machine.

Executors and helpers fail, lie, are silent, refuse connections, join, leave, and change their roles and companies from
one session to the next; products are of any layer group, direction and size, large ones are split over replicas. After
every step:

* a product has the bits of the clear product, or ends in an error, by its deadline in both cases;
* every row of a product was checked, and no provider is asked again after its quarantine (rule 6);
* no mask row was used for two rows (rule 3). The rows of all products of a place are equal, so two equal masked rows
  have the same mask; a request that is sent again belongs to the same product.

At the end of a session, the data of all providers of a company, from all sessions, is combined, and every row that an
executor received is explained by the seeds of that session: it must be the true row plus exactly `k` streams, of
helpers of k companies, none of them the executor's company (rule 8).
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.routing.known_provider import Tolerance
from tenant.session.session import Session
from tests.simulator import SILENCE, Clock, Said
from tests.tenant.conftest import Scripted
from tests.tenant.scripted import Heard, ScriptedProvider, frame, product_of, store_of
from tests.waiting import until

PROVIDERS, GROUPS = 6, (0, 1, 8)
COMPANIES = "ABCD"
FAILURES = ("lost", "late", "truncates", "replays", "busy", "internal", "lie")
DEADLINE_S = 0.5  # of the clock, which waits for silent providers set forward
BUSY_S = 20.0  # a busy machine may need more
HASTY = Tolerance(least_patience_s=0.1, unknown_s=0.01, first_pause_s=0.01, last_pause_s=0.1)
"""Short waits, and short pauses after failures."""
Seeds = dict[int, Seed]
"""The helpers' seeds of one session, by the number of the provider."""
_PREFIX = 4  # columns that identify a row; by chance below 2^-100


@dataclass
class World:
    """Providers, and the data that all of them have received.

    Args:
        company: the company of each provider.
    """

    providers: Sequence[ScriptedProvider]
    company: Sequence[str] = ()
    explained: int = 0
    right: int = 0
    failing: dict[int, tuple[str, int]] = field(default_factory=dict)
    said: dict[int, bytes] = field(default_factory=dict)

    def begin(self, company: Sequence[str]) -> None:
        self.company = company
        self.failing.clear()
        for number, provider in enumerate(self.providers):
            provider.heard.clear()
            provider.refuse_connections = False
            provider.behaviour = lambda *heard, number=number: self._answer(number, *heard)

    def peer(self, number: int, role: wire.Role) -> Peer:
        return self.providers[number].peer(role, name=f"p{number}", operator=self.company[number])

    def _answer(self, number: int, heard: Heard, reply: wire.Result, answer: Tensor) -> Said:
        how, left = self.failing.get(number, ("", 0))
        if not left:
            self.said[number] = frame(reply, answer)
            return self.said[number]
        self.failing[number] = (how, left - 1)
        if how == "late":
            return SILENCE
        if how == "truncates":
            self.providers[number].say(frame(reply, answer)[: len(heard.payload) // 2])
        if how in ("lost", "truncates"):
            return None
        if how == "replays":
            return self.said.get(number)
        if how == "lie":
            answer[-1, 0] += 1
            return frame(reply, answer)
        return frame(wire.Failure(code=wire.ErrorCode(how), detail="not now"))


def breaches(
    world: World, facts: Sequence[GroupFacts], seeds: Seeds, k: int, row_of: Callable[[int, Direction], Tensor]
) -> list[str]:
    """Rows that executors have received in a session although they must not.

    Args:
        seeds: seeds of the session's helpers.
        row_of: returns the true row.
    """
    streams: dict[tuple[int, Direction], dict[bytes, tuple[int, ...]]] = {}
    found = []
    for number, provider in enumerate(world.providers):
        known = {h.request.seed for h in provider.heard if isinstance(h.request, wire.Effect)}
        assert known <= {seeds.get(number)}, "a helper knows its own seed alone"
        for heard in provider.executed:
            place = heard.request.group, heard.request.direction
            if place not in streams:
                streams[place] = explanations(facts, seeds, k, *place)
            for row in prefixes(heard.rows - row_of(*place)):
                holders = streams[place].get(row)
                world.explained += holders is not None
                if holders is None:
                    found.append(f"p{number} has heard a row that is not masked by {k} helpers")
                elif world.company[number] in {world.company[holder] for holder in holders}:
                    found.append(f"p{number} has heard a row under a pad of its own company")
                elif len({world.company[holder] for holder in holders}) < k:
                    found.append(f"p{number} has heard a row under a pad of fewer than {k} companies")
    return found


def explanations(
    all_facts: Sequence[GroupFacts], seeds: Seeds, k: int, group: int, direction: Direction
) -> dict[bytes, tuple[int, ...]]:
    """Every mask that `k` helpers can make together, by the first words of its row."""
    facts = all_facts[group]
    keys = {n: mask_key(seed, group_name=facts.entry.name, direction=direction) for n, seed in seeds.items()}
    width = facts.inputs(direction)
    # a copy of the first words, because sums over whole rows took most of this test's time
    expanded = {n: expand(key, first_row=0, rows=4096, width=width)[:, :_PREFIX].clone() for n, key in keys.items()}
    return {
        row: holders
        for holders in itertools.combinations(sorted(seeds), k)
        for row in prefixes(sum((expanded[n] for n in holders), torch.zeros(1, dtype=torch.int32)))
    }


def prefixes(rows: Tensor) -> list[bytes]:
    """The first words of each row."""
    words = rows[:, :_PREFIX].contiguous().numpy()
    return words.view(f"V{_PREFIX * rows.itemsize}").ravel().tolist()


@dataclass(frozen=True)
class Roles:
    """The roles of a session: numbers of its providers. `guests` join and leave while it runs; k helpers share a
    pad."""

    executors: tuple[int, ...]
    guests: tuple[int, ...]
    helpers: tuple[int, ...]
    k: int


@st.composite
def roles(draw: st.DrawFn) -> Roles:
    order = draw(st.permutations(range(PROVIDERS)))
    helpers = draw(st.integers(2, 4))
    executors = draw(st.integers(1, PROVIDERS - helpers))
    split = draw(st.integers(1, executors))
    return Roles(
        tuple(order[helpers : helpers + split]),
        tuple(order[helpers + split : helpers + executors]),
        tuple(order[:helpers]),
        draw(st.integers(1, 2)),
    )


def may_open(company: Sequence[str], cast: Roles) -> bool:
    """Returns True if `load_federation` would accept these roles: each executor has k helpers of other companies."""
    others = [{company[h] for h in cast.helpers} - {company[e]} for e in cast.executors + cast.guests]
    return all(len(companies) >= cast.k for companies in others)


@dataclass
class Run:
    """One session, and what it must not do again.

    Args:
        product: number of the product that is under way.
        used: the product for which each masked row was sent.
        after_quarantine: requests that each quarantined provider had received when it was.
    """

    world: World
    cast: Roles
    session: Session
    product: int = 0
    used: dict[tuple[int, Direction, bytes], int] = field(default_factory=dict)
    after_quarantine: dict[int, int] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)

    def row_of(self, group: int, direction: Direction) -> Tensor:
        return torch.arange(self.session.preparation.facts[group].inputs(direction), dtype=torch.int32) % 97 - 48

    def multiply(self, group: int, direction: Direction, count: int) -> None:
        """Compute a product, which is right or fails, in time."""
        row, session, began = self.row_of(group, direction), self.session, time.monotonic()
        self.product += 1
        try:
            product = session.product(GroupIndex(group), direction, row.repeat(count, 1))
        except SymbiosisError:
            pass  # no provider was left, or none that may see the row
        else:
            expected = product_of(store_of(session), group, direction, row[None])
            assert torch.equal(product, expected.repeat(count, 1))
            self.world.right += 1
        assert time.monotonic() - began < DEADLINE_S + BUSY_S
        self.settle()

    def settle(self) -> None:
        """Wait until no request for pads is under way, and check what the providers have heard since."""
        workers = [channel.worker for helper in self.session.runtime.helpers for channel in helper.channels]
        until(lambda: not any(worker.unfinished for worker in (*workers, self.session.runtime.pads.refill)))
        ledger = self.session.ledger()
        assert ledger.answers_verified >= ledger.rows
        assert not ledger.answers_rejected or self.session.routes.quarantined
        for number, provider in enumerate(self.world.providers):
            peers = [self.world.peer(number, role) for role in ("executor", "helper")]
            if any(peer in self.session.routes.quarantined for peer in peers):
                assert self.after_quarantine.setdefault(number, len(provider.heard)) == len(provider.heard)
            for heard in provider.heard[self._read.get(number, 0) :]:
                if isinstance(heard.request, wire.Execute):
                    for row in prefixes(heard.rows):
                        place = heard.request.group, heard.request.direction, row
                        assert self.used.setdefault(place, self.product) == self.product, "a mask was used twice"
            self._read[number] = len(provider.heard)

    def end(self) -> None:
        seeds = {int(helper.peer.name[1:]): helper.seed for helper in self.session.runtime.helpers}
        self.session.close()
        for provider in self.world.providers:  # requests that were being sent belong to this session
            provider.finish()
        assert breaches(self.world, self.session.preparation.facts, seeds, self.cast.k, self.row_of) == []


def opened(world: World, scripted: Scripted, cast: Roles, *, memory: int) -> Run:
    """A session with these roles."""
    for provider in world.providers:
        provider.heard.clear()
    session = scripted.new_session(
        "pad",
        [world.peer(n, "executor") for n in cast.executors],
        [world.peer(n, "helper") for n in cast.helpers],
        pad_helpers=cast.k,
        deadline_s=DEADLINE_S,
        pool_memory=memory,
        part_bytes=2048,
        tolerance=HASTY,
    )
    return Run(world, cast, session)


numbers = st.integers(0, PROVIDERS - 1)
memories = st.sampled_from((0, 1 << 20))
products = st.tuples(st.sampled_from(GROUPS), st.sampled_from(DIRECTIONS), st.integers(1, 30))


class Schedule(RuleBasedStateMachine):
    """Sessions of one world. `world` and `scripted` are those of the test."""

    world: World
    scripted: Scripted
    run: Run | None = None

    @initialize(
        start=st.tuples(st.tuples(*[st.sampled_from(COMPANIES)] * PROVIDERS), roles()).filter(lambda s: may_open(*s)),
        memory=memories,
    )
    def begin(self, start: tuple[tuple[str, ...], Roles], memory: int) -> None:
        self.world.begin(start[0])
        self.open(start[1], memory)

    @precondition(lambda self: self.run is None)
    @rule(cast=roles(), memory=memories)
    def open(self, cast: Roles, memory: int) -> None:
        if may_open(self.world.company, cast):
            self.run = opened(self.world, self.scripted, cast, memory=memory)

    @precondition(lambda self: self.run is not None)
    @rule(products=st.lists(products, min_size=1, max_size=4))
    def multiply(self, products: list[tuple[int, Direction, int]]) -> None:
        assert self.run is not None
        for product in products:
            self.run.multiply(*product)

    @rule(number=numbers, how=st.sampled_from(FAILURES), times=st.integers(1, 3))
    def fail(self, number: int, how: str, times: int) -> None:
        self.world.failing[number] = (how, times)

    @rule(number=numbers)
    def hang_up(self, number: int) -> None:
        for line in self.world.providers[number].lines:
            line.close()

    @rule(number=numbers, refuses=st.booleans())
    def refuse_connections(self, number: int, refuses: bool) -> None:
        self.world.providers[number].refuse_connections = refuses

    @precondition(lambda self: self.run is not None)
    @rule(here=st.booleans())
    def guests(self, here: bool) -> None:
        assert self.run is not None
        guests = [self.world.peer(n, "executor") for n in self.run.cast.guests if here]
        self.run.session.routes.update(guests)

    @precondition(lambda self: self.run is not None)
    @rule()
    def close(self) -> None:
        assert self.run is not None
        run, self.run = self.run, None
        run.end()

    def teardown(self) -> None:
        if self.run is not None:
            self.close()


@pytest.fixture
def world(scripted: Scripted) -> World:
    return World([scripted.new_provider() for _ in range(PROVIDERS)])


@pytest.mark.parametrize("network", [Clock()], ids=["clock"], indirect=True)
def test_rule_8_holds_over_random_schedules(world: World, scripted: Scripted) -> None:
    schedule = type("", (Schedule,), {"world": world, "scripted": scripted})
    run_state_machine_as_test(
        schedule,
        settings=settings(
            max_examples=40,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )
    assert world.explained > 100  # rows were sent, so the rules were tested
    assert world.right > 20


PLANTED = Roles(executors=(0, 1), guests=(), helpers=(2, 3), k=1)


def played(world: World, scripted: Scripted, *, cast: Roles = PLANTED) -> None:
    """One session with a schedule that is known to show each planted fault."""
    run = opened(world, scripted, cast, memory=0)
    try:
        for _ in range(4):
            run.multiply(1, BACKWARD, 2)
            world.failing[3] = ("lost", 3)
            run.multiply(1, FORWARD, 2)
    finally:
        run.end()


def test_rule_8_breach_every_executor_is_admissible(
    world: World, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executor 0 and helper 2 are one company. Without the rule, the checker must find a breach."""
    world.begin("ABACDD")
    played(world, scripted)
    assert world.right == 8
    monkeypatch.setattr(Federation, "admissible", lambda *parties: True)
    with pytest.raises(AssertionError, match="p0 has heard a row under a pad of its own company"):
        played(world, scripted)
