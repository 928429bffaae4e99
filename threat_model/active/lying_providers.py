"""Adversaries that answer wrongly and observe the tenant's reaction.

Privacy against a lying provider needs integrity (rule 6): a provider that adds an error and sees whether the tenant
continues learns something about the secret product. With verification every wrong answer ends the session, whatever
the secret is, so the abort carries no information. The planted fault is a tenant that only checks whether a result is
plausible: its aborts depend on the secret.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from unittest import mock

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, RANGE, Direction
from symbiosis_priv.errors import QuarantinedError, VerificationError
from symbiosis_priv.harness.local import silenced
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.parts import UncheckedProduct
from tenant.demo.run import Tamper
from tenant.masking.backend import RingBackend, RingRows
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from threat_model.active.manipulated_folders import attack_folders
from threat_model.active.registries import attack_registry
from threat_model.attacks.base import Outcome, Trial, counted
from threat_model.evidence.statistics import binomial_tail
from threat_model.lab import Lab

Lie = Callable[[Tensor], None]
"""Changes an answer int32 `[r, o]` in place."""

_ROWS = 3
_WARM = 3  # single rows after which a session repeats what it has prepared
_PLAUSIBLE = 1 << 29


@contextmanager
def plausible_is_enough() -> Iterator[None]:
    """The planted fault: inside this context, a tenant accepts every answer that is a plausible product."""

    def decode(self: RingRows, unchecked: UncheckedProduct) -> list[int]:
        product, _ = unchecked.unmasked()
        self.product[unchecked.start : unchecked.start + len(product)] = product
        wrong: list[int] = (product.long().abs().amax(dim=1) >= _PLAUSIBLE).nonzero()[:, 0].tolist()
        return wrong

    with mock.patch.object(RingRows, "decode", decode):
        yield


def attack_actively(lab: Lab, *, repeats: int, rng: torch.Generator) -> tuple[list[Trial], list[Trial]]:
    """Run every lie against real, masked sessions. `repeats`: sessions per lie. Returns how many lies a tenant accepts,
    and how many of its aborts tell the sign of a secret product, with verification and without."""
    with silenced("tenant"):  # every session here ends in a quarantine, which would be logged
        preparation = prepare(lab.store, digest=lab.federation.model_digest, cache=lab.cache)
        accepted = []
        for kind, role, lies in _lies(lab, rng):
            each = len(lies) if kind == _ERRORS else 1  # sessions in one direction
            caught = [
                _session(lab, preparation, Tamper(role, lies[i % len(lies)]), DIRECTIONS[i // each % 2], rng)[0]
                for i in range(repeats * each)
            ]
            accepted.append(counted((kind,), caught.count(False), len(caught)))
        late = [_lie_while_decoding(lab, preparation, honest, rng) for honest in range(2 * repeats)]
        accepted.append(counted(("one wrong answer while single rows are decoded",), late.count(False), len(late)))
        for what, refused in (
            ("hostile folder", attack_folders(lab)),
            ("lying registry", attack_registry(lab.federation)),
        ):
            accepted += [counted((f"{what}: {name}",), int(not caught), 1) for name, caught in refused.items()]
        verified, aborts = _probe_signs(lab, preparation, 8 * repeats, rng)
        accepted.append(counted(("an error that shows the sign of a product",), len(aborts) - sum(aborts), len(aborts)))
        with plausible_is_enough():
            skipped, _ = _probe_signs(lab, preparation, 8 * repeats, rng)
        return accepted, [Trial(("verifies",), False, verified), Trial(("does not verify (planted)",), True, skipped)]


_Kind = tuple[str, wire.Role, list[Lie]]
"""The name of some lies that are used in turn, the role of the liar, and the lies."""
_ERRORS = "errors of valuation 0 to 31"


def _lies(lab: Lab, rng: torch.Generator) -> list[_Kind]:
    def error(valuation: int) -> Lie:
        def lie(answer: Tensor) -> None:
            odd = int(torch.randint(0, 1 << 30, (), generator=rng)) * 2 + 1
            place = int(torch.randint(answer.numel(), (), generator=rng))
            answer.view(-1)[place] += _signed(odd << valuation)

        return lie

    def near_range(answer: Tensor) -> None:
        place = int(torch.randint(answer.numel(), (), generator=rng))
        answer.view(-1)[place] += RANGE - 1

    def swap(answer: Tensor) -> None:
        answer.copy_(answer.flip(0))

    def other_layer(answer: Tensor) -> None:
        # the product of other rows, of the same shape, with another block's weights
        shapes = [(group.inputs, group.stacked_outputs) for group in lab.public.manifest.groups]
        weight = lab.public.quantised(shapes.index(shapes[0], 1)).weight.to(torch.int32)
        rows = expand(random_key(), first_row=0, rows=len(answer), width=weight.shape[1])
        if answer.shape[1] == weight.shape[0]:
            answer.copy_(rows @ weight.t())
        else:
            answer.add_(1)

    earlier: list[Tensor] = []

    def replay(answer: Tensor) -> None:
        old = next((e for e in earlier if e.shape == answer.shape), None)
        earlier.append(answer.clone())
        answer.copy_(old if old is not None else torch.zeros_like(answer))

    def repeated(answer: Tensor) -> None:
        answer[0, 0] += _signed(1 << 31)

    return [
        (_ERRORS, "executor", [error(v) for v in range(32)]),
        ("error as large as the range", "executor", [near_range]),
        ("the same error in every session", "executor", [repeated]),
        ("rows swapped", "executor", [swap]),
        ("another layer's product", "executor", [other_layer]),
        ("replayed answer", "executor", [replay]),
        ("helper: wrong effects", "helper", [error(v) for v in (0, 16, 29, 30, 31)]),
        ("helper: replayed effects", "helper", [replay]),
    ]


def _session(
    lab: Lab, preparation: Preparation, liar: Tamper | None, direction: Direction, rng: torch.Generator
) -> tuple[bool, Tensor]:
    """Run one request in a fresh session. Returns True if it aborted, and the true product int64 `[r, o]`."""
    index = GroupIndex(0)
    facts = preparation.facts[index]
    x = torch.randint(-1000, 1000, (_ROWS, facts.inputs(direction)), generator=rng, dtype=torch.int64)
    weight = lab.public.quantised(index).weight.long()
    truth = x @ (weight.t() if direction == FORWARD else weight)
    options = SessionOptions(masking="pad", deadline_s=20, pool_memory=0, wiretap=liar)
    with closing(Session(lab.federation, preparation, options=options)) as session:
        try:
            session.product(index, direction, x.to(torch.int32))
        except (VerificationError, QuarantinedError):
            return True, truth
    return False, truth


def _lie_while_decoding(lab: Lab, preparation: Preparation, honest: int, rng: torch.Generator) -> bool:
    """Multiply single rows, as generation does, of which the last one gets a wrong answer, after `_WARM` and `honest`
    right ones. Returns True if the session accepts the right answers, and aborts at the wrong one."""
    answers = 0

    def lie_once(answer: Tensor) -> None:
        nonlocal answers
        answers += 1
        if answers > _WARM + honest:
            place = int(torch.randint(answer.numel(), (), generator=rng))
            answer.view(-1)[place] += 1

    facts = session_scheme("pad").facts(preparation)
    options = SessionOptions(masking="pad", deadline_s=20, wiretap=Tamper("executor", lie_once))
    with closing(RingBackend(facts, Session(lab.federation, preparation, options=options))) as backend:
        row = torch.randn((1, facts[0].inputs(FORWARD)), generator=rng)
        for _ in range(_WARM + honest):
            backend.linear(0, FORWARD, row)
        try:
            backend.linear(0, FORWARD, row)
        except VerificationError:
            return True
    return False


def _probe_signs(lab: Lab, preparation: Preparation, trials: int, rng: torch.Generator) -> tuple[Outcome, list[bool]]:
    """Changes one entry so that the result is implausibly large exactly if the secret entry is positive, and guesses
    the sign from the abort. Returns the guesses' score, and the aborts."""

    def probe(answer: Tensor) -> None:
        answer[0, 0] += _PLAUSIBLE - 1

    runs = [_session(lab, preparation, Tamper("executor", probe), FORWARD, rng) for _ in range(trials)]
    aborts = [aborted for aborted, _ in runs]
    hits = sum(aborted == bool(truth[0, 0] > 0) for aborted, truth in runs)
    return Outcome(hits, trials, 0.5, binomial_tail(hits, trials, 0.5)), aborts


def _signed(value: int) -> int:
    """Return a residue modulo 2^32 as int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
