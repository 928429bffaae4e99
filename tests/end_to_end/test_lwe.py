"""`masking = "lwe"` with a single provider over TLS: training and generation have the bits of the ring for x + e."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.limits import DEFAULT_HINT_BITS, GroupIndex, HintBits
from tenant import RemoteConfig, backend_of
from tenant.core.verifier import Place
from tenant.masking.backend import RingBackend, Simulation
from tenant.masking.lwe import LweRows
from tenant.masking.registry import session_scheme
from tenant.preparation.keys import prepare
from tests.end_to_end.conftest import Open, Train, adapter_of, equal

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


@pytest.fixture(scope="module", params=[4, 2], ids=["four round trips", "two"])
def federation(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalFederation]:
    """One executor, and no helper."""
    scope = Scope(round_trips=request.param)
    with LocalFederation(llama, tmp_path_factory.mktemp("alone"), helpers=0, scope=scope) as running:
        yield running


class WithErrors(Simulation):
    """The ring's reference for rows x + e, with the errors of another run."""

    def __init__(self, store: WeightStore, errors: Mapping[Place, Iterator[Tensor]]) -> None:
        super().__init__(store)
        self.errors = errors

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        return super().product(index, direction, rows + next(self.errors[index, direction]), counts=counts)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> dict[Place, list[Tensor]]:
    """The errors e of each layer group's products, in order. Only tests ever see them."""
    seen, at = defaultdict[Place, list[Tensor]](list), threading.local()
    noise, make = lattice.noise, LweRows._make

    def placed(rows: LweRows) -> Any:
        at.place = rows._place
        return make(rows)

    def revealing(words: Tensor) -> Tensor:
        seen[at.place].append(noise(words))
        return seen[at.place][-1]

    monkeypatch.setattr(LweRows, "_make", placed)
    monkeypatch.setattr(lattice, "noise", revealing)
    return seen


def prepared(federation: LocalFederation, cache: Path, bits: HintBits) -> RemoteConfig:
    """The configuration of a tenant that has made hints. No pads are drawn ahead, so errors come in products' order."""
    store = WeightStore(federation.model, cache=cache, scope=federation.scope)
    preparation = prepare(store, digest=store.manifest().digest, cache=cache)
    session_scheme("lwe").prepare(preparation, store, bits=bits, training=True)
    return RemoteConfig(federation=federation.federation, masking="lwe", cache=cache, pool_memory_mib=0, deadline_s=120)


def test_training_and_generation_have_the_bits_of_the_ring_for_x_and_e(
    llama: Path,
    federation: LocalFederation,
    tmp_path: Path,
    errors: dict[Place, list[Tensor]],
    open_model: Open,
    train: Train,
) -> None:
    config = prepared(federation, tmp_path, 32)
    found, left = [], dict[Place, Iterator[Tensor]]()
    for run in ("provider", "here"):
        model = open_model(llama, config)
        if run == "here":
            backend = backend_of(model)
            assert isinstance(backend, RingBackend)
            left = {place: iter([*of]) for place, of in errors.items()}
            backend.products = WithErrors(WeightStore(llama, scope=federation.scope), left)  # with the same scales
        trainer = train(model, steps=4)
        with torch.no_grad():
            tokens = model.generate(input_ids=IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
            logits = model(input_ids=IDS).logits
        losses = torch.tensor([step["loss"] for step in trainer.state.log_history if "loss" in step])
        found.append(adapter_of(model) | {"tokens": tokens, "logits": logits, "losses": losses})
    assert equal(*found)
    assert all(next(of, None) is None for of in left.values())
    composed = {i for i, facts in enumerate(backend_of(model).facts) if facts.entry.composed is not None}
    assert len(composed) == 3 * (federation.scope.round_trips == 2)
    assert composed <= {index for index, _ in left}


def test_a_rounded_hint_moves_results_a_little(
    llama: Path, federation: LocalFederation, tmp_path: Path, open_model: Open
) -> None:
    model = open_model(llama, prepared(federation, tmp_path, DEFAULT_HINT_BITS), adapter=False)
    plain: Any = AutoModelForCausalLM.from_pretrained(llama)
    simulated = open_model(llama, RemoteConfig(masking="simulate"), adapter=False)
    with torch.no_grad():
        first, again, wanted, exact = (m(input_ids=IDS).logits.double() for m in (model, model, plain, simulated))
    assert not torch.equal(first, again)  # e is fresh: bits are not repeated, and do not depend on the batch alone
    quantised = float((exact - wanted).norm() / wanted.norm())
    assert float((first - wanted).norm() / wanted.norm()) < 2 * quantised
    ledger = backend_of(model).products.ledger()  # type: ignore[attr-defined]
    assert ledger.answers_verified > 0 == ledger.answers_rejected
