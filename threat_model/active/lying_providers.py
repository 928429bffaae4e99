"""Adversaries that answer wrongly and observe the tenant's reaction.

Privacy against a lying provider needs integrity (rule 6): a provider that adds an error and sees whether the tenant
continues learns something about the secret product. With verification every wrong answer ends the session, whatever
the secret is, so the abort carries no information. The planted fault is a tenant that only checks whether a result is
plausible: its aborts depend on the secret.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, RANGE, Direction
from symbiosis_priv.errors import QuarantinedError, VerificationError
from symbiosis_priv.harness.local import silenced
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.blame import BlameKeys
from tenant.core.parts import UncheckedProduct
from tenant.demo.tamper import Tamper
from tenant.masking.backend import RingRows
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from threat_model.active.lying_relays import attack_relays
from threat_model.active.manipulated_folders import attack_folders
from threat_model.active.registries import attack_registry
from threat_model.evidence.statistics import Interval, clopper_pearson
from threat_model.lab import Lab

Lie = Callable[[Tensor], None]
"""Changes an answer int32 `[r, o]` in place."""

_ROWS = 3
_PLAUSIBLE = 1 << 29


@dataclass(frozen=True)
class Detection:
    """The detection rate of one kind of lie over real sessions. `valuation`: the 2-adic valuation of its error."""

    name: str
    caught: int
    trials: int
    valuation: int | None = None

    @property
    def interval(self) -> Interval:
        """99 % interval of the detection rate."""
        return clopper_pearson(self.caught, self.trials)


@dataclass(frozen=True)
class AbortLeak:
    """Information that aborts carry about one secret bit per session (the sign of a product), in bits."""

    name: str
    trials: int
    aborts: int
    information: float


@dataclass(frozen=True)
class Forgery:
    """Single checks of `BlameKeys` with few columns against errors of one 2-adic valuation: how many passed."""

    columns: int
    valuation: int
    passed: int
    trials: int

    @property
    def theory(self) -> float:
        """The theoretical bound, 2^-((32 - v) m)."""
        return 2.0 ** (-(32 - self.valuation) * self.columns)


@dataclass(frozen=True)
class ActiveReport:
    """The results of all active adversaries."""

    detections: tuple[Detection, ...]
    leaks: tuple[AbortLeak, ...]
    forgeries: tuple[Forgery, ...]

    @property
    def sound(self) -> bool:
        """Returns True if every lie was caught, verified aborts carried no information, and the planted fault was
        found."""
        verified, skipped = self.leaks
        return (
            all(d.caught == d.trials for d in self.detections)
            and not verified.information
            and (skipped.information > 0.3)  # bits of information about 32 fair bits, exceeded by chance once in 10^7
        )


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


def attack_actively(lab: Lab, *, repeats: int, rng: torch.Generator) -> ActiveReport:
    """Run every lie against real, masked sessions.

    Args:
        repeats: sessions per lie.
    """
    with silenced("tenant"):  # every session here ends in a quarantine, which would be logged
        return _attack(lab, repeats, rng)


def _attack(lab: Lab, repeats: int, rng: torch.Generator) -> ActiveReport:
    preparation = prepare(lab.store, digest=lab.federation.model_digest, columns=16, cache=lab.folder / "cache")
    detections = [_detect(lab, preparation, kind, repeats, rng) for kind in _lies(lab, rng)]
    detections += [Detection(f"hostile folder: {name}", int(caught), 1) for name, caught in attack_folders(lab).items()]
    listings = attack_registry(lab.federation)
    detections += [Detection(f"lying registry: {name}", int(caught), 1) for name, caught in listings.items()]
    relays = attack_relays(lab, preparation)
    detections += [Detection(f"lying relay: {name}", int(caught), 1) for name, caught in relays.items()]
    leaks = [_leak(lab, preparation, "with verification", 8 * repeats, rng)]
    with plausible_is_enough():
        leaks.append(_leak(lab, preparation, "verification skipped (planted)", 8 * repeats, rng))
    return ActiveReport(tuple(detections), tuple(leaks), tuple(_forgeries(lab, 60 * repeats, rng)))


@dataclass(frozen=True)
class _Kind:
    """Lies of one role, which are counted together and used in turn."""

    name: str
    role: wire.Role
    lies: Sequence[Lie]
    valuation: int | None = None


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
        weight = lab.public.quantised(_same_shape(lab, 0)).weight.to(torch.int32)
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
        *(_Kind(f"error of valuation {v}", "executor", [error(v)], valuation=v) for v in range(32)),
        _Kind("error as large as the range", "executor", [near_range]),
        _Kind("the same error in every session", "executor", [repeated]),
        _Kind("rows swapped", "executor", [swap]),
        _Kind("another layer's product", "executor", [other_layer]),
        _Kind("replayed answer", "executor", [replay]),
        _Kind("helper: wrong effects", "helper", [error(v) for v in (0, 16, 29, 30, 31)]),
        _Kind("helper: replayed effects", "helper", [replay]),
    ]


def _same_shape(lab: Lab, group: int) -> int:
    groups = lab.public.manifest.groups
    shape = (groups[group].inputs, groups[group].stacked_outputs)
    return next(i for i, g in enumerate(groups) if i != group and (g.inputs, g.stacked_outputs) == shape)


def _detect(lab: Lab, preparation: Preparation, kind: _Kind, repeats: int, rng: torch.Generator) -> Detection:
    caught = 0
    for trial in range(repeats):
        lie = kind.lies[trial % len(kind.lies)]
        aborted, _ = _session(lab, preparation, Tamper(kind.role, lie), DIRECTIONS[trial % 2], rng)
        caught += aborted
    return Detection(kind.name, caught, repeats, kind.valuation)


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
    session = Session(lab.federation, preparation, options=options)
    try:
        session.product(index, direction, x.to(torch.int32))
    except (VerificationError, QuarantinedError):
        return True, truth
    finally:
        session.close()
    return False, truth


def _leak(lab: Lab, preparation: Preparation, name: str, trials: int, rng: torch.Generator) -> AbortLeak:
    """Changes one entry so that the result is implausibly large exactly if the secret entry is positive."""

    def probe(answer: Tensor) -> None:
        answer[0, 0] += _PLAUSIBLE - 1

    aborts, secret = [], []
    for _ in range(trials):
        aborted, truth = _session(lab, preparation, Tamper("executor", probe), FORWARD, rng)
        aborts.append(aborted)
        secret.append(bool(truth[0, 0] > 0))
    return AbortLeak(name, trials, sum(aborts), mutual_information(aborts, secret))


def mutual_information(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Plug-in estimate of the mutual information in bits; exactly 0 if one of the sequences is constant."""
    n = len(a)
    total = 0.0
    for x in (False, True):
        for y in (False, True):
            joint = sum(p == x and q == y for p, q in zip(a, b, strict=True)) / n
            if joint:
                total += joint * math.log2(joint / (sum(p == x for p in a) / n * sum(q == y for q in b) / n))
    return total


def _forgeries(lab: Lab, trials: int, rng: torch.Generator) -> list[Forgery]:
    """Measure the soundness of the attribution keys where it is weak enough to see: few columns, multiples of 2^28."""
    group, weight = GroupIndex(1), lab.public.quantised(1).weight
    rows = expand(random_key(), first_row=0, rows=1, width=weight.shape[1])
    answer = rows @ weight.to(torch.int32).t()
    passed: Counter[tuple[int, int]] = Counter()
    cases = [(columns, valuation) for columns in (1, 2) for valuation in (31, 30, 29, 28)]
    for _, columns in itertools.product(range(trials), (1, 2)):
        # one key for an error of each valuation: the trials of one valuation have independent keys
        keys = BlameKeys.fresh(columns=columns)
        keys.add(group, weight, weight_bits=lab.store.weight_bits)
        for valuation in (31, 30, 29, 28):
            wrong = answer.clone()
            place = int(torch.randint(answer.numel(), (), generator=rng))
            wrong.view(-1)[place] += _signed(1 << valuation)
            passed[columns, valuation] += keys.accepts(group, FORWARD, rows=rows, answer=wrong)
    return [Forgery(columns, valuation, passed[columns, valuation], trials) for columns, valuation in cases]


def _signed(value: int) -> int:
    """Return a residue modulo 2^32 as int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
