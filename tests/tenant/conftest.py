"""Fixtures: tiny checkpoints, scripted providers, federations and sessions."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Company, Federation, Peer, federation_text
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import Wiretap
from tenant.masking.registry import scheme_named
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.routing.known_provider import Tolerance
from tenant.session.session import Session
from tests.simulator import Network
from tests.tenant.scripted import TIMEOUT_S, ListeningProvider, ScriptedProvider, served_model

# Checkpoints


@pytest.fixture(scope="session")
def llama(save_llama: Callable[..., Path]) -> Path:
    return save_llama(vocab_size=96, pad_token_id=0)


@pytest.fixture(scope="session")
def gpt2(save_gpt2: Callable[..., Path]) -> Path:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return save_gpt2(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, **tokens)


@pytest.fixture(scope="session")
def store(llama: Path) -> WeightStore:
    return WeightStore(llama)


@pytest.fixture(scope="session")
def gpt2_store(gpt2: Path) -> WeightStore:
    return WeightStore(gpt2)


@pytest.fixture(scope="session")
def preparation(store: WeightStore, tmp_path_factory: pytest.TempPathFactory) -> Preparation:
    prepared = prepare(store, digest=store.manifest().digest, cache=tmp_path_factory.mktemp("prepared"))
    for index, direction in itertools.product(range(len(prepared.facts)), DIRECTIONS):
        _ = prepared.keys[GroupIndex(index), direction]  # expanded now, because a test may patch the keystream
    return prepared


# Providers


@dataclass(eq=False)
class Identities:
    """An authority, a tenant, and certificates for providers."""

    folder: Path
    authority: Identity = field(init=False)
    tenant: Identity = field(init=False)

    def __post_init__(self) -> None:
        self.authority = issuing.create_authority(self.folder)
        self.tenant = issuing.issue(self.folder, authority=self.authority, kind=Kind.TENANT, name="tenant")

    @functools.cache  # noqa: B019 - it lives as long as the tests
    def provider(self, number: int) -> Identity:
        """The provider with this number. All tests share it."""
        return issuing.issue(self.folder, authority=None, kind=Kind.PROVIDER, name=f"provider-{number}")


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def network(identities: Identities, request: pytest.FixtureRequest) -> Iterator[Network]:
    """The providers of a test. `@pytest.mark.parametrize("network", [Clock()], indirect=True)` gives them a clock."""
    network = Network(identities.authority, getattr(request, "param", None))
    with network.replacing_sockets():
        yield network


@pytest.fixture
def sockets(network: Network) -> None:
    """Let the providers of this test listen at sockets."""
    network.listens = True


NewProvider = Callable[..., ScriptedProvider]


@pytest.fixture
def new_provider(identities: Identities, store: WeightStore, network: Network) -> Iterator[NewProvider]:
    """`new_provider(store=..., layers="0", identity=..., max_rows=...)`, closed after the test."""
    numbers = itertools.count()
    with contextlib.ExitStack() as running:

        def make(
            *,
            store: WeightStore = store,
            layers: str = "",
            identity: Identity | None = None,
            **limits: int,
        ) -> ScriptedProvider:
            served = WeightStore(store.path, layers=LayerRange.parse(layers)) if layers else store
            number = next(numbers)
            identity = identity or identities.provider(number)
            kind = ListeningProvider if network.listens else ScriptedProvider
            provider = kind(served_model(served), identity, network, **limits)
            running.callback(provider.close)
            return provider

        yield make


@pytest.fixture
def executor(new_provider: NewProvider) -> ScriptedProvider:
    return new_provider()


@pytest.fixture
def helper(new_provider: NewProvider) -> ScriptedProvider:
    return new_provider()


NewFederation = Callable[..., Federation]


@pytest.fixture
def new_federation(identities: Identities, store: WeightStore) -> NewFederation:
    """`new_federation(executors, helpers)`: a federation of scripted providers or of given peers."""

    def peers(providers: Sequence[ScriptedProvider | Peer], role: wire.Role) -> list[Peer]:
        return [p if isinstance(p, Peer) else p.peer(role) for p in providers]

    def make(
        executors: Sequence[ScriptedProvider | Peer],
        helpers: Sequence[ScriptedProvider | Peer] = (),
        *,
        digest: str | None = None,
        companies: Sequence[Company] = (),
        pad_helpers: int | None = None,
    ) -> Federation:
        return Federation(
            model_digest=digest or store.manifest().digest,
            weight_bits=10,
            tenant_certificate=identities.tenant.certificate,
            tenant_key=identities.tenant.key,
            peers=(*peers(executors, "executor"), *peers(helpers, "helper")),
            companies=tuple(companies),
            pad_helpers=pad_helpers,
        )

    return make


@pytest.fixture
def federation_file(tmp_path: Path) -> Callable[[Federation], Path]:
    """Write a federation as `federation.toml`."""

    def write(federation: Federation) -> Path:
        fields = ("name", "operator", "role", "certificate")
        providers = [{name: getattr(p, name) for name in fields} | {"address": p.where} for p in federation.peers]
        text = federation_text(
            providers,
            digest=federation.model_digest,
            certificate=federation.tenant_certificate,
            key=federation.tenant_key,
            weight_bits=federation.weight_bits,
        )
        (path := tmp_path / "federation.toml").write_text(text)
        return path

    return write


@pytest.fixture
def federation(
    executor: ScriptedProvider,
    helper: ScriptedProvider,
    new_federation: NewFederation,
    federation_file: Callable[[Federation], Path],
) -> Path:
    """The federation.toml of one executor and one helper, which serve the Llama."""
    return federation_file(new_federation([executor], [helper]))


PATIENT = Tolerance(least_patience_s=TIMEOUT_S)
"""On a busy machine, no provider counts as late. Tests of late providers have a tolerance of their own."""

NewSession = Callable[..., Session]


@pytest.fixture
def new_session(
    preparation: Preparation,
    new_provider: NewProvider,  # so that sessions are closed before their providers
    new_federation: NewFederation,
    store: WeightStore,
    request: pytest.FixtureRequest,
) -> Iterator[NewSession]:
    """`new_session(masking, executors, helpers, ...)`, closed after the test, by default with `executor`, `helper`."""
    with contextlib.ExitStack() as open_sessions:

        def make(
            masking: str,
            executors: Sequence[ScriptedProvider | Peer] | None = None,
            helpers: Sequence[ScriptedProvider | Peer] | None = None,
            *,
            prepared: Preparation = preparation,
            deadline_s: float = TIMEOUT_S,
            companies: Sequence[Company] = (),
            pad_helpers: int | None = None,
            tolerance: Tolerance = PATIENT,
            **options: Any,
        ) -> Session:
            if executors is None:
                executors = [request.getfixturevalue("executor")]
                if helpers is None and "helper" in scheme_named(masking).roles:
                    helpers = [request.getfixturevalue("helper")]
            helpers = helpers or ()
            session = Session(
                new_federation(executors, helpers, companies=companies, pad_helpers=pad_helpers),
                prepared,
                options=SessionOptions(masking=masking, deadline_s=deadline_s, tolerance=tolerance, **options),
                store=store,
            )
            open_sessions.callback(session.close)
            return session

        yield make


@pytest.fixture
def session(new_session: NewSession) -> Session:
    """A session with masking "pad", one executor and one helper."""
    return new_session("pad")


@dataclass(frozen=True)
class Scripted:
    """Scripted providers, and federations and sessions with them: the fixtures of these names."""

    new_provider: NewProvider
    new_federation: NewFederation
    new_session: NewSession
    request: pytest.FixtureRequest

    @property
    def executor(self) -> ScriptedProvider:
        provider: ScriptedProvider = self.request.getfixturevalue("executor")
        return provider

    @property
    def helper(self) -> ScriptedProvider:
        provider: ScriptedProvider = self.request.getfixturevalue("helper")
        return provider


@pytest.fixture
def scripted(
    new_provider: NewProvider,
    new_federation: NewFederation,
    new_session: NewSession,
    request: pytest.FixtureRequest,
) -> Scripted:
    return Scripted(new_provider, new_federation, new_session, request)


# Observers


class Tape(Wiretap):
    """Records every frame on the tenant's side, in order: (sent or received, peer, message, copy of the matrix)."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, Peer, wire.Message, Tensor | None]] = []

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        self.frames.append(("sent", peer, message, None if payload is None else payload.clone()))

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        self.frames.append(("received", peer, message, None if payload is None else payload.clone()))

    def executed(self) -> list[tuple[wire.Execute, Tensor]]:
        """The requests that executors received."""
        return [
            (message, payload)
            for way, _, message, payload in self.frames
            if way == "sent" and isinstance(message, wire.Execute) and payload is not None
        ]


@pytest.fixture
def tape() -> Tape:
    return Tape()
