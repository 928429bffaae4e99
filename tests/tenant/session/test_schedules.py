"""The rules of a session over random schedules, as a state machine.

Executors and helpers fail, lie, are silent, refuse connections, show another certificate, come back, join, leave, and
change their roles, companies, layers and limits from one session to the next; products are of any layer group,
direction and size, one after another or several in one call, large ones are split over replicas; sessions fork. After
every step:

* a product has the bits of the clear product, or ends in an error that a provider gave cause for, by its deadline in
  both cases. In a patient session it is right whenever one executor and enough helpers could compute it;
* every row of a product was checked, only providers that have broken the protocol or lied are quarantined, and none of
  them is asked again (rule 6);
* no mask row was used for two rows (rule 3). The rows of all products of a place are equal, so two equal masked rows
  have the same mask; a request that is sent again belongs to the same product.

At the end of a session, the data of all providers of a company, from all sessions, is combined, and every row that an
executor received is explained by the seeds of that session: it must be the true row plus exactly `k` streams, of
helpers of k companies, none of them the executor's company (rule 8). Masks of "local" are nobody's streams.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

from symbiosis_priv import errors
from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.masking.backend import RingRows
from tenant.routing.known_provider import Tolerance
from tenant.session.session import Session
from tests.simulator import SILENCE, Clock, Said
from tests.tenant.conftest import Identities, Scripted
from tests.tenant.scripted import Heard, ScriptedProvider, frame, product_of, store_of
from tests.waiting import until

PROVIDERS, GROUPS = 6, (0, 1, 8)
COMPANIES = "ABCD"
PASSING = ("lost", "busy", "stopping")  # a request that is sent again is answered
LIES = ("replays", "lie", "truncates")
FAILURES = (*PASSING, *LIES, "late", "internal")
HASTY_S, PATIENT_S = 0.5, 60.0  # of the clock, which waits for silent providers set forward
BUSY_S = 20.0  # a busy machine may need more
HASTY = Tolerance(least_patience_s=0.1, unknown_s=0.01, penalty_times=0.0)
"""Short waits."""
Seeds = dict[int, Seed]
"""The helpers' seeds of one session, by the number of the provider."""
Product = tuple[int, Direction, int]
"""Layer group, direction, number of rows."""
_PREFIX = 4  # columns that identify a row; by chance below 2^-100


@dataclass
class World:
    """Providers, and the data that all of them have received."""

    providers: Sequence[ScriptedProvider]
    identities: Identities
    company: Sequence[str] = ()  # of each provider
    explained: int = 0
    right: int = 0
    failing: dict[int, tuple[str, int]] = field(default_factory=dict)  # how a provider fails, and how many more times
    away: set[int] = field(default_factory=set)  # providers that refuse connections, or show another certificate
    guilty: set[int] = field(default_factory=set)  # those that have sent a wrong answer, part of one, or another one
    said: dict[int, bytes] = field(default_factory=dict)

    def begin(self, company: Sequence[str], layers: Sequence[range], limits: Sequence[int]) -> None:
        self.company = company
        self.guilty.clear()
        for number, (provider, served, most) in enumerate(zip(self.providers, layers, limits, strict=True)):
            provider.heard.clear()
            provider.served, provider.max_rows = served, most
            provider.behaviour = lambda *heard, number=number: self._answer(number, *heard)
            self.disturb(number, "recovers")

    def peer(self, number: int, role: wire.Role) -> Peer:
        return self.providers[number].peer(role, name=f"p{number}", operator=self.company[number])

    def disturb(self, number: int, how: str, times: int = 1) -> None:
        provider = self.providers[number]
        if how in FAILURES:
            self.failing[number] = (how, times)
        elif how == "hangs up":
            provider.hang_up()
        else:
            provider.refuse_connections = how == "refuses"
            provider.show(self.identities.provider(number + PROVIDERS * (how == "shows another certificate")))
            if how == "recovers":
                self.failing.pop(number, None)
                self.away.discard(number)
            else:
                self.away.add(number)
                provider.hang_up()

    def allows(self, cast: "Roles") -> bool:
        """Returns True if all layers are served, and each executor has k helpers of other companies."""
        others = [{self.company[h] for h in cast.helpers} - {self.company[e]} for e in cast.executors + cast.guests]
        served = [[self.providers[n].served for n in numbers] for numbers in (cast.executors, cast.helpers)]
        return all(len(companies) >= cast.k for companies in others) and all(
            any(group in groups for groups in of_role) for group in GROUPS for of_role in served
        )

    def recover(self) -> None:
        for number in range(len(self.providers)):
            self.disturb(number, "recovers")

    def is_well(self, number: int) -> bool:
        """Returns True if the provider answers a request that is sent often enough. While one is silent, none counts as
        well: it takes the time of all requests on the clock."""
        if any(how == "late" and left for how, left in self.failing.values()):
            return False
        how, left = self.failing.get(number, ("", 0))
        return number not in self.away and (not left or how in PASSING)

    def _answer(self, number: int, heard: Heard, reply: wire.Result, answer: Tensor) -> Said:
        how, left = self.failing.get(number, ("", 0))
        if not left:
            self.said[number] = frame(reply, answer)
            return self.said[number]
        self.failing[number] = (how, left - 1)
        if how == "late":
            return SILENCE
        if how == "lost":
            return None
        if how in LIES:
            self.guilty.add(number)
            if how == "truncates":  # on the latest connection, whichever request came on it
                self.providers[number].say(frame(reply, answer)[: len(heard.payload) // 2])
            answer[-1, 0] += 1
            return frame(reply, answer) if how == "lie" else self.said.get(number) if how == "replays" else None
        return frame(wire.Failure(code=wire.ErrorCode(how), detail="not now"))


def breaches(
    world: World, facts: Sequence[GroupFacts], seeds: Seeds, k: int, row_of: Callable[[int, Direction], Tensor]
) -> list[str]:
    """Rows that executors have received in a session although they must not. `row_of`: returns the true row."""
    streams: dict[tuple[int, Direction], dict[bytes, tuple[int, ...]]] = {}
    found = []
    for number, provider in enumerate(world.providers):
        known = {h.request.seed for h in provider.heard if isinstance(h.request, wire.Effect)}
        assert known <= {seeds.get(number)}, "a helper knows its own seed alone"
        for heard in provider.executed:
            place = heard.request.group, heard.request.direction
            rows = prefixes(heard.rows - row_of(*place))
            for most in (512, 4096):
                if not streams.get(place, {}).keys() >= set(rows):
                    streams[place] = explanations(facts, seeds, k, *place, rows=most)
            for row in rows:
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
    all_facts: Sequence[GroupFacts], seeds: Seeds, k: int, group: int, direction: Direction, *, rows: int
) -> dict[bytes, tuple[int, ...]]:
    """Every mask that `k` helpers can make together, by the first words of its row, for the first `rows` rows."""
    facts = all_facts[group]
    keys = {n: mask_key(seed, group_name=facts.entry.name, direction=direction) for n, seed in seeds.items()}
    width = facts.inputs(direction)
    # a copy of the first words, because sums over whole rows took most of this test's time
    expanded = {n: expand(key, first_row=0, rows=rows, width=width)[:, :_PREFIX].clone() for n, key in keys.items()}
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
    """The roles of a session, by provider. `guests` join and leave while it runs; k helpers share a pad."""

    executors: tuple[int, ...]
    guests: tuple[int, ...]
    helpers: tuple[int, ...]
    k: int


def roles(rng: Random) -> Roles:
    order = rng.sample(range(PROVIDERS), PROVIDERS)
    helpers = rng.randint(2, 4)
    executors = rng.randint(2, PROVIDERS - helpers)
    split = rng.choice((executors, executors, 1))
    return Roles(
        tuple(order[helpers : helpers + split]),
        tuple(order[helpers + split : helpers + executors]),
        tuple(order[:helpers]),
        rng.choice((1, 1, 2)),
    )


@dataclass(frozen=True)
class Terms:
    """Options of a session. `patient`: products are asked for where they are possible, and must be right."""

    masking: str = "pad"
    memory: int = 0
    patient: bool = False
    pause_s: float = 0.01

    @property
    def deadline_s(self) -> float:
        return PATIENT_S if self.patient else HASTY_S


@dataclass
class Run:
    """One session, and what it must not do again."""

    world: World
    cast: Roles
    terms: Terms
    session: Session
    present: tuple[int, ...]  # executors of the session, and guests that have joined
    connected: bool = False  # a product was computed, so all layers were covered
    product: int = 0  # number of the product that is under way
    used: dict[tuple[int, Direction, bytes], int] = field(default_factory=dict)  # the product of each masked row
    after_quarantine: dict[int, int] = field(default_factory=dict)  # requests that each had received when it was
    _read: dict[int, int] = field(default_factory=dict)

    def row_of(self, group: int, direction: Direction) -> Tensor:
        return torch.arange(self.session.preparation.facts[group].inputs(direction), dtype=torch.int32) % 97 - 48

    def is_possible(self, group: int) -> bool:
        """Returns True if an executor and enough helpers can compute a product of this group, and are well."""

        def able(numbers: Sequence[int]) -> list[int]:
            return [n for n in numbers if self.world.is_well(n) and group in self.world.providers[n].served]

        company, lost = self.world.company, self.quarantined()
        helpers = [n for n in able(self.cast.helpers) if n not in lost]
        return any(
            self.terms.masking != "pad" or len({company[h] for h in helpers} - {company[e]}) >= self.cast.k
            for e in able(self.present)
            if e not in lost
        )

    def quarantined(self) -> set[int]:
        peers = [[self.world.peer(n, role) for role in ("executor", "helper")] for n in range(PROVIDERS)]
        return {n for n, own in enumerate(peers) if any(peer in self.session.routes.quarantined for peer in own)}

    def multiply(self, products: Sequence[Product]) -> None:
        """Compute products in one call. They are right or fail, in time."""
        groups = {group for group, _, _ in products}.union(() if self.connected else GROUPS)
        if self.terms.patient and not all(map(self.is_possible, groups)):
            self.world.recover()  # pauses go on
            if not all(map(self.is_possible, groups)):
                return
        self.product += 1
        asked, expected, began = list[tuple[GroupIndex, Direction, RingRows]](), list[Tensor](), time.monotonic()
        for group, direction, count in products:
            row, facts = self.row_of(group, direction), self.session.preparation.facts[group]
            rows = RingRows(row.repeat(count, 1), outputs=facts.outputs(direction))
            asked.append((GroupIndex(group), direction, rows))
            expected.append(product_of(store_of(self.session), group, direction, row[None]).repeat(count, 1))
        try:
            self.session.multiply_all(asked)
        except errors.SymbiosisError as error:
            assert not self.terms.patient, "a product fails that could have been computed"
            if isinstance(error, errors.VerificationError | errors.ProtocolError):
                assert self.world.guilty, "nobody has lied"
            self.world.recover()
        else:
            self.connected = True
            self.world.right += len(products)
            for (_, _, rows), right in zip(asked, expected, strict=True):
                assert torch.equal(rows.product, right)
        assert time.monotonic() - began < self.terms.deadline_s + BUSY_S
        self.settle()

    def settle(self) -> None:
        """Wait until no request for pads is under way, and check what the providers have heard since."""
        if self.terms.patient:
            self.world.recover()  # requests for pads ahead are repeated until they are answered
        workers = [channel.worker for helper in self.session.runtime.helpers for channel in helper.channels]
        until(lambda: not any(worker.unfinished for worker in (*workers, self.session.runtime.pads.refill)))
        ledger, quarantined = self.session.ledger(), self.quarantined()
        assert ledger.answers_verified >= ledger.rows
        assert not ledger.answers_rejected or quarantined
        assert quarantined <= self.world.guilty, "an honest provider is quarantined"
        assert not any(provider.in_flight for provider in self.session.routes.executors)
        for number, provider in enumerate(self.world.providers):
            if number in quarantined:
                assert self.after_quarantine.setdefault(number, len(provider.heard)) == len(provider.heard)
            for heard in provider.heard[self._read.get(number, 0) :]:
                if isinstance(heard.request, wire.Execute) and self.terms.masking != "none":
                    place = heard.request.group, heard.request.direction
                    assert not (heard.rows == self.row_of(*place)).all(dim=1).any(), "a row has left without a mask"
                    for row in prefixes(heard.rows):
                        assert self.used.setdefault((*place, row), self.product) == self.product, (
                            "a mask was used twice"
                        )
            self._read[number] = len(provider.heard)

    def fork(self) -> None:
        """Go on as a forked child does, with a secret and connections of its own. The parent ends."""
        self.explain(self.seeds())
        parent = self.session.runtime
        self.session._reset_after_fork()
        parent.close()
        self.connected = False
        self._read.clear()
        self.after_quarantine = dict.fromkeys(self.after_quarantine, 0)
        for provider in self.world.providers:
            provider.heard.clear()

    def seeds(self) -> Seeds:
        return {int(helper.peer.name[1:]): helper.seed for helper in self.session.runtime.helpers}

    def explain(self, seeds: Seeds) -> None:
        if self.terms.masking == "pad":
            assert breaches(self.world, self.session.preparation.facts, seeds, self.cast.k, self.row_of) == []

    def end(self) -> None:
        seeds = self.seeds()
        self.session.close()
        for provider in self.world.providers:  # requests that were being sent belong to this session
            provider.finish()
        self.explain(seeds)


def opened(world: World, scripted: Scripted, cast: Roles, terms: Terms) -> Run:
    """A session with these roles."""
    for provider in world.providers:
        provider.heard.clear()
    session = scripted.new_session(
        terms.masking,
        [world.peer(n, "executor") for n in cast.executors],
        [world.peer(n, "helper") for n in cast.helpers],
        pad_helpers=cast.k,
        deadline_s=terms.deadline_s,
        pool_memory=terms.memory,
        part_bytes=2048,
        tolerance=replace(HASTY, first_pause_s=terms.pause_s, last_pause_s=10 * terms.pause_s),
    )
    return Run(world, cast, terms, session, cast.executors)


KINDS = 3 * (*PASSING, "late", "internal", "recovers") + 2 * ("hangs up", "refuses", "shows another certificate") + LIES
LAYERS, LIMITS = (*[range(9)] * 6, range(4), range(4, 9)), (4096, 4096, 4096, 8, 1)
MASKINGS = ("pad", "pad", "pad", "pad", "local", "none")
seeds = st.integers(0, 2**64 - 1)
"""Draws of Hypothesis's own would be much alike from one step and example to the next."""


class Schedule(RuleBasedStateMachine):
    """Sessions of one world. `world` and `scripted` are those of the test. After every step, products are computed."""

    world: World
    scripted: Scripted
    run: Run

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        rng, casts = Random(seed), list[Roles]()
        while not casts:
            company, layers = rng.choices(COMPANIES, k=PROVIDERS), rng.choices(LAYERS, k=PROVIDERS)
            self.world.begin(company, layers, rng.choices(LIMITS, k=PROVIDERS))
            casts = [cast for _ in range(20) if self.world.allows(cast := roles(rng))]
        terms = Terms(rng.choice(MASKINGS), rng.choice((0, 1 << 20)), rng.random() < 0.75, rng.choice((0.01, 600.0)))
        self.run = opened(self.world, self.scripted, casts[0], terms)
        self.multiply(seed)

    @rule(seed=seeds)
    def multiply(self, seed: int) -> None:
        """Compute products. Before some of them, something happens to a provider, or to all of a role."""
        rng, cast = Random(f"{seed} {self.run.product}"), self.run.cast
        for _ in range(6):
            for _ in range(rng.randint(0, 2)):
                how, times = rng.choice(KINDS), rng.randint(1, 3)
                for number in rng.choice((*((n,) for n in range(PROVIDERS)), cast.executors, cast.helpers)):
                    self.world.disturb(number, how, times)
            places = rng.sample([*itertools.product(GROUPS, DIRECTIONS)], rng.choice((1, 1, 3)))
            self.run.multiply([(*place, rng.randint(1, 30)) for place in places])

    @rule(seed=seeds, here=st.booleans())
    def guests(self, seed: int, here: bool) -> None:
        guests = self.run.cast.guests if here else ()
        self.run.session.routes.update([self.world.peer(n, "executor") for n in guests])
        self.run.present = (*self.run.cast.executors, *guests)
        self.multiply(seed)

    @rule(seed=seeds)
    def fork(self, seed: int) -> None:
        self.run.fork()
        self.multiply(seed)

    @rule(seed=seeds)
    def begin_another(self, seed: int) -> None:
        """The providers have other roles and companies now, and know what they have received."""
        self.run.end()
        self.begin(seed)

    def teardown(self) -> None:
        self.run.end()


@pytest.fixture
def world(scripted: Scripted, identities: Identities) -> World:
    return World([scripted.new_provider() for _ in range(PROVIDERS)], identities)


@pytest.mark.parametrize("network", [Clock()], ids=["clock"], indirect=True)
def test_rule_8_holds_over_random_schedules(world: World, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant.routing.probing._GRACE_S", 0.05)  # products go on without providers that are away
    schedule = type("", (Schedule,), {"world": world, "scripted": scripted})
    run_state_machine_as_test(
        schedule,
        settings=settings(
            max_examples=25,
            stateful_step_count=4,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )
    assert world.explained > 100  # rows were sent, so the rules were tested
    assert world.right > 20
