"""Sessions with executors from a lying registry: exact results from executors with valid certificates, or none."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, quantise_rows
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import UncoveredError
from symbiosis_priv.federation import Registries
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.registry.descriptor import MS
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tests.registries import LyingRegistry, registry_config
from tests.tenant.conftest import NewFederation, NewProvider, Scripted
from tests.tenant.scripted import Heard, ScriptedProvider, frame
from tests.vouching import Vouching

Frames = Callable[..., bytes]


@pytest.fixture
def liar(vouching: Vouching) -> Iterator[LyingRegistry]:
    with LyingRegistry(registry_config(vouching)) as registry:
        yield registry


Open = Callable[[], Session]


@pytest.fixture
def opened(
    vouching: Vouching,
    liar: LyingRegistry,
    new_federation: NewFederation,
    helper: ScriptedProvider,
    preparation: Preparation,
) -> Iterator[Open]:
    """`opened()`: a session with one pinned helper, and the executors of the registry."""
    federation = replace(
        new_federation([], [helper.peer("helper", name="beta", operator="beta AG")]),
        registries=Registries((liar.address,), vouching.authority.certificate),
    )
    with ExitStack() as sessions:

        def opened() -> Session:
            session = Session(federation, preparation, options=SessionOptions(masking="pad", deadline_s=20.0))
            sessions.callback(session.close)
            return session

        yield opened


def says(vouching: Vouching, name: str, provider: ScriptedProvider, store: WeightStore, *, after_s: int = 0) -> bytes:
    return vouching.says(
        name,
        address=("127.0.0.1", provider.port),
        model_digest=store.manifest().digest,
        layers=f"0-{store.manifest().layers[-1]}",
        issued=round(MS * (time.time() + after_s)),
    )


def is_exact(session: Session, store: WeightStore) -> bool:
    """Compare both directions of some layer groups with the weights."""
    for seed, (index, direction) in enumerate(itertools.product(map(GroupIndex, (0, 3, 8)), DIRECTIONS)):
        facts = session.preparation.facts[index]
        rows = torch.randn(5, facts.inputs(direction), generator=torch.Generator().manual_seed(seed))
        xq = quantise_rows(rows, facts.bounds[direction])[0]
        weight = store.group(index).weight.to(torch.int64)
        expected = (xq.to(torch.int64) @ (weight.t() if direction == FORWARD else weight)).to(torch.int32)
        if not torch.equal(session.product(index, direction, xq), expected):
            return False
    return True


def test_a_lying_registry_can_only_deny_service(
    vouching: Vouching, liar: LyingRegistry, opened: Open, scripted: Scripted, store: WeightStore, tmp_path: Path
) -> None:
    stranger = Vouching.in_folder(tmp_path)
    good = scripted.new_provider(identity=vouching.identity("gamma"))
    ally = scripted.new_provider(identity=vouching.identity("ally", operator="Beta  AG"))
    foe = scripted.new_provider(identity=stranger.identity("gamma"))
    impostor = scripted.new_provider(identity=vouching.identity("beta", operator="other AG"))
    lies = [
        says(stranger, "gamma", foe, store),
        says(vouching, "ally", ally, store),
        says(vouching, "beta", impostor, store),
        says(vouching, "gamma", foe, store, after_s=-3600),  # stale: foe now has an address that was gamma's
    ]
    liar.show(*lies)
    with pytest.raises(UncoveredError, match="no executor serves layers 0-1"):
        opened().product(GroupIndex(0), FORWARD, torch.zeros(1, 64, dtype=torch.int32))
    assert not good.hellos
    assert not scripted.helper.effects

    honest = says(vouching, "gamma", good, store)
    for listing in ([*lies, honest], [honest, *lies], [honest]):
        liar.show(*listing)
        session = opened()
        assert is_exact(session, store)
        liar.show(*lies)  # executors in use stay in use
        assert is_exact(session, store)
    assert good.executed
    assert not any(heard.request for provider in (ally, foe, impostor) for heard in provider.heard)
    assert not any(provider.hellos for provider in (ally, foe, impostor))


def test_discovered_executors_are_verified_like_others(
    vouching: Vouching, liar: LyingRegistry, opened: Open, new_provider: NewProvider, store: WeightStore
) -> None:
    """An executor with a valid certificate that lies gets no request after its first lie; another discovered one
    continues."""
    one, other = (new_provider(identity=vouching.identity(name)) for name in ("gamma", "delta"))

    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        answer[0, 0] += 1
        return frame(reply, answer)

    one.behaviour = lie
    liar.show(says(vouching, "gamma", one, store), says(vouching, "delta", other, store))
    session = opened()
    assert is_exact(session, store)
    assert [figures.name for figures in session.ledger().providers if figures.state == "quarantined"] == ["gamma"]
    assert len(one.executed) == 1
    assert other.executed
