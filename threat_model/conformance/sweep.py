"""Tests every weight of every layer group that a provider serves, with a few rows per layer group."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.network import wire
from threat_model.conformance.oracle import Difference
from threat_model.conformance.request_strategies import arithmetics
from threat_model.conformance.subject import Case, Subject, Violation, effect_case
from threat_model.conformance.trials import Run, claim

_BLOCK = 32
_UNIFORM_ROWS = 4


@claim(
    "every-layer",
    "Every served layer group has exactly the checkpoint's weights, in both directions and every arithmetic.",
)
def check_every_layer(subject: Subject, run: Run) -> None:
    """Requests every served (layer group, direction, arithmetic) with rows whose product reveals an altered weight.

    Ring. Let the served matrix differ from the pinned one by D != 0. The answer to x is right only if `x @ D.T == 0`
    modulo 2^32. All entries of the first row are odd, so they are units of the ring. If one weight of a channel is
    altered, the answer differs by `x_i * D[o, i]`, which is not 0: the check finds a single altered weight with
    certainty. (A sparse row detects it only with a non-zero entry there. A uniform row misses a change by 2^v with
    probability 2^-(32-v).) Several altered weights of a channel could cancel in the first row, so two uniform rows
    follow. Both uniform rows miss a channel of smallest 2-adic valuation v with probability 2^-2(32-v), at most 2^-42
    because |D| < 2^12. A helper multiplies rows that it expands from a seed, so it gets four uniform rows, which miss
    with probability 2^-84 at most.

    Floats. Rounding hides small changes in long sums. So row j is +-1 on its own block of 32 columns, and zero
    elsewhere. Adding zeros is exact, so the error bound of channel o is at most gamma_33 * 32 * max|W[o]|, forward and
    bias-free. A weight altered by one step of 12-bit quantisation (max|W[o]| / 2047) changes the answer by more than
    twice that bound, so it is found with certainty. (Backward, columns mix channels of different sizes, so it may be
    missed.)
    """
    generator = np.random.default_rng(run.seed)
    judged = [index for index in subject.groups if subject.oracle.stacks or subject.oracle.entry(index).experts == 1]
    for index, direction in itertools.product(judged, DIRECTIONS):
        for arithmetic in arithmetics(subject):
            run.one()
            case = _case(subject, index, direction, arithmetic, generator)
            for part in split(case, subject.row_limit(index)):
                difference = subject.judge(part, subject.answer(part))
                if difference is not None:
                    raise _isolated(subject, part, difference)


def split(case: Case, limit: int) -> list[Case]:
    """Divide a case into requests of at most `limit` rows."""
    return [case.piece(start, limit) for start in range(0, len(case.rows), limit)] or [case]


def _case(
    subject: Subject, index: int, direction: Direction, arithmetic: wire.Arithmetic, generator: np.random.Generator
) -> Case:
    if subject.role == "helper":
        seed = Seed(generator.bytes(SEED_BYTES))
        return effect_case(subject.oracle, index, direction, seed=seed, first_row=0, rows=_UNIFORM_ROWS)
    width, _ = subject.oracle.widths(index, direction)
    if arithmetic == "ring":
        rows = generator.integers(-(2**31), 2**31, (3, width), dtype=np.int32)
        rows[0] |= 1
        return Case(index, direction, arithmetic, torch.from_numpy(rows))
    block = torch.arange(width) // _BLOCK
    signs = torch.from_numpy(generator.choice(np.array([-1, 1], dtype=np.float32), width))
    return Case(index, direction, arithmetic, (block == block.unique()[:, None]) * signs)


def _isolated(subject: Subject, case: Case, difference: Difference) -> Violation:
    """Reduce the wrong row to the fewest neighbouring columns that fail, with ones there, by two binary searches."""
    smallest, wrong = case, difference
    if subject.role == "executor":
        row = case.rows[difference.row : difference.row + 1]

        def fails(first: int, last: int, value: Tensor = row) -> bool:
            nonlocal smallest, wrong
            rows = torch.zeros_like(row)
            rows[:, first : last + 1] = value[:, first : last + 1]
            smaller = replace(case, rows=rows)
            found = subject.judge(smaller, subject.answer(smaller))
            if found is not None:
                smallest, wrong = smaller, found
            return found is not None

        width = row.shape[1]
        if fails(0, width - 1):
            last = bisect(lambda n: fails(0, n), width - 1)
            first = last - bisect(lambda n: fails(last - n, last), last)
            fails(first, last, torch.ones_like(row))
    return subject.violation("does not multiply by the checkpoint's weights", smallest, difference=wrong)


def bisect(fails: Callable[[int], bool], high: int) -> int:
    """The smallest n in 0..high with `fails(n)`. Needs a monotone `fails` and `fails(high)`."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return high
