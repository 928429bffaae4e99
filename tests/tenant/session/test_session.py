"""Sessions with providers that lie, disappear or have limits: exact answers, or none."""

import contextlib
import ctypes
import functools
import itertools
import random
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv import errors
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction, quantise_rows
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.core.blame import BlameKeys
from tenant.core.pads import EffectSource, PadOrder
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tenant.session.traffic import PredictedTraffic, of_step, of_token
from tests.simulator import SILENCE, Said
from tests.tenant.conftest import NewProvider, NewSession, Scripted
from tests.tenant.scripted import (
    Heard,
    ScriptedProvider,
    frame,
    honest,
    is_right,
    product_of,
    ring_rows,
    spoil,
    store_of,
    together,
)

QKV, OUT, MLP, DOWN, QKV_2, HEAD = map(GroupIndex, (0, 1, 2, 3, 4, 8))


# Exact answers


@pytest.mark.parametrize(("masking", "helpers"), [("none", 0), ("local", 0), ("pad", 1), ("pad", 2)])
def test_every_scheme_is_exact(new_provider: NewProvider, new_session: NewSession, masking: str, helpers: int) -> None:
    preparation: Preparation
    session: Session = new_session(masking, [new_provider()], [new_provider() for _ in range(helpers)])
    preparation = session.preparation

    @given(data=st.data(), index=st.sampled_from(range(9)), direction=testing.directions(), count=st.integers(1, 90))
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    def exact(data: st.DataObject, index: GroupIndex, direction: Direction, count: int) -> None:
        facts = preparation.facts[index]
        rows = data.draw(testing.float_rows(width=facts.inputs(direction), count=count))
        xq, _ = quantise_rows(rows, facts.bounds[direction])
        before = xq.clone()
        assert torch.equal(session.product(index, direction, xq), product_of(store_of(session), index, direction, xq))
        assert torch.equal(xq, before)

    exact()
    ledger = session.ledger()
    assert ledger.answers_rejected == 0
    assert ledger.answers_verified == ledger.rows > 0
    assert ledger.pads_taken == (0 if masking == "none" else ledger.rows)
    assert (ledger.effects_verified > 0) == (helpers > 0)


@pytest.mark.parametrize("limits", [{"max_rows": 8}, {"max_payload": 9 * 4 * 128}])
@pytest.mark.parametrize("limited", ["executor", "helper"])
def test_requests_are_split_to_the_limit_of_the_executor(
    new_provider: NewProvider, new_session: NewSession, limits: dict[str, int], limited: str
) -> None:
    small, large = new_provider(**limits), new_provider()
    executor, helper = (small, large) if limited == "executor" else (large, small)
    session = new_session("pad", [executor], [helper])
    for seed in range(3):  # the later ones find pads that were drawn ahead
        rows = ring_rows(session.preparation, QKV, FORWARD, 30, seed=seed)
        assert torch.equal(session.product(QKV, FORWARD, rows), product_of(store_of(session), QKV, FORWARD, rows))
    at_most = limits.get("max_rows", 9)
    assert sum(h.request.rows for h in executor.executed) == 90
    assert max(h.request.rows for h in small.heard) == at_most
    assert limited == "executor" or {h.request.rows for h in large.heard} == {30}


# Tampering


def wrong_entries(rng: random.Random, answer: Tensor) -> Tensor:
    """Errors of one bit, of one, of a row, of half or a quarter of the ring; exchanged rows; zeros."""
    wrong, place = answer.long(), rng.randrange(answer.numel())
    match rng.randrange(6):
        case 0:
            wrong.view(-1)[place] += 1 << rng.randrange(32)
        case 1:
            wrong.view(-1)[place] -= 1
        case 2:
            row = wrong[rng.randrange(len(wrong))]
            row += torch.tensor([1 + rng.randrange(2**31 - 1) for _ in row])
        case 3:
            step = rng.choice((1 << 30, 1 << 31))
            wrong += step * torch.tensor([rng.randrange(4) for _ in range(wrong.numel())]).view(wrong.shape)
            wrong.view(-1)[place] += step
        case 4:
            i, j = rng.sample(range(len(wrong)), 2)
            wrong[[i, j]] = wrong[[j, i]]
        case 5:
            wrong.zero_()
    return wrong.to(torch.int32)


class Liar:
    """Draws one lie per answer, and counts the lies that were sent."""

    def __init__(self, provider: ScriptedProvider, *, seed: int) -> None:
        self.provider, self.rng = provider, random.Random(seed)
        self.earlier: dict[tuple[Any, ...], tuple[wire.Result, Tensor]] = {}
        self.told = 0

    def __call__(self, heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        truth, lie = frame(reply, answer), frame(*self.lie(heard, reply, answer))
        self.told += lie != truth
        return lie

    def lie(self, heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Message, Tensor]:
        rng, digest, place = self.rng, "sha256:" + 64 * "0", (type(heard.request), reply.group, reply.direction)
        old, self.earlier[*place, reply.rows] = self.earlier.get((*place, reply.rows)), (reply, answer)
        shapes = answer[1:], torch.cat([answer, answer[:1]]), answer[:, 1:], answer[:0], answer.view(-1)[:-1]
        bindings: tuple[dict[str, Any], ...] = (
            {"nonce": bytes(reversed(reply.nonce))},
            {"group": (reply.group + 4) % 8},
            {"direction": BACKWARD if reply.direction == FORWARD else FORWARD},
            {"arithmetic": "float"},
            {"rows": reply.rows + 1},
        )
        lies: list[tuple[wire.Message, Tensor]] = [
            (msgspec.structs.replace(reply, **rng.choice(bindings)), answer),
            (reply, rng.choice(shapes)),
            (wire.Hello(version=wire.VERSION, role="executor", model_digest=digest), rng.choice((answer, answer[:0]))),
        ]
        if old is not None:  # the whole of an earlier answer, or its matrix under the current header
            lies.append((rng.choice((reply, old[0])), old[1]))
        if reply.group != HEAD:  # the right rows times the same layer's weights of the other block
            lies.append((reply, self.provider.product(heard, index=(reply.group + 4) % 8)))
        return (reply, wrong_entries(rng, answer)) if rng.random() < 0.6 else rng.choice(lies)


def tell_lies(session: Session, liar: Liar, *, count: int) -> list[errors.SymbiosisError]:
    """Send requests until `count` lies were sent. Each lie must be an error, and every other answer right."""
    rng, generator = liar.rng, torch.Generator().manual_seed(liar.rng.getrandbits(32))
    caught: list[errors.SymbiosisError] = []
    while liar.told < count:
        index, direction = GroupIndex(rng.randrange(9)), rng.choice(DIRECTIONS)
        shape = rng.randrange(2, 5), session.preparation.facts[index].inputs(direction)
        rows = torch.randint(-9999, 10_000, shape, dtype=torch.int32, generator=generator)
        told = liar.told
        try:
            answer = session.product(index, direction, rows)
        except (errors.VerificationError, errors.ProtocolError) as error:
            caught.append(error.with_traceback(None))  # frames hold tensors
            session.routes.quarantined.parties.clear()  # every answer comes from a new liar
        else:
            assert liar.told == told, "a lie was believed"
            assert torch.equal(answer, product_of(store_of(session), index, direction, rows))
    assert len(caught) == liar.told == session.ledger().answers_rejected
    return caught


@pytest.mark.parametrize(("masking", "role"), [("none", "executor"), ("pad", "executor"), ("pad", "helper")])
def test_every_tampered_answer_and_effect_is_caught(scripted: Scripted, masking: str, role: str) -> None:
    """Another seed in every run; pytest shows it when a test fails. By chance one lie passes with a probability below
    2^-50. Every pad is drawn when it is taken, so that each product gets one lie."""
    print("seed", seed := random.SystemRandom().getrandbits(32))
    provider = scripted.executor if role == "executor" else scripted.helper
    provider.behaviour = liar = Liar(provider, seed=seed)
    caught = tell_lies(scripted.new_session(masking, pool_memory=0), liar, count=300)
    blamed = [error for error in caught if getattr(error, "provider", None) == f"{role} {provider.port}"]
    # An error of 2^31 convicts no provider once in 2^16 times. Then all providers are suspects.
    assert role == "executor" or len(blamed) >= len(caught) - 4


# After a lie


def half_the_ring(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    answer[0, 0] ^= -(1 << 31)
    return reply, answer


def trust_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convict no provider, as happens once in 2^16 times with an error of 2^31."""
    monkeypatch.setattr(BlameKeys, "accepts", lambda *args, **kwargs: True)


@pytest.mark.parametrize("liar", ["executor", "helper"])
def test_without_a_conviction_all_participants_are_suspects(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    trust_everybody(monkeypatch)
    {"executor": scripted.executor, "helper": scripted.helper}[liar].behaviour = half_the_ring
    other = scripted.new_provider()
    session = scripted.new_session("pad", [scripted.executor, other], [scripted.helper])
    rows = ring_rows(session.preparation, OUT, FORWARD, 3)
    with pytest.raises(errors.VerificationError) as error:
        session.product(OUT, FORWARD, rows)
    assert error.value.provider == f"executor {scripted.executor.port} or helper {scripted.helper.port}"
    with pytest.raises(errors.QuarantinedError, match="nothing more is sent"):
        session.product(OUT, FORWARD, rows)
    assert [len(scripted.executor.executed), len(other.executed)] == [1, 0]


@pytest.mark.parametrize("liars", [["executor"], ["second"], ["executor", "first"], ["first", "second"]])
def test_only_liars_are_named(scripted: Scripted, liars: list[str]) -> None:
    """An executor and two helpers. Errors of 2^29, which pass the columns once in 2^48 times."""

    def little(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
        answer[1, 1] += 1 << 29
        return reply, answer

    parties = {"executor": scripted.executor, "first": scripted.new_provider(), "second": scripted.new_provider()}
    for liar in liars:
        parties[liar].behaviour = little
    helpers = [parties["first"], parties["second"]]
    session = scripted.new_session("pad", helpers=helpers, pool_memory=0)
    if liars == ["executor", "first"]:  # the errors cancel: the product is right
        session.product(OUT, FORWARD, ring_rows(session.preparation, OUT, FORWARD, 3))
        return
    with pytest.raises(errors.VerificationError) as error:
        session.product(OUT, FORWARD, ring_rows(session.preparation, OUT, FORWARD, 3))
    roles = {"executor": "executor", "first": "helper", "second": "helper"}
    assert error.value.provider == " and ".join(f"{roles[liar]} {parties[liar].port}" for liar in liars)


def test_no_request_leaves_until_a_fault_is_attributed(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting orders for pads leave only after the attribution, and never to the liar."""
    scripted.helper.behaviour = spoil
    session = scripted.new_session("pad", pool_memory=0)
    source = session.runtime.pads.source
    assert isinstance(source, EffectSource)
    accepts = BlameKeys.accepts
    heard: list[int] = []

    def slowly(*args: Any, **kwargs: Any) -> bool:
        if not heard:
            source.draw(PadOrder(GroupIndex(QKV), FORWARD, 1, ahead=True))
            source.draw(PadOrder(GroupIndex(MLP), FORWARD, 1))
        heard.append(len(scripted.helper.effects))
        return accepts(*args, **kwargs)

    monkeypatch.setattr(BlameKeys, "accepts", slowly)
    with pytest.raises(errors.VerificationError, match="an effect of provider"):
        session.product(OUT, FORWARD, ring_rows(session.preparation, OUT, FORWARD, 3))
    session.close()  # all orders have been sent by now, or never will be
    assert heard == [1, 1]
    assert [h.request.group for h in scripted.helper.effects if h.request.group == QKV] == []


def test_keys_are_deleted_after_a_lie(scripted: Scripted, store: WeightStore, tmp_path: Path) -> None:
    digest = store.manifest().digest
    scripted.executor.behaviour = spoil
    prepared = prepare(store, digest=digest, cache=tmp_path)
    session = scripted.new_session("none", prepared=prepared)
    (folder,) = (tmp_path / "tenant").iterdir()
    keys = [folder / f"{name}.safetensors" for name in ("keys", "blame", "second")]
    before = [path.read_bytes() for path in keys]
    with pytest.raises(errors.VerificationError):
        session.product(OUT, FORWARD, ring_rows(prepared, OUT, FORWARD, 1))
    assert not any(path.exists() for path in keys)
    prepare(store, digest=digest, cache=tmp_path)
    assert all(path.read_bytes() != old for path, old in zip(keys, before, strict=True))


# Parts


@pytest.mark.parametrize(("masking", "helpers"), [("none", 0), ("local", 0), ("pad", 2)])
def test_parts_give_the_same_bits(scripted: Scripted, masking: str, helpers: int) -> None:
    """Limits, buckets and pads may divide the rows."""
    executor = scripted.new_provider(max_rows=40)
    session: Session = scripted.new_session(
        masking, [executor], [scripted.new_provider() for _ in range(helpers)], part_bytes=2048, row_bucket=5
    )
    for seed, count in enumerate((1, 3, 37, 80, 96)):
        index, direction = GroupIndex(seed % 9), DIRECTIONS[seed % 2]
        rows = ring_rows(session.preparation, index, direction, count, seed=seed)
        with torch.inference_mode(bool(seed % 2)):
            got = session.product(index, direction, rows)
        assert torch.equal(got, product_of(store_of(session), index, direction, rows))
    sizes = [h.request.rows for h in executor.executed]
    assert len(sizes) > 5
    assert sum(sizes) == 5 + 5 + 40 + 80 + 100
    assert max(sizes) <= 40
    ledger = session.ledger()
    assert ledger.answers_verified == sum(sizes)
    assert len(executor.hellos) <= 2  # the caller's thread may have sent all parts before another begins
    if masking != "none":
        assert ledger.pads_taken == sum(sizes)
        masked = torch.cat([h.rows[:, :8] for h in executor.executed])
        assert len({row.numpy().tobytes() for row in masked}) == len(masked)  # by chance: below 2^-240


def test_the_parts_of_a_product_depend_only_on_its_size(executor: ScriptedProvider, new_session: NewSession) -> None:
    session = new_session("none", part_bytes=4096)
    for scale in (0, 1, 1000):
        session.product(MLP, FORWARD, ring_rows(session.preparation, MLP, FORWARD, 60, seed=scale) * (scale > 0))
    sizes = [h.request.rows for h in executor.executed]
    assert sorted(sizes) == [15] * 12


def test_several_products_of_one_layer_group_are_in_flight_at_once(
    executor: ScriptedProvider, session: Session
) -> None:
    """The executor answers no product before it has received all of them. No mask row is used twice."""
    executor.behaviour = together(4)
    rows = [ring_rows(session.preparation, QKV, FORWARD, count, seed=count) for count in (1, 2, 3, 5)]
    with ThreadPoolExecutor(len(rows)) as threads:
        for _ in range(3):
            products = list(threads.map(functools.partial(session.product, QKV, FORWARD), rows))
            for one, product in zip(rows, products, strict=True):
                assert torch.equal(product, product_of(store_of(session), QKV, FORWARD, one))
    sent = [(heard, one) for heard in executor.executed for one in rows if heard.request.rows == len(one)]
    masks = [row.numpy().tobytes() for heard, one in sent for row in heard.rows - one]
    assert len(set(masks)) == len(masks) == 3 * 11


@pytest.mark.parametrize("lies", [False, True])
def test_damage_to_the_tenants_own_weights_convicts_no_honest_provider(
    scripted: Scripted, preparation: Preparation, llama: Path, tmp_path: Path, lies: bool
) -> None:
    """The packed file is damaged while it is mapped. An executor that lies at the same time is convicted."""
    store = WeightStore(llama, cache=tmp_path)
    store.manifest()
    options = SessionOptions(masking="local", pool_memory=0)
    session = Session(scripted.new_federation([scripted.executor]), preparation, options=options, store=store)
    with contextlib.closing(session):
        rows = ring_rows(preparation, QKV, FORWARD, 3)
        assert torch.equal(session.product(QKV, FORWARD, rows), product_of(store_of(session), QKV, FORWARD, rows))
        for file in store.cache.glob(f"{store.manifest().groups[QKV].digest}-*"):
            with file.open("r+b") as data:
                data.seek(-64, 2)
                flipped = bytes(byte ^ 1 for byte in data.read(64))
                data.seek(-64, 2)
                data.write(flipped)
        if lies:
            scripted.executor.behaviour = spoil
        with pytest.raises(errors.CheckpointError, match="this machine's own") as error:
            session.product(QKV, FORWARD, rows)
        assert str(store.cache) in str(error.value)
        assert bool(session.routes.quarantined) == lies


def test_no_piece_begins_after_one_has_failed(executor: ScriptedProvider, new_session: NewSession) -> None:
    failure = wire.Failure(code=wire.ErrorCode.INTERNAL, detail="out of order")
    executor.behaviour = lambda *heard: frame(failure)
    session = new_session("none", part_bytes=4096)
    rows = ring_rows(session.preparation, MLP, FORWARD, 60)
    with pytest.raises(errors.ProviderError, match="answered internal: out of order"):
        session.product(MLP, FORWARD, rows)
    assert len(executor.executed) <= 2
    executor.behaviour = honest
    assert torch.equal(session.product(MLP, FORWARD, rows), product_of(store_of(session), MLP, FORWARD, rows))


# Away, full, closed


@pytest.mark.parametrize("absent", ["executor", "helper"])
def test_a_provider_that_stays_away_is_an_error_within_the_deadline(scripted: Scripted, absent: str) -> None:
    """Many pads may be on order: the product does not wait for each of them in turn."""
    deadline_s = 2.0
    session = scripted.new_session("pad", deadline_s=deadline_s)
    for index in map(GroupIndex, range(9)):  # leaves a full pool for each group
        session.product(index, FORWARD, ring_rows(session.preparation, index, FORWARD, 60))
    {"executor": scripted.executor, "helper": scripted.helper}[absent].close()
    started = time.monotonic()

    def go_on() -> None:
        nonlocal started
        for index in (*range(9), *reversed(range(9))):  # empties the pools, then waits for the last ordered pad
            started = time.monotonic()
            session.product(index, FORWARD, ring_rows(session.preparation, index, FORWARD, 60))

    with pytest.raises(errors.DeadlineExceededError, match=r"within 2 s.*RemoteConfig\(deadline_s=\.\.\.\)"):
        go_on()
    assert time.monotonic() - started < 8 * deadline_s  # nine pads, one after the other, would take longer


def test_closing_does_not_wait_for_absent_providers(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """Ordered pads are in flight when the session is closed, and no provider is blamed for it."""
    asked, earlier = threading.Event(), itertools.count()

    def answer_once(heard: Heard, reply: wire.Result, answer: Tensor) -> Said:
        if next(earlier):  # not the number of requests: the second one may arrive before the first is answered
            asked.set()
            return SILENCE
        return frame(reply, answer)

    scripted.helper.behaviour = answer_once
    session = scripted.new_session("pad", deadline_s=60.0)
    session.product(QKV, FORWARD, ring_rows(session.preparation, QKV, FORWARD, 60))
    assert asked.wait(20)
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < 20
    assert not [record for record in caplog.records if "has failed" in record.getMessage()]
    with pytest.raises(errors.SymbiosisError, match="closed; load the model again"):
        session.product(QKV, FORWARD, ring_rows(session.preparation, QKV, FORWARD, 60))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_tenant_with_a_session_makes_no_core_file_and_is_not_traced(session: Session) -> None:
    assert is_right(session, OUT, FORWARD, 1)  # connects
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE


# Counters and predictions


def test_the_ledger_shows_a_liar_and_the_others_work(
    new_session: NewSession, new_provider: NewProvider, executor: ScriptedProvider, helper: ScriptedProvider
) -> None:
    liar = new_provider()
    liar.behaviour = spoil
    session = new_session("pad", [liar, executor], [helper], pool_memory=0)
    session.product(QKV, FORWARD, ring_rows(session.preparation, QKV, FORWARD, 4))
    session.product(QKV, FORWARD, ring_rows(session.preparation, QKV, FORWARD, 4))
    found = {(figures.name, figures.role): figures for figures in session.ledger().providers}
    first, second, sharing = (
        found[peer.name, peer.role]
        for peer in (liar.peer("executor"), executor.peer("executor"), helper.peer("helper"))
    )
    assert (first.state, first.rejected, first.verified) == ("quarantined", 1, 0)
    assert (second.state, second.rejected) == ("up", 0)
    assert second.verified == 2
    assert second.requests >= 2
    assert second.latency_s is not None
    assert sharing.verified >= 2
    since = time.monotonic() - 5
    session.runtime.notices.waiting(helper.peer("helper").label, since=since, until=since + 9, why="it was killed")
    *others, waiting = session.ledger().providers
    assert [figures.state for figures in (*others, waiting)] == ["quarantined", "up", "not answering"]
    assert waiting.waited_s is not None
    assert waiting.left_s is not None
    assert waiting.waited_s >= 5
    assert waiting.waited_s + waiting.left_s == pytest.approx(9)
    assert {figures.left_s for figures in others} == {None}
    session.runtime.notices.answered(helper.peer("helper").label)
    ledger = session.ledger()
    assert [figures.state for figures in ledger.providers] == ["quarantined", "up", "up"]
    executors = [figures for figures in ledger.providers if figures.role == "executor"]
    assert sum(figures.bytes_sent for figures in executors) == ledger.bytes_to_executors
    assert sum(figures.bytes_received for figures in ledger.providers) == (
        ledger.bytes_from_executors + ledger.bytes_from_helpers
    )


def llama_7b() -> list[GroupEntry]:
    shapes = [(4096, 3 * (4096,)), (4096, (4096,)), (4096, 2 * (11008,)), (11008, (4096,))]
    return [
        GroupEntry(members=tuple(f"layers.{i}.{k}" for k in outputs), inputs=inputs, outputs=outputs, digest="")
        for i in range(32)
        for inputs, outputs in shapes
    ]


def test_the_traffic_of_a_llama_2_7b_token_equals_the_documented_figures() -> None:
    """Figures that were computed by hand, plus the headers of frames."""
    token = of_token(llama_7b())
    assert token.round_trips == token.turns == 4 * 32
    assert token.up == pytest.approx(2.98e6, rel=0.01)
    assert token.down == pytest.approx(5.44e6, rel=0.01)
    assert token.effects == 5439488


def test_a_step_goes_forward_and_back_in_parts() -> None:
    """The first group has no backward product; the parts of a large product share their latency."""
    groups, rows = llama_7b()[:4], 512
    step = of_step(groups, rows)
    columns = [4 * rows * (group.inputs + group.stacked_outputs) for group in groups]
    assert step.up + step.down - sum(2 * columns) + columns[0] < 300 * step.round_trips  # headers
    assert step.round_trips == 7 * 4
    assert step.turns == 7 * 4 // PARALLEL_CHANNELS
    assert of_step(groups, 1).round_trips == of_step(groups, 1).turns == 7
    assert sum([step, step], PredictedTraffic()).up == 2 * step.up
