"""Relay of effects between real providers: the same bits as the simulation, also if a provider is killed meanwhile."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.limits import RingBits
from tenant import RemoteConfig, backend_of
from tenant.masking.backend import RingBackend
from tenant.session.session import Session
from tenant.session.tally import Ledger
from tests.end_to_end.comparing import DEADLINE_S, Killer, Tensors, equal, with_helpers
from tests.end_to_end.conftest import Open

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


@pytest.fixture(scope="module")
def relaying(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """An executor, and two helpers that may relay to it."""
    options = {"executor": {"threads": 1}}
    folder = tmp_path_factory.mktemp("relay-federation")
    with LocalFederation(llama, folder, helpers=2, relay=True, provider_options=options) as federation:
        yield federation


@pytest.fixture(scope="module")
def expected(llama: Path) -> Callable[..., list[Tensors]]:
    """`expected(ring_bits)`: what the simulation computes."""
    from transformers import AutoModelForCausalLM

    found: dict[RingBits, list[Tensors]] = {}

    def compute(ring_bits: RingBits) -> list[Tensors]:
        if ring_bits not in found:
            config = RemoteConfig(masking="simulate", ring_bits=ring_bits)
            model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config, trust_remote_code=False)
            found[ring_bits] = passes(model)
        return found[ring_bits]

    return compute


def passes(model: torch.nn.Module) -> list[Tensors]:
    """Logits and gradients of two passes; the second one uses pads that were drawn ahead."""
    embedding = model.get_input_embeddings().weight.requires_grad_(True)  # type: ignore[operator]
    found = []
    for ids in (IDS, IDS + 1):
        out = model(input_ids=ids, labels=ids)
        (gradient,) = torch.autograd.grad(out.loss, [embedding])  # through every layer
        found.append({"logits": out.logits.detach(), "gradient": gradient})
    return found


def ledger_of(model: torch.nn.Module) -> Ledger:
    backend = backend_of(model)
    assert isinstance(backend, RingBackend)
    assert isinstance(backend.products, Session)
    return backend.products.ledger()


@pytest.mark.parametrize(("helpers", "ring_bits"), [(1, 32), (2, 24)])
def test_forward_and_backward_have_the_bits_of_the_simulation(
    llama: Path,
    relaying: LocalFederation,
    expected: Callable[..., list[Tensors]],
    open_model: Open,
    helpers: int,
    ring_bits: RingBits,
) -> None:
    path = with_helpers(relaying, helpers)
    model = open_model(llama, RemoteConfig(federation=path, ring_bits=ring_bits, deadline_s=DEADLINE_S), adapter=False)
    assert all(map(equal, passes(model), expected(ring_bits)))
    deadline = time.monotonic() + DEADLINE_S
    while not ledger_of(model).rows_relayed:  # on a busy machine, blocks may come too late at first
        assert time.monotonic() < deadline
        assert all(map(equal, passes(model), expected(ring_bits)))
    assert ledger_of(model).answers_rejected == 0


@pytest.mark.parametrize(("name", "frame"), [("executor", 12), ("helper-2", 7)])
def test_a_killed_provider_changes_no_bit(
    llama: Path,
    relaying: LocalFederation,
    expected: Callable[..., list[Tensors]],
    open_model: Open,
    name: str,
    frame: int,
) -> None:
    """Blocks are lost with the executor, and links with the helper."""
    killer = Killer(relaying, name, frame=frame)
    config = RemoteConfig(federation=relaying.federation, wiretap=killer, deadline_s=DEADLINE_S)
    model = open_model(llama, config, adapter=False)
    assert all(map(equal, passes(model), expected(32)))
    assert killer.left <= 0
    killer.starting.join(DEADLINE_S)
    assert ledger_of(model).answers_rejected == 0


def test_providers_that_allow_no_relay_are_used_directly(
    llama: Path, llama_federation: LocalFederation, expected: Callable[..., list[Tensors]], open_model: Open
) -> None:
    path = llama_federation.directory / "relay.toml"
    path.write_text(
        llama_federation.federation.read_text().replace("[[provider]]", "[pads]\nrelay = true\n\n[[provider]]", 1)
    )
    model = open_model(llama, RemoteConfig(federation=path, deadline_s=DEADLINE_S), adapter=False)
    assert all(map(equal, passes(model), expected(32)))
    assert ledger_of(model).rows_relayed == 0
