"""Dishonest providers on demand: real answers, altered between the provider and the tenant's eyes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import VerificationError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.wire import Role
from tenant.core.facts import Preparation
from tenant.session.options import SessionOptions
from tenant.session.session import Session

_ROWS = 4
_INPUT_RANGE = 64  # small public test rows: what they are does not matter to the check


def _flip_bit(answer: Tensor, rng: random.Random) -> None:
    row, column = _place(answer, rng)
    answer[row, column] ^= 1 << rng.randrange(31)


def _shift_by_half_the_ring(answer: Tensor, rng: random.Random) -> None:
    row, column = _place(answer, rng)
    answer[row, column] ^= -(1 << 31)


def _swap_rows(answer: Tensor, rng: random.Random) -> None:
    answer.copy_(answer.flip(0))


def _replace_row(answer: Tensor, rng: random.Random) -> None:
    answer[rng.randrange(len(answer))] = rng.randrange(-(1 << 31), 1 << 31)


def _repeat_row(answer: Tensor, rng: random.Random) -> None:
    answer[0] = answer[-1]


def _off_by_one(answer: Tensor, rng: random.Random) -> None:
    row, column = _place(answer, rng)
    answer[row, column] += 1


KINDS: dict[str, Callable[[Tensor, random.Random], None]] = {
    "one bit": _flip_bit,
    "one entry off by one": _off_by_one,
    "one entry off by 2^31": _shift_by_half_the_ring,
    "rows swapped": _swap_rows,
    "row replaced": _replace_row,
    "row repeated": _repeat_row,
}


class Tamper:
    """A `Wiretap` that alters every answer of one role."""

    def __init__(self, role: Role, alter: Callable[[Tensor, random.Random], None], rng: random.Random) -> None:
        self.role, self.alter, self.rng = role, alter, rng

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Requests go out as they are."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Answers do not come in as they are."""
        if payload is not None and peer.role == self.role:
            self.alter(payload, self.rng)


def rejected(federation: Federation, preparation: Preparation, *, trials: int) -> int:
    """Send `trials` real requests, alter each answer (of executor and helper in turn), and count those refused."""
    rng = random.Random(0)
    kinds = list(KINDS.values())
    session_preparation = replace(preparation, forget_keys=lambda: None)  # the liar here is ourselves
    # every one of these lies would be reported
    logging.getLogger("tenant.core.gate").setLevel(logging.CRITICAL)
    refused = 0
    for trial in range(trials):
        role: Role = "helper" if trial % 2 else "executor"
        tamper = Tamper(role, kinds[trial // 2 % len(kinds)], rng)
        options = SessionOptions(masking="pad", pool_memory=0, wiretap=tamper)
        session = Session(federation, session_preparation, options=options)
        index, direction = rng.randrange(len(preparation.facts)), rng.choice(DIRECTIONS)
        width = preparation.facts[index].inputs(direction)
        values = [[rng.randrange(-_INPUT_RANGE, _INPUT_RANGE) for _ in range(width)] for _ in range(_ROWS)]
        rows = torch.tensor(values, dtype=torch.int32, device="cpu")
        try:
            session.product(index, direction, rows)
        except VerificationError:
            refused += 1
        finally:
            session.close()
    return refused


def _place(answer: Tensor, rng: random.Random) -> tuple[int, int]:
    return rng.randrange(answer.shape[0]), rng.randrange(answer.shape[1])
