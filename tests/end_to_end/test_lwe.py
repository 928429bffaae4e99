"""`masking = "lwe"` with a single provider over TLS: training and generation have the bits of the ring for x + e."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.limits import DEFAULT_HINT_BITS, GroupIndex, HintBits
from tenant import RemoteConfig, backend_of
from tenant.core.blame import DEFAULT_COLUMNS
from tenant.masking.backend import RingBackend, Simulation
from tenant.masking.registry import session_scheme
from tenant.preparation.keys import prepare
from tests.end_to_end.comparing import adapter_of, equal
from tests.end_to_end.conftest import Open, Train

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


@pytest.fixture(scope="module")
def federation(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """One executor, and no helper."""
    with LocalFederation(llama, tmp_path_factory.mktemp("alone"), helpers=0) as running:
        yield running


class WithErrors(Simulation):
    """The ring's reference for rows x + e, with the errors of another run."""

    def __init__(self, store: WeightStore, errors: Iterator[Tensor]) -> None:
        super().__init__(store)
        self.errors = errors

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        return super().product(index, direction, rows + next(self.errors), counts=counts)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The errors e of each product, in order. Only tests ever see them."""
    seen: list[Tensor] = []
    real = lattice.noise

    def revealing(words: Tensor) -> Tensor:
        seen.append(real(words))
        return seen[-1]

    monkeypatch.setattr(lattice, "noise", revealing)
    return seen


def prepared(federation: LocalFederation, cache: Path, bits: HintBits) -> RemoteConfig:
    """The configuration of a tenant that has made hints. No pads are drawn ahead, so errors come in products' order."""
    store = WeightStore(federation.model, cache=cache)
    preparation = prepare(store, digest=store.manifest().digest, columns=DEFAULT_COLUMNS, cache=cache)
    session_scheme("lwe").prepare(preparation, store, bits=bits, training=True)
    return RemoteConfig(federation=federation.federation, masking="lwe", cache=cache, pool_memory_mib=0, deadline_s=120)


def test_training_and_generation_have_the_bits_of_the_ring_for_x_and_e(
    llama: Path, federation: LocalFederation, tmp_path: Path, errors: list[Tensor], open_model: Open, train: Train
) -> None:
    config = prepared(federation, tmp_path, 32)
    found, left = [], iter(errors)
    for run in ("provider", "here"):
        model = open_model(llama, config)
        if run == "here":
            backend = backend_of(model)
            assert isinstance(backend, RingBackend)
            left = iter(list(errors))
            backend.products = WithErrors(WeightStore(llama), left)  # with the same scales
        trainer = train(model, steps=4)
        with torch.no_grad():
            tokens = model.generate(input_ids=IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
            logits = model(input_ids=IDS).logits
        losses = torch.tensor([step["loss"] for step in trainer.state.log_history if "loss" in step])
        found.append(adapter_of(model) | {"tokens": tokens, "logits": logits, "losses": losses})
    assert equal(*found)
    assert next(left, None) is None


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
