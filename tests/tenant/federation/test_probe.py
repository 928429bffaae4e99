"""`federation check`: its findings about providers that are absent, partial, slow, wrong or lying."""

import contextlib
import dataclasses
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import Tensor
from typer.testing import CliRunner

from provider.products.model import ServedModel
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Company, Federation, Peer
from symbiosis_priv.limits import Role
from symbiosis_priv.network import wire
from tenant.federation import cli as federation_cli
from tenant.federation.probe import Finding, find_gaps, probe_all
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tests.registries import LyingRegistry, registry_config
from tests.simulator import Network
from tests.tenant.conftest import Identities, NewFederation, NewProvider, Scripted
from tests.tenant.scripted import Heard, ListeningProvider, ScriptedProvider, frame
from tests.vouching import Vouching

TIMEOUT_S = 20.0
GROUPS = 9


def probed(federation: Federation, preparation: Preparation | None, *, timeout: float = TIMEOUT_S) -> list[Any]:
    return list(probe_all(federation, preparation, timeout=timeout))


def only(federation: Federation, preparation: Preparation | None) -> Any:
    (finding,) = probed(federation, preparation)
    return finding


def test_both_roles_are_measured_and_their_products_compared(scripted: Scripted, preparation: Preparation) -> None:
    second = scripted.new_provider(layers="1")
    federation = scripted.new_federation([scripted.executor, second], [scripted.helper])
    for finding in probed(federation, preparation):
        assert finding.failure is None
        assert finding.warnings == []
        served = range(4, GROUPS) if finding.peer.port == second.port else range(GROUPS)
        assert finding.groups == dict.fromkeys(DIRECTIONS, served)
        assert finding.verified == 4
        assert 300 < finding.days_left < 900
        assert abs(finding.clock_ahead_s) < 5
        assert 0 < finding.round_trip_s < 1
        assert finding.rows_per_s > 0
    for provider in (scripted.executor, second, scripted.helper):
        assert {heard.request.direction for heard in provider.heard if heard.request.rows == 1} == set(DIRECTIONS)
        assert max(heard.request.rows for heard in provider.heard) == 64
    sent = [heard for heard in scripted.executor.executed if heard.request.rows == 1]
    assert len({bytes(heard.payload) for heard in sent}) == len(sent)
    assert len({heard.request.seed for heard in scripted.helper.effects}) == len(scripted.helper.effects)  # type: ignore[union-attr]


def test_without_keys_nothing_is_compared_and_no_row_is_sent(scripted: Scripted) -> None:
    for finding in probed(scripted.new_federation([scripted.executor], [scripted.helper]), None):
        assert finding.failure is None
        assert finding.round_trip_s is not None
        assert (finding.verified, finding.rows_per_s) == (0, None)
    assert all(heard.request.rows == 0 for heard in (*scripted.executor.heard, *scripted.helper.heard))


def test_each_address_of_a_provider_is_probed(
    scripted: Scripted, identities: Identities, preparation: Preparation
) -> None:
    """A wrong certificate at one of two addresses is found, and a helper with two addresses is not missing."""
    places = [scripted.new_provider(identity=identities.provider(n // 2)) for n in range(4)]
    executor = dataclasses.replace(places[0].peer("executor"), others=places[1].peer("executor").addresses)
    helper = dataclasses.replace(places[2].peer("helper"), others=places[3].peer("helper").addresses)
    federation = scripted.new_federation([executor], [helper])
    for wrong in (False, True):
        if wrong:
            places[1].show(identities.provider(1))
        findings = probed(federation, preparation)
        assert [finding.peer.port for finding in findings] == [place.port for place in places]
        assert [bool(finding.failure) for finding in findings] == [False, wrong, False, False]
        assert find_gaps(federation, findings, preparation.manifest.layers) == []


def test_a_certificate_that_cannot_be_used_fails_its_provider_alone(
    scripted: Scripted, preparation: Preparation, tmp_path: Path
) -> None:
    gone = dataclasses.replace(scripted.new_provider().peer("executor"), certificate=tmp_path / "gone.pem")
    first, second = probed(scripted.new_federation([gone, scripted.executor]), preparation)
    assert "gone.pem" in first.failure
    assert (second.failure, second.verified) == (None, 4)


def test_a_busy_provider_is_asked_again_and_a_lost_connection_is_a_failure(
    scripted: Scripted, preparation: Preparation
) -> None:
    federation, executor = scripted.new_federation([scripted.executor]), scripted.executor
    first: bytes | None = frame(wire.Failure(code=wire.ErrorCode.BUSY, detail="later"))

    def answer_later(_: Heard, reply: wire.Result, answer: Tensor) -> bytes | None:
        return first if len(executor.heard) == 1 else frame(reply, answer)

    executor.behaviour = answer_later
    assert only(federation, preparation).failure is None
    executor.heard.clear()
    first = None
    assert "closed the connection" in only(federation, preparation).failure
    assert len(executor.heard) == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("role", ["executor", "helper"])
def test_a_wrong_product_is_found_in_either_role_and_direction(
    scripted: Scripted, preparation: Preparation, role: str, direction: str
) -> None:
    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        if heard.request.rows and heard.request.direction == direction and heard.request.group == GROUPS - 1:
            answer = answer.clone()
            answer[0, -1] += 1
        return frame(reply, answer)

    (scripted.executor if role == "executor" else scripted.helper).behaviour = lie
    forgotten: list[bool] = []
    watched = dataclasses.replace(preparation, forget_keys=lambda: forgotten.append(True))
    for finding in probed(scripted.new_federation([scripted.executor], [scripted.helper]), watched, timeout=TIMEOUT_S):
        if finding.peer.role == role:
            assert f"not that of the pinned weights (lm_head, {direction})" in finding.failure
        else:
            assert finding.failure is None
    assert forgotten == [True]


def test_a_direction_that_is_refused_is_not_served(scripted: Scripted, preparation: Preparation) -> None:
    def one_way(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        if heard.request.direction == BACKWARD:
            return frame(wire.Failure(code=wire.ErrorCode.NOT_SERVED, detail="no training here"))
        return frame(reply, answer)

    scripted.executor.behaviour = one_way
    finding = only(scripted.new_federation([scripted.executor]), preparation)
    assert finding.groups == {FORWARD: range(GROUPS), BACKWARD: range(0)}
    assert "backward: " in finding.warnings[0]
    assert "no training here" in finding.warnings[0]


def test_different_clocks_are_a_warning_with_a_reason(scripted: Scripted, preparation: Preparation) -> None:
    for ahead, word in ((400.0, "ahead of"), (-400.0, "behind")):
        scripted.executor.clock_ahead_s = ahead
        finding = only(scripted.new_federation([scripted.executor]), preparation)
        assert finding.failure is None
        assert f"{word} yours: each side checks the validity" in finding.warnings[0]


def test_fewer_layers_than_the_file_expects(
    new_federation: NewFederation, new_provider: NewProvider, preparation: Preparation
) -> None:
    peer = new_provider(layers="1").peer("executor")
    for expected, good in (("1", True), ("0", False), ("0-1", False)):
        finding = only(new_federation([dataclasses.replace(peer, layers=LayerRange.parse(expected))]), preparation)
        assert (finding.failure is None) == good
        if finding.failure:
            assert f"serves layer 1, and federation.toml expects {expected}: it lacks layer 0" in finding.failure
    finding = only(new_federation([dataclasses.replace(peer, layers=LayerRange(0, 7))]), preparation)
    assert "goes beyond this model, whose layers are 0-1" in finding.failure


def is_open(connection: socket.socket) -> bool:
    """Returns False if the other end has closed the connection."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 16):
            pass
        return False
    return True


def test_silent_providers_end_at_the_deadline_and_are_probed_in_parallel(
    new_federation: NewFederation, executor: ScriptedProvider, preparation: Preparation
) -> None:
    """Two providers accept connections and send nothing."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        silent = [
            dataclasses.replace(executor.peer("executor", name=f"silent {i}"), port=listener.getsockname()[1])
            for i, listener in enumerate((one, two))
        ]
        with ThreadPoolExecutor(1) as probing, contextlib.ExitStack() as accepted:
            found = probing.submit(probed, new_federation([*silent, executor]), preparation, timeout=2.5)
            first, _ = [accepted.enter_context(listener.accept()[0]) for listener in (one, two)]
            assert is_open(first)  # while the other one is probed
            *quiet, good = found.result()
    assert good.failure is None
    for finding in quiet:
        assert "not within 2.5 s" in finding.failure
        assert "--timeout waits longer" in finding.failure


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[Vouching, LyingRegistry]]:
    vouching = Vouching.in_folder(tmp_path / "vouching")
    with LyingRegistry(registry_config(vouching)) as registry:
        yield vouching, registry


def test_executors_from_a_registry_are_probed_too(
    scripted: Scripted,
    federation_file: Callable[[Federation], Path],
    registry: tuple[Vouching, LyingRegistry],
    identities: Identities,
    llama: Path,
) -> None:
    """Executors from a registry: one for missing layers, one of the helper's operator, and one that is down."""
    vouching, lists = registry
    federation = scripted.new_federation([scripted.new_provider(layers="0")], [scripted.helper])
    store = WeightStore(llama, layers=LayerRange(1, 1))
    gamma = ListeningProvider(ServedModel(store), vouching.identity("gamma"), Network(identities.authority))
    vouching.identity("own", operator=federation.helpers[0].operator)

    def says(name: str, port: int) -> bytes:
        return vouching.says(name, layers="1", address=("127.0.0.1", port), model_digest=federation.model_digest)

    lists.show(says("gamma", gamma.port), says("own", 9))
    path = federation_file(federation)
    where = {"addresses": [lists.address], "authority": str(vouching.authority.certificate)}
    path.write_text("\n".join([path.read_text(), "[registry]", *(f"{k} = {json.dumps(v)}" for k, v in where.items())]))
    prepare(WeightStore(llama), digest=federation.model_digest)
    result = check(path)
    assert result.exit_code == 0, result.output
    assert "own, from a registry, is not used: " in result.output
    assert "every layer is served in both directions; 12 products" in result.output
    gamma.close()
    result = check(path)
    assert result.exit_code == 1
    assert "cannot reach executor 'gamma'" in result.output
    assert "layer 1 forward: no executor" in result.output


def check(path: Path) -> Any:
    return CliRunner().invoke(federation_cli.app, ["check", "-f", str(path), "--timeout", "20"], env={"COLUMNS": "250"})


def test_the_command_prints_gaps_and_ends_with_status_1(
    scripted: Scripted, federation_file: Callable[[Federation], Path], llama: Path
) -> None:
    """`--model` makes the keys; at the second run the keys exist."""
    first, second = scripted.new_provider(layers="0"), scripted.new_provider(layers="1")
    path = federation_file(scripted.new_federation([first], [scripted.helper]))
    arguments = ["check", "-f", str(path), "--timeout", "20", "--model", str(llama)]
    result = CliRunner().invoke(federation_cli.app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 1, result.output
    for direction in DIRECTIONS:
        assert f"layer 1 {direction}: no executor; list, start or repair an executor" in result.output
    result = check(federation_file(scripted.new_federation([first, second], [scripted.helper])))
    assert result.exit_code == 0, result.output
    assert "every layer is served in both directions; 12 products match the pinned weights" in result.output
    absent = dataclasses.replace(scripted.helper.peer("helper", name="absent"), port=1, certificate=first.certificate)
    result = check(federation_file(scripted.new_federation([second], [scripted.helper, absent])))
    assert result.exit_code == 1
    assert "no pads without helper 'absent'" in result.output


# Gaps: compared with their definition, an executor for every layer and enough companies for every pad


LAYERS = (0, 0, 1, 1, 2, 2)
ALL = range(len(LAYERS))


def peer(name: str, role: Role, operator: str | None = None) -> Peer:
    return Peer(name, operator or f"operator of {name}", role, "host", 1, Path("none.pem"))


def federation_of(peers: list[Peer], **options: Any) -> Federation:
    return Federation("sha256:0", 10, Path("t.pem"), Path("t.key"), tuple(peers), **options)


def serving(who: Peer, forward: range = ALL, backward: range = ALL) -> Finding:
    return Finding(who, groups={FORWARD: forward, BACKWARD: backward})


def test_a_gap_is_named_with_its_direction_and_what_fixes_it() -> None:
    alpha, gamma = peer("alpha", "executor", "A"), peer("gamma", "executor")
    beta, delta = peer("beta", "helper", "B"), peer("delta", "helper", "A")

    def gaps(peers: list[Peer], *there: Finding, **options: Any) -> list[str]:
        return find_gaps(federation_of(peers, **options), there, LAYERS)

    found = gaps([alpha, gamma], serving(alpha, range(2)), serving(gamma, range(4, 6), range(2, 6)))
    assert found == ["layer 1 forward: no executor; list, start or repair an executor that serves them"]
    assert [line.partition(":")[0] for line in gaps([alpha, gamma])] == ["layers 0-2 forward", "layers 0-2 backward"]
    # without [pads], every helper is needed
    for line, direction in zip(gaps([alpha, beta, delta], *map(serving, (alpha, beta))), DIRECTIONS, strict=True):
        assert line.startswith(f"executor 'alpha', layers 0-2 {direction}: no pads without helper 'delta'")
        assert "[pads] helpers = 1" in line
    assert gaps([alpha, beta, delta], *map(serving, (alpha, beta)), pad_helpers=1) == []
    assert not any("[pads]" in line for line in gaps([alpha, beta], serving(alpha)))
    [short] = gaps([alpha, beta, delta], serving(alpha), serving(beta, range(4)), serving(delta), pad_helpers=1)
    assert short.startswith("executor 'alpha', layer 2 forward: helpers of 0 companies other than its own, but [pads]")


groups = st.tuples(st.integers(0, len(LAYERS)), st.integers(0, len(LAYERS))).map(lambda pair: range(*sorted(pair)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Federation, list[Finding]]:
    operators = st.sampled_from("abcde")
    peers = [peer(f"e{i}", "executor", draw(operators)) for i in range(draw(st.integers(1, 2)))]
    peers += [peer(f"h{i}", "helper", draw(operators)) for i in range(draw(st.integers(1, 3)))]
    names = st.lists(st.sampled_from([p.name for p in peers]), min_size=2, max_size=2, unique=True)
    companies = tuple(Company("x", tuple(draw(names))) for _ in range(draw(st.integers(0, 1))))
    pad_helpers = draw(st.none() | st.integers(1, 3))
    there = [serving(p, draw(groups), draw(groups)) for p in peers if draw(st.integers(0, 9))]
    return federation_of(peers, companies=companies, pad_helpers=pad_helpers), there


@given(worlds())
def test_a_federation_with_executors_and_helpers_for_all_layers_has_no_gap(
    world: tuple[Federation, list[Finding]],
) -> None:
    known, there = world

    def masked(executor: Peer, helpers: list[Peer]) -> bool:
        if known.pad_helpers is None:
            return set(helpers) == set(known.helpers)
        return any(
            not any(known.one_company(a, b) for a, b in itertools.combinations((executor, *chosen), 2))
            for chosen in itertools.combinations(helpers, known.pad_helpers)
        )

    whole = True
    for direction, group in itertools.product(DIRECTIONS, ALL):
        present = [s.peer for s in there if group in s.groups[direction]]
        executors = [p for p in present if p.role == "executor"]
        helpers = [p for p in present if p.role == "helper"]
        whole &= bool(executors) and all(masked(executor, helpers) for executor in executors)
    assert (find_gaps(known, there, LAYERS) == []) == whole
