"""Providers that come and go during products: always the same bits, or an error that names the missing provider."""

import contextlib
import dataclasses
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from symbiosis_priv import errors
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import MOST_CHANNELS
from tenant.routing.known_provider import Tolerance
from tenant.session.session import Session
from tests.simulator import SILENCE, Said
from tests.tenant.conftest import Identities, NewProvider, NewSession, Scripted
from tests.tenant.scripted import (
    TIMEOUT_S,
    Behaviour,
    Heard,
    ScriptedProvider,
    frame,
    honest,
    is_right,
    silent,
    spoil,
    together,
)
from tests.waiting import until

QKV, OUT, MLP, DOWN = map(GroupIndex, range(4))


def all_right(session: Session, *, count: int = 3) -> bool:
    """Returns True if products of every layer group are right in both directions."""
    places = itertools.product(map(GroupIndex, range(9)), DIRECTIONS)
    return all(is_right(session, *place, count, seed) for seed, place in enumerate(places))


IMPATIENT = Tolerance(stale_s=0.1, stale_times=1.0, least_patience_s=0.2, unknown_s=0.02)
"""A provider is late after a fifth of a second, and is measured again if it was not asked for a tenth."""


# Addresses of one provider


def together_at(*places: ScriptedProvider, role: wire.Role = "executor") -> Peer:
    """One provider, whose addresses are those of several scripted providers with its certificate."""
    first, *others = (place.peer(role, name=f"the {role}") for place in places)
    return dataclasses.replace(first, others=tuple((other.host, other.port) for other in others))


@pytest.mark.usefixtures("sockets")
@pytest.mark.parametrize("pad_helpers", [None, 1])
def test_each_address_of_a_provider_is_asked_for_the_layers_that_it_serves(
    scripted: Scripted, identities: Identities, pad_helpers: int | None
) -> None:
    """As with one process per card, of an executor and of a helper. A lie at one address is the provider's."""
    cards = [[scripted.new_provider(identity=identities.provider(n), layers=layers) for layers in "01"] for n in (0, 1)]
    executor, helper = together_at(*cards[0]), together_at(*cards[1], role="helper")
    session = scripted.new_session("pad", [executor], [helper], pad_helpers=pad_helpers, deadline_s=10.0)
    assert all_right(session)
    assert {len({heard.request.group for heard in card.heard}) for card in itertools.chain(*cards)} == {4, 5}
    connection = executor.connection(scripted.new_federation([executor]).tls_context(executor))
    with contextlib.closing(connection):
        connection.open(time.monotonic() + 20)
        assert connection.stream is not None
        assert connection.stream.raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # NATs forget idle ones
    one_card = scripted.new_session("pad", [executor], [cards[1][0].peer("helper")], pad_helpers=pad_helpers)
    with pytest.raises(errors.UncoveredError, match="no helper serves layers 1 of"):
        all_right(one_card)
    cards[0][1].behaviour = spoil
    with pytest.raises(errors.VerificationError):
        is_right(session, GroupIndex(8), FORWARD, 3)
    with pytest.raises(errors.QuarantinedError):
        is_right(session, QKV, FORWARD, 3)


def test_an_address_that_is_away_is_waited_for_and_the_others_are_not(
    scripted: Scripted, identities: Identities
) -> None:
    """A card's process that ends and starts again delays the products of its own layers only."""
    cards = [scripted.new_provider(identity=identities.provider(0), layers=layers) for layers in "01"]
    session = scripted.new_session("local", [together_at(*cards)], deadline_s=TIMEOUT_S)
    assert all_right(session)
    cards[1].refuse_connections = True
    cards[1].hang_up()
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(is_right, session, GroupIndex(8), FORWARD, 3)
        until(lambda: session.routes.executors[1].health.failures)
        assert is_right(session, QKV, FORWARD, 3)
        assert not waits.done()
        cards[1].refuse_connections = False
        assert waits.result(TIMEOUT_S)
    assert all_right(session)
    assert session.routes.executors[0].health.failures == 0


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_addresses_with_the_same_layers_take_over_from_each_other(
    scripted: Scripted, identities: Identities, role: wire.Role
) -> None:
    """Products go on at the other address, with the bits that they had before; also if one address never answers."""
    places = [scripted.new_provider(identity=identities.provider(0)) for _ in range(2)]

    def session_with(alpha: Peer, deadline_s: float) -> Session:
        executors, helpers = ([alpha], [scripted.helper]) if role == "executor" else ([scripted.executor], [alpha])
        return scripted.new_session("pad", executors, helpers, deadline_s=deadline_s)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        alpha = dataclasses.replace(together_at(*places, role=role), others=(silent.getsockname(),))
        session = session_with(alpha, 5.0)
        for _ in range(3):
            assert all_right(session)
            places[0].hang_up()
    session = session_with(together_at(*places, role=role), TIMEOUT_S)
    for lost in (0, 1):
        assert all_right(session)
        places[lost].refuse_connections, places[not lost].refuse_connections = True, False
        places[lost].hang_up()
        assert all_right(session)


# Executors


def fails(how: str) -> Behaviour:
    """Make a provider fail from now on."""

    def behave(heard: Heard, reply: wire.Result, answer: Tensor) -> Said:
        if how == "lost":
            return None
        if how == "late":
            return SILENCE
        if how == "lie":
            answer[-1, 0] += 1
            return frame(reply, answer)
        return frame(wire.Failure(code=wire.ErrorCode(how), detail="not now"))

    return behave


@pytest.mark.parametrize(("how", "masking"), [("lost", "local"), ("late", "pad"), ("stopping", "pad"), ("lie", "pad")])
def test_another_executor_gets_the_same_bytes(
    new_provider: NewProvider, new_session: NewSession, caplog: pytest.LogCaptureFixture, how: str, masking: str
) -> None:
    first, second = new_provider(), new_provider()
    session = new_session(masking, [first, second], [] if masking == "local" else [new_provider()], tolerance=IMPATIENT)
    assert is_right(session, OUT, FORWARD, 3, 0)
    failing, other = (first, second) if first.executed else (second, first)
    failing.behaviour = fails(how)
    with caplog.at_level(logging.INFO):
        while len(failing.executed) < 2:  # products move to the other executor only after this one was asked
            assert is_right(session, MLP, FORWARD, 3, 1)
    refused, replayed = failing.executed[-1], other.executed[-1]
    assert refused.payload == replayed.payload
    assert refused.request.nonce != replayed.request.nonce
    assert all_right(session)
    assert session.ledger().takeovers >= 1
    assert f"executor '{other.peer('executor').name}' took over from executor 'executor {failing.port}'" in caplog.text


def test_a_connection_that_was_closed_between_requests_is_no_failure(scripted: Scripted) -> None:
    """Connections close between requests if a provider restarts or closes an idle connection."""
    providers = [scripted.new_provider(), scripted.new_provider()]
    session = scripted.new_session("local", providers)
    for _ in range(3):
        assert all_right(session)
        for provider in providers:
            provider.hang_up()
    assert session.ledger().takeovers == 0


@contextlib.contextmanager
def every_channel_taken(session: Session) -> Iterator[None]:
    """Take every connection, as other threads of the program could."""
    with contextlib.ExitStack() as stack:
        for provider in session.routes.executors:
            executor = session.runtime.executors[provider]
            for _ in range(MOST_CHANNELS):
                stack.enter_context(executor.take(until=time.monotonic() + 20))
        yield


def test_connections_in_use_are_not_a_failure_of_an_executor(scripted: Scripted) -> None:
    """However long it takes: patience begins once a connection is free."""
    tolerance = dataclasses.replace(IMPATIENT, least_patience_s=0.5)
    session = scripted.new_session("local", [scripted.new_provider(), scripted.new_provider()], tolerance=tolerance)
    assert all_right(session)
    with ThreadPoolExecutor(1) as thread:
        with every_channel_taken(session):
            asked = thread.submit(is_right, session, OUT, FORWARD, 3, 0)
            with pytest.raises(TimeoutError):
                asked.result(0.7)
        assert asked.result(20)
    assert [provider.health.failures for provider in session.routes.executors] == [0, 0]
    hasty = scripted.new_session("local", deadline_s=1.0)
    assert is_right(hasty, OUT, FORWARD, 3, 0)
    with every_channel_taken(hasty), pytest.raises(errors.DeadlineExceededError, match=r"other threads.*fewer threads"):
        is_right(hasty, OUT, FORWARD, 3, 0)
    (provider,) = hasty.routes.executors
    assert (provider.health.failures, provider.in_flight) == (0, 0)
    assert is_right(hasty, OUT, FORWARD, 3, 0)


def test_a_returning_spare_helper_is_asked_when_the_other_one_fails(scripted: Scripted) -> None:
    """The spare helper, which has failed before, is probed while the product waits for the other one."""
    helpers = [scripted.new_provider(), scripted.new_provider()]
    session = scripted.new_session(
        "pad",
        [scripted.new_provider()],
        helpers,
        pad_helpers=1,
        pool_memory=0,
        deadline_s=20.0,
        tolerance=dataclasses.replace(IMPATIENT, first_pause_s=600.0, last_pause_s=600.0),
    )
    assert all_right(session)
    first = helpers[len(helpers[1].effects) > len(helpers[0].effects)]
    second = next(helper for helper in helpers if helper is not first)
    first.behaviour = fails("lost")
    assert all_right(session)
    first.behaviour = honest
    second.behaviour = fails("lost")
    assert all_right(session)


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_a_refusal_by_all_providers_of_a_role_is_reported(scripted: Scripted, role: str) -> None:
    pair, single = [scripted.new_provider(), scripted.new_provider()], [scripted.new_provider()]
    for provider in pair:
        provider.behaviour = fails("internal")
    session = scripted.new_session("pad", *((pair, single) if role == "executor" else (single, pair)), pad_helpers=1)
    with pytest.raises(errors.ProviderError, match="answered internal: not now"):
        is_right(session, OUT, FORWARD, 3, 0)


def test_an_executor_that_is_away_at_the_start_joins_later(new_provider: NewProvider, new_session: NewSession) -> None:
    here, later = new_provider(), new_provider()
    later.refuse_connections = True
    session = new_session("local", [later, here])
    assert all_right(session)
    assert not later.hellos
    later.refuse_connections = False
    here_first = len(here.executed)
    while not later.executed:
        assert is_right(session, OUT, FORWARD, 1, 0)
    assert len(here.executed) > here_first


def test_a_refused_first_connection_does_not_wait_out_the_deadline(
    new_provider: NewProvider, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that has answered before may be restarting: the wait lasts until the deadline."""
    monkeypatch.setattr("tenant.session.runtime._REFUSED_S", 0.2)
    nobody, there = new_provider(), new_provider()
    nobody.close()
    began = time.monotonic()
    with pytest.raises(errors.ConnectionLostError, match="nothing listens"):
        is_right(new_session("none", [nobody]), QKV, FORWARD, 1, seed=1)
    assert time.monotonic() - began < 10.0  # the session's deadline is 20
    session = new_session("none", [there], deadline_s=3.0)
    assert is_right(session, QKV, FORWARD, 1, seed=1)
    there.close()
    with pytest.raises(errors.DeadlineExceededError):
        session.runtime._connect_with_retries(session.routes.executors[0], lambda: True)


@pytest.mark.parametrize("away", [True, False])
def test_closing_ends_the_wait_for_executors(new_provider: NewProvider, new_session: NewSession, away: bool) -> None:
    """Both are away, or one of them is silent."""
    asked, providers = threading.Event(), [new_provider(), new_provider()]
    session = new_session("none", providers, deadline_s=60.0)
    assert is_right(session, QKV, FORWARD, 1, seed=1)
    for provider in providers:
        provider.behaviour = silent(asked)
        if away:
            provider.close()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(is_right, session, QKV, FORWARD, 1, seed=1)
        until(lambda: asked.is_set() or all(known.health.failures > 1 for known in session.routes.executors))
        session.close()
        assert isinstance(waiting.exception(20), errors.SymbiosisError)


# Layers


def test_an_executor_that_joins_is_asked_for_the_layers_that_it_states_itself(scripted: Scripted) -> None:
    """A registry still lists the range before a move. No executor joins that is a party already, or of a helper's
    company."""
    low, moved, own = scripted.new_provider(layers="0"), scripted.new_provider(layers="1"), scripted.new_provider()
    session = scripted.new_session("pad", [low], [scripted.helper.peer("helper", operator="Beta")])
    listed = dataclasses.replace(moved.peer("executor"), layers=LayerRange.parse("0"))
    party = scripted.helper.peer("executor", name="other")
    session.routes.update([party, own.peer("executor", operator=" beta"), listed])
    for _ in range(3):
        assert all_right(session)
    assert {h.request.group for h in moved.executed} == set(range(4, 9))
    assert scripted.helper.executed == own.executed == []


def test_unserved_layers_are_an_error_before_anything_is_sent(scripted: Scripted) -> None:
    low, gone = scripted.new_provider(layers="0"), scripted.new_provider(layers="1")
    gone.close()
    session = scripted.new_session("pad", [low, gone], [helper := scripted.new_provider()], deadline_s=0.5)
    with pytest.raises(
        errors.UncoveredError, match=r"no executor serves layers 1 .*executor .* serves 0; executor .* has not answered"
    ):
        is_right(session, QKV, FORWARD, 1, 0)
    other = scripted.new_session("pad", [low], [helper])
    with pytest.raises(errors.UncoveredError, match="no executor serves layers 1"):
        is_right(other, QKV, FORWARD, 1, 0)
    assert low.executed == helper.effects == []


@pytest.mark.usefixtures("python_interrupts", "sockets")
def test_an_interrupt_while_a_session_opens_ends_the_interrupted_call_alone(scripted: Scripted) -> None:
    session, (asked, go_on) = scripted.new_session("pad"), (threading.Event(), threading.Event())

    def refusal(_: wire.Hello) -> None:
        asked.set()
        assert go_on.wait(TIMEOUT_S)

    def interrupt() -> None:
        assert asked.wait(TIMEOUT_S)
        others.extend(pool.submit(is_right, session, QKV, FORWARD, 1, seed) for seed in range(3))
        connecting: Any = session.runtime.prober._connecting
        until(lambda: len(connecting._condition._waiters) == 3)  # all others wait for the thread that connects
        signal.pthread_kill(main, signal.SIGINT)

    scripted.executor.refusal, main = refusal, threading.get_ident()
    others: list[Future[bool]] = []
    with ThreadPoolExecutor(4) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            is_right(session, QKV, FORWARD, 1, 0)
        interrupted.result(TIMEOUT_S)
        others.append(pool.submit(is_right, session, QKV, FORWARD, 1, 4))
        prober: Any = session.runtime.prober
        until(lambda: others[-1].done() or not prober._connecting.done())  # it waits, too
        go_on.set()
        assert [other.exception(TIMEOUT_S) for other in others] == [None] * 4
        assert all(other.result() for other in others)


# Coming and going


def test_another_executor_joins_while_the_last_one_of_some_layers_is_waited_for(
    new_provider: NewProvider, new_session: NewSession
) -> None:
    low, high, next_high = (new_provider(layers=layers) for layers in ("0", "1", "1"))
    session = new_session("pad", [low], [new_provider(), new_provider()], pad_helpers=1, pool_memory=0)
    session.routes.update([high.peer("executor")])
    assert all_right(session)
    session.routes.update([])
    heard = len(high.heard)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(is_right, session, GroupIndex(7), FORWARD, 3, 0)
        assert not waiting.done()
        session.routes.update([next_high.peer("executor")])
        assert waiting.result(20)
    assert all_right(session)
    assert len(high.heard) == heard
    assert all(figures.name != f"executor {high.port}" for figures in session.ledger().providers)


def test_layers_that_the_file_leaves_out_are_an_immediate_error(
    executor: ScriptedProvider, new_provider: NewProvider, new_session: NewSession
) -> None:
    """Before any request."""
    low = dataclasses.replace(executor.peer("executor"), layers=LayerRange(0, 0))
    with pytest.raises(
        errors.UncoveredError, match=r"no executor serves layers 1 of this model, by the federation file.*serves 0"
    ):
        new_session("local", [low])
    new_session("local", [low, new_provider()])  # the file does not say which layers that executor serves
    assert executor.hellos == []


# Splitting large products


def test_parts_of_one_product_go_to_all_replicas(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer comes before four parts have arrived, two at each replica."""
    monkeypatch.setattr(
        "tenant.routing.known_provider.ProviderHealth.seconds_for", lambda self, size: 1e-3
    )  # equally fast
    providers = [scripted.new_provider(), scripted.new_provider()]
    session = scripted.new_session("pad", providers, [scripted.new_provider()], part_bytes=1024)
    assert all_right(session)

    for provider in providers:
        provider.heard.clear()
    providers[0].behaviour = providers[1].behaviour = together(4)
    assert is_right(session, MLP, FORWARD, 80, 7)
    assert sum(len(provider.executed) for provider in providers) == 8


# Helpers


def test_a_helper_that_answers_only_probes_is_not_tried_repeatedly(
    new_provider: NewProvider, new_session: NewSession
) -> None:
    """Other helpers also do not wait for it, which would cost every product a moment."""
    hanging, other = new_provider(), new_provider()
    hanging.behaviour = fails("late")
    tolerance = dataclasses.replace(IMPATIENT, penalty_times=1e6)
    session = new_session("pad", [new_provider()], [hanging, other], pad_helpers=1, pool_memory=0, tolerance=tolerance)

    def take_a_moment(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        time.sleep(0.02)  # otherwise no product would wait for it
        return frame(reply, answer)

    other.behaviour = take_a_moment
    for _ in range(3):
        assert all_right(session)
    assert len(hanging.effects) == 1


@pytest.mark.parametrize("role", ["executor", "helper"])
@pytest.mark.parametrize("max_rows", [0, 1])
def test_one_providers_limits_do_not_change_requests_to_others(scripted: Scripted, role: str, max_rows: int) -> None:
    small, other, single = scripted.new_provider(max_rows=max_rows), scripted.new_provider(), scripted.new_provider()
    executors, helpers = ([small, other], [single]) if role == "executor" else ([single], [small, other])
    session = scripted.new_session("pad", executors, helpers, pad_helpers=1, pool_memory=0)
    for seed in range(6):
        assert is_right(session, OUT, FORWARD, 64, seed)
    for provider in (other, single):
        assert {heard.request.rows for heard in provider.heard} == {64}
    assert len(small.heard) <= 3 * 64  # as often as measuring its cost requires
