"""A scheme may open an answer in its own way before the check (`Pad.open`), and no other code depends on it."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import VerificationError
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.pads import EffectSource, Pad, PadOrder
from tenant.masking.registry import LocalSource, register, unregister
from tenant.masking.scheme import Materials, SessionScheme
from tests.tenant.conftest import NewSession
from tests.tenant.scripted import Heard, ScriptedProvider, frame, product_of

STEP = 64
"""Bits by which the rounding scheme scales its rows, and so their products."""


class Rounded(Pad):
    def open(self, answer: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        for effect in self.effects():
            answer = answer - effect
        return (answer + STEP // 2) & -STEP, ()


class RoundedSource(LocalSource):
    """Answers with a small error, which is rounded off."""

    def draw(self, order: PadOrder) -> Pad:
        pad = super().draw(order)
        return Rounded(pad.rows, pad.shares)


class Rounding(SessionScheme):
    name = "rounding"
    summary = "nobody"
    roles = frozenset({"executor"})
    own_weights = True
    hides_from = frozenset({"executor"})
    assumption = "none"

    def effects(self, materials: Materials) -> EffectSource:
        assert materials.store is not None
        return RoundedSource(materials.facts, materials.secret, materials.store)


@pytest.fixture(autouse=True)
def _scheme() -> Iterator[None]:
    register(Rounding())
    yield
    unregister(Rounding.name)


def test_a_scheme_opens_answers_in_its_own_way(
    executor: ScriptedProvider, new_session: NewSession, store: WeightStore
) -> None:
    """Pads may be split, and a bucket may add rows of zeros."""

    def err_a_little(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        error = torch.arange(answer.numel()).view(answer.shape) % (STEP - 1) - STEP // 2 + 1
        return frame(reply, answer + error.to(torch.int32))

    executor.behaviour = err_a_little
    session = new_session("rounding", [executor], row_bucket=4)
    for count in (1, 3, 8, 2):
        rows = (torch.arange(count * 64, dtype=torch.int32).view(count, 64) % 97 - 48) * STEP
        assert torch.equal(session.product(GroupIndex(1), FORWARD, rows), product_of(store, 1, FORWARD, rows))
    assert session.ledger().answers_rejected == 0


def test_an_error_that_cannot_be_rounded_off_is_refused(executor: ScriptedProvider, new_session: NewSession) -> None:
    executor.behaviour = lambda heard, reply, answer: frame(reply, answer + STEP)
    with pytest.raises(VerificationError):
        new_session("rounding", [executor]).product(
            GroupIndex(1), FORWARD, torch.full((2, 64), STEP, dtype=torch.int32)
        )
