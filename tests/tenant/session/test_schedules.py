"""Rule 8 over random schedules: a company that knows a pad's seed never sees a row masked with it, in any order.

Executors and helpers fail, lie, join, leave and change their roles from one session to the next; large products are
split over replicas. The data of all providers of a company, from all sessions, is combined. Then every row that an
executor received is explained by the seeds of that session: it must be the true row plus exactly `k` streams, of
helpers of k companies, none of them the executor's company.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from torch import Tensor

from provider.products.model import ServedModel
from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.routing.known_provider import Tolerance
from tenant.session.session import Session
from tests.simulator import SILENCE, Said
from tests.tenant.conftest import NewFederation, NewProvider
from tests.tenant.scripted import Heard, ScriptedProvider, frame
from tests.waiting import until

PROVIDERS, GROUPS = 6, (0, 1, 8)
COMPANIES = "ABCD"
FAILURES = ("lost", "late", "busy", "internal", "lie")
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

    def begin(self, company: Sequence[str]) -> None:
        self.company = company
        self.failing.clear()
        for number, provider in enumerate(self.providers):
            provider.heard.clear()
            provider.behaviour = lambda *heard, number=number: self._answer(number, *heard)
            provider.block_wait_s = 0.05

    def peer(self, number: int, role: wire.Role) -> Peer:
        return self.providers[number].peer(role, name=f"p{number}", operator=self.company[number])

    def _answer(self, number: int, heard: Heard, reply: wire.Result, answer: Tensor) -> Said:
        how, left = self.failing.get(number, ("", 0))
        if not left:
            return frame(reply, answer)
        self.failing[number] = (how, left - 1)
        if how == "late":
            return SILENCE
        if how == "lost":
            return None
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


@pytest.fixture
def world(new_provider: NewProvider) -> World:
    return World([new_provider() for _ in range(PROVIDERS)])


@dataclass(frozen=True)
class Roles:
    """The roles of a session: numbers of its providers. `guests` join and leave while it runs; k helpers share a pad,
    and may relay its effects."""

    executors: tuple[int, ...]
    guests: tuple[int, ...]
    helpers: tuple[int, ...]
    k: int
    relay: bool = False


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
        draw(st.booleans()),
    )


Event = tuple[str, int, int, int]
events = st.lists(
    st.one_of(
        st.tuples(st.just("product"), st.sampled_from(GROUPS), st.integers(0, 1), st.integers(1, 30)),
        st.tuples(st.sampled_from(FAILURES), st.integers(0, PROVIDERS - 1), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("guests"), st.integers(0, 1), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=12,
)


@dataclass
class Player:
    """Runs schedules against the real session."""

    world: World
    new_federation: NewFederation
    preparation: Preparation
    store: WeightStore

    def row_of(self, group: int, direction: Direction) -> Tensor:
        return torch.arange(self.preparation.facts[group].inputs(direction), dtype=torch.int32) % 97 - 48

    def play(self, cast: Roles, schedule: Sequence[Event], *, memory: int) -> list[str]:
        """Run one session to its end. Returns the breaches."""
        world, peer = self.world, self.world.peer
        for provider in world.providers:
            provider.heard.clear()
        federation = self.new_federation(
            [peer(n, "executor") for n in cast.executors],
            [peer(n, "helper") for n in cast.helpers],
            pad_helpers=cast.k,
            relay=cast.relay,
        )
        options = SessionOptions(masking="pad", deadline_s=1.0, pool_memory=memory, part_bytes=2048, tolerance=HASTY)
        session = Session(federation, self.preparation, options=options)
        try:
            seeds = {int(helper.peer.name[1:]): helper.seed for helper in session.runtime.helpers}
            for event in schedule:
                self.step(session, cast, event)
        finally:
            session.close()
            for provider in world.providers:  # requests that were being sent belong to this session
                provider.finish()
        return breaches(world, self.preparation.facts, seeds, cast.k, self.row_of)

    def step(self, session: Session, cast: Roles, event: Event) -> None:
        kind, number, amount, count = event
        if kind == "guests":
            session.routes.update([self.world.peer(n, "executor") for n in cast.guests] if number else [])
        elif kind != "product":
            self.world.failing[number] = (kind, amount)
        else:
            direction = DIRECTIONS[amount]
            row = self.row_of(number, direction)
            weight = self.store.group(number).weight.to(torch.int64)
            expected = (row.to(torch.int64) @ (weight.t() if direction == FORWARD else weight)).to(torch.int32)
            try:
                product = session.product(GroupIndex(number), direction, row.repeat(count, 1))
            except SymbiosisError:
                return  # no provider was left, or none that may see the row
            assert torch.equal(product, expected.repeat(count, 1))
            self.world.right += 1


@pytest.fixture
def player(world: World, new_federation: NewFederation, preparation: Preparation, store: WeightStore) -> Player:
    return Player(world, new_federation, preparation, store)


def may_open(federation: Federation, k: int) -> bool:
    """Returns True if `load_federation` would accept this federation."""
    return all(
        federation.companies_of([h for h in federation.helpers if federation.admissible(executor, [h])]) >= k
        for executor in federation.executors
    )


def test_rule_8_holds_over_random_schedules(player: Player) -> None:
    world = player.world

    @given(
        company=st.lists(st.sampled_from(COMPANIES), min_size=PROVIDERS, max_size=PROVIDERS),
        sessions=st.lists(st.tuples(roles(), events, st.sampled_from((0, 1 << 20))), min_size=1, max_size=2),
    )
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    def holds(company: list[str], sessions: list[tuple[Roles, list[Event], int]]) -> None:
        world.begin(company)
        for cast, schedule, memory in sessions:
            everybody = player.new_federation(
                [world.peer(n, "executor") for n in cast.executors],
                [world.peer(n, "helper") for n in cast.helpers],
                pad_helpers=cast.k,
            )
            assume(may_open(everybody, cast.k))
            assert player.play(cast, schedule, memory=memory) == []

    holds()
    assert world.explained > 100  # rows were sent, so the rule was tested
    assert world.right > 20


PLANTED = Roles(executors=(0, 1), guests=(), helpers=(2, 3), k=1)
SCHEDULE: list[Event] = [("product", 1, DIRECTIONS.index(BACKWARD), 2), ("lost", 3, 3, 0), ("product", 1, 0, 2)] * 4


def test_rule_8_breach_every_executor_is_admissible(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executor 0 and helper 2 are one company. Without the rule, the checker must find a breach."""
    player.world.begin("ABAC")
    assert player.play(PLANTED, SCHEDULE, memory=0) == []
    assert player.world.right == 8
    monkeypatch.setattr(Federation, "admissible", lambda *parties: True)
    found = player.play(PLANTED, SCHEDULE, memory=0)
    assert "p0 has heard a row under a pad of its own company" in found


def test_a_request_that_arrives_late_is_judged_in_its_own_session(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's request is in flight while its session closes, and the next session sends nothing."""
    mask_rows, close = ServedModel.mask_rows, Session.close
    sent: list[wire.Effect] = []

    def arrive_late(self: ServedModel, request: wire.Effect) -> Tensor:
        sent.append(request)
        time.sleep(0.05)
        return mask_rows(self, request)

    def close_when_sent(self: Session) -> None:
        until(lambda: len(sent) >= 2)
        close(self)

    monkeypatch.setattr(ServedModel, "mask_rows", arrive_late)
    monkeypatch.setattr(Session, "close", close_when_sent)
    player.world.begin("ABCD" + "AB")
    one_helper = Roles(executors=(0,), guests=(), helpers=(1,), k=1)
    assert player.play(one_helper, [("product", 1, 0, 2)], memory=1 << 20) == []
    assert len(player.world.providers[1].effects) == 2
    assert player.play(one_helper, [], memory=0) == []
