"""Dishonest providers for the demo: a wiretap alters real answers before the tenant checks them."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import VerificationError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.harness.local import silenced
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.wire import Role
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session

_ROWS = 4
_LARGEST = 64  # largest entry of a row; the check does not depend on the entries

ALTERATIONS: dict[str, Callable[[random.Random, Tensor], object]] = {
    "one bit": lambda rng, answer: _entry(answer, rng).bitwise_xor_(1 << rng.randrange(31)),
    "one entry off by one": lambda rng, answer: _entry(answer, rng).add_(1),
    "one entry off by 2^31": lambda rng, answer: _entry(answer, rng).bitwise_xor_(-(1 << 31)),
    "rows swapped": lambda rng, answer: answer.copy_(answer.flip(0)),
    "row replaced": lambda rng, answer: answer[rng.randrange(len(answer))].fill_(rng.randrange(-(1 << 31), 1 << 31)),
    "row repeated": lambda rng, answer: answer[0].copy_(answer[-1]),
}


class Tamper:
    """A `Wiretap` that alters every answer of providers with one role, as a dishonest provider would."""

    def __init__(self, role: Role, alter: Callable[[Tensor], object]) -> None:
        self._role, self._alter = role, alter

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Does nothing: requests are not altered."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Alter the answer of a provider with the chosen role."""
        if peer.role == self._role and isinstance(message, wire.Result) and payload is not None:
            self._alter(payload)


@silenced("tenant.core.masked")
def rejected(federation: Federation, preparation: Preparation, *, trials: int) -> int:
    """Send `trials` requests, alter the executor's or the helper's answers in turn, and count the refused answers."""
    rng = random.Random(0)
    alterations = list(ALTERATIONS.values())
    # keep the keys: this process altered the answers, so no provider has learned from refusals
    preparation = replace(preparation, forget_keys=lambda: None)
    refused = 0
    for trial in range(trials):
        role: Role = "helper" if trial % 2 else "executor"
        tamper = Tamper(role, partial(alterations[trial // 2 % len(alterations)], rng))
        options = SessionOptions(masking="pad", pool_memory=0, wiretap=tamper)
        session = Session(federation, preparation, options=options)
        index, direction = GroupIndex(rng.randrange(len(preparation.facts))), rng.choice(DIRECTIONS)
        width = preparation.facts[index].inputs(direction)
        values = [[rng.randrange(-_LARGEST, _LARGEST) for _ in range(width)] for _ in range(_ROWS)]
        rows = torch.tensor(values, dtype=torch.int32, device="cpu")
        try:
            session.product(index, direction, rows)
        except VerificationError:
            refused += 1
        finally:
            session.close()
    return refused


def _entry(answer: Tensor, rng: random.Random) -> Tensor:
    """Return a view of one entry, chosen at random."""
    return answer[rng.randrange(answer.shape[0]), rng.randrange(answer.shape[1])]
