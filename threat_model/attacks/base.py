"""The interface of every attack, and the scoring of attacks.

`run` gets a view, the public model and a random generator, and returns a guess. `score` gets the guess and the truth,
but not the view. So an attack cannot use what its party does not see, and a scorer cannot help an attack.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from threat_model.evidence.public import Public
from threat_model.evidence.statistics import FALSE_ALARM, Interval, agreement_by_chance, binomial_tail, clopper_pearson
from threat_model.evidence.truth import GroupCall, Truth
from threat_model.evidence.views import Party

V = TypeVar("V")
G = TypeVar("G")

GuessedRows = Mapping[int, Tensor]
"""Guessed float64 rows `[r, d]` by order of the request that carried them."""

Labels = Mapping[int, Tensor]
"""Guessed int64 tokens or labels `[r]` by order."""

RECOVERED = 0.01
"""A row or a matrix counts as recovered within this relative error."""


@dataclass(frozen=True)
class Outcome:
    """The score of an attack. `hits`, `trials`: right guesses, and all guesses; `p_value`: probability that guessing
    scores at least as well, by the scorer's most sensitive test."""

    hits: int
    trials: int
    chance: float
    p_value: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def success(self) -> float:
        return self.hits / self.trials if self.trials else 0.0

    @property
    def interval(self) -> Interval:
        """99 % interval of the rate."""
        return clopper_pearson(self.hits, self.trials)

    @property
    def broken(self) -> bool:
        """Returns True if guessing cannot explain the score."""
        return self.p_value < FALSE_ALARM

    @property
    def at_chance(self) -> bool:
        """Returns True if the chance level lies inside the 99 % confidence interval."""
        return self.chance in self.interval


@dataclass(frozen=True)
class Trial:
    """The result of an attack outside the table of schemes. `labels` are its first cells in the report. `must_find`:
    True if the attack has to find something, False if it must not; None if either is allowed."""

    labels: tuple[str, ...]
    must_find: bool | None
    outcome: Outcome

    @property
    def expected(self) -> bool:
        return self.must_find in (None, self.outcome.broken)


def counted(labels: tuple[str, ...], hits: int, trials: int, *, must_find: bool | None = False) -> Trial:
    """A trial without chance: one hit is a find."""
    return Trial(labels, must_find, Outcome(hits, trials, 0.0, 0.0 if hits else 1.0))


class Attack(ABC, Generic[V, G]):
    """One named attack. `source` names a section or a rule of docs/threat-model.md, or a paper. `by_design`: no scheme
    hides what it finds, so it must succeed everywhere; the report lists it as "not hidden". `decisive`: it must succeed
    against every scheme that promises nothing against its party; else its failure elsewhere proves nothing."""

    name: str
    party: ClassVar[Party] = "executor"
    sees: ClassVar[str]
    source: ClassVar[str]
    metric: ClassVar[str]
    chance: ClassVar[str]
    by_design: ClassVar[bool] = False
    decisive: ClassVar[bool] = False

    @abstractmethod
    def run(self, view: V, public: Public, rng: torch.Generator) -> G | None:
        """Compute a guess. Returns None if the view has no data for this attack."""

    @abstractmethod
    def score(self, guess: G, truth: Truth) -> Outcome:
        """Compare a guess with the truth."""


class LabelsAttack(Attack[V, Labels]):
    metric = "tokens"
    chance = "the same guesses at random rows"


class DirectedAttack(Attack[V, G]):
    """An attack on the requests of one direction. The direction is the last part of its name."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.name = f"{type(self).name}, {direction}"


def score_labels(guess: Labels, truth: Mapping[int, Tensor | None], *, ignore: int | None = None) -> Outcome:
    """Score tokens or labels: exact matches, compared with randomly permuted guesses, where the truth is known."""
    pairs = [(guess[order], real) for order, real in truth.items() if order in guess and real is not None]
    if not pairs:
        return Outcome(0, 0, 0.0, 1.0)
    guessed, real = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    if ignore is not None:
        guessed, real = guessed[real != ignore], real[real != ignore]
    return score_guesses(guessed, real)


def score_guesses(guessed: Tensor, real: Tensor) -> Outcome:
    hits, chance = int((guessed == real).sum()), agreement_by_chance(guessed, real)
    return Outcome(hits, len(real), chance, binomial_tail(hits, len(real), chance))


class RowsAttack(Attack[V, GuessedRows]):
    metric = "rows within 1 %"
    chance = "0; the verdict uses a test on pairs with chance 1/2"

    def score(self, guess: GuessedRows, truth: Truth) -> Outcome:
        return score_rows(guess, truth.calls)


def score_rows(guess: GuessedRows, calls: Mapping[int, GroupCall]) -> Outcome:
    """Score guessed rows: how many are within 1 %, and a more sensitive test on pairs. The pair test asks whether two
    guesses fit their own rows better than each other's rows: `<g_a - g_b, x_a - x_b> > 0`. If the guesses do not depend
    on the rows, each test succeeds with probability 1/2."""
    by_layer: dict[tuple[int, Direction], list[int]] = {}
    for order, call in calls.items():
        if order in guess and call.rows.shape == guess[order].shape:
            by_layer.setdefault((call.group, call.direction), []).append(order)
    rng = torch.Generator().manual_seed(1)
    hits = trials = fits = pairs = 0
    worst = 1.0
    for orders in by_layer.values():
        x = torch.cat([calls[order].rows.double() for order in orders])
        g = torch.cat([guess[order].double() for order in orders])
        norm = x.norm(dim=1)
        error = (g - x).norm(dim=1) / torch.maximum(norm, 0.01 * norm.mean()).clamp(min=1e-300)
        right = error <= RECOVERED
        hits, trials = hits + int(right.sum()), trials + len(x)
        worst = min(worst, float(right.double().mean()))
        a, b = torch.randperm(len(x), generator=rng)[: len(x) // 2 * 2].view(2, -1)
        gap = x[a] - x[b]
        apart = gap.norm(dim=1) > 1e-3 * norm.mean()
        fit = ((g[a] - g[b]) * gap).sum(dim=1) > 0
        fits, pairs = fits + int(fit[apart].sum()), pairs + int(apart.sum())
    p_value = binomial_tail(fits, pairs, 0.5) if pairs else 1.0
    return Outcome(hits, trials, 0.0, p_value, {"worst layer": worst if trials else 0.0})
