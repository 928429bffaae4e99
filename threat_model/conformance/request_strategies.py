"""Hypothesis strategies for requests to a provider under test. All of them shrink."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.network import wire
from threat_model.conformance.subject import Case, Subject, effect_case

_MOST_ROWS = 40
_COUNTS = testing.row_counts() | st.integers(0, _MOST_ROWS)


def arithmetics(subject: Subject) -> tuple[wire.Arithmetic, ...]:
    """The arithmetics on which a provider's answers can be judged."""
    return ("ring", "float", "float_bias_free") if subject.floats else ("ring",)


def _windowed(draw: DrawFn, rows: Tensor) -> Tensor:
    """All columns of the rows, or only some neighbouring columns. Shrinks to the one column that shows a fault."""
    width = rows.shape[1]
    # Twice the width, so that the whole row is drawn often, and Hypothesis can shrink the two numbers independently.
    last = min(width - 1, draw(st.integers(0, 2 * width)))
    first = last - min(last, draw(st.integers(0, 2 * width)))
    out = torch.zeros_like(rows)
    out[:, first : last + 1] = rows[:, first : last + 1]
    return out


def _rows(
    draw: DrawFn,
    subject: Subject,
    index: int,
    direction: Direction,
    arithmetic: wire.Arithmetic,
    counts: Counts | None = None,
) -> Tensor:
    """Rows for one layer group: zero, one and odd counts; uniform entries, extreme entries, zeros, few columns."""
    width, _ = subject.oracle.widths(index, direction, by_expert=counts is not None)
    if arithmetic == "ring":
        count = _count(draw, subject, index) if counts is None else sum(counts)
        drawn = draw(testing.ring_rows(width=width, count=count))
    else:
        # Sums of products must stay below 2^128: the error bound does not hold after an overflow.
        count, floats = _count(draw, subject, index), (torch.float32,)
        drawn = draw(testing.float_rows(width=width, count=count, dtypes=floats, largest=2.0**96))
    return _windowed(draw, drawn)


@st.composite
def products(
    draw: DrawFn, subject: Subject, *, arithmetics: tuple[wire.Arithmetic, ...] = ("ring",), biased: bool = False
) -> Case:
    """Requests to an executor; with `biased`, forward requests for groups that have a bias."""
    oracle = subject.oracle
    index = draw(st.sampled_from([i for i in subject.sampled if not biased or oracle.has_bias(i)]))
    direction: Direction = FORWARD if biased else draw(testing.directions())
    arithmetic = draw(st.sampled_from(arithmetics))
    counts = _expert_counts(draw, subject, index) if arithmetic == "ring" else None
    drawn = _rows(draw, subject, index, direction, arithmetic, counts)
    return Case(index, direction, arithmetic, drawn, counts=counts)


@st.composite
def effects(
    draw: DrawFn,
    subject: Subject,
    *,
    index: int | None = None,
    direction: Direction | None = None,
    by_expert: bool | None = None,
) -> Case:
    """Requests to a helper: any seed, first rows up to the last that a counter reaches."""
    if index is None:
        index = draw(st.sampled_from(subject.sampled))
    way: Direction = draw(testing.directions()) if direction is None else direction
    first = draw(st.sampled_from((0, 1, 63, 2**32 - 1, 2**40)) | st.integers(0, 2**61))
    seed = Seed(draw(st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES)))
    counts = _expert_counts(draw, subject, index, by_expert=by_expert)
    count = _count(draw, subject, index) if counts is None else sum(counts)
    return effect_case(subject.oracle, index, way, seed=seed, first_row=first, rows=count, counts=counts)


@st.composite
def by_expert(draw: DrawFn, subject: Subject, stacks: Sequence[int]) -> Case:
    """Requests for single experts of some stacks, in the subject's role."""
    index: int = draw(st.sampled_from(stacks))
    if subject.role == "helper":
        return draw(effects(subject, index=index, by_expert=True))
    direction = draw(testing.directions())
    counts = _expert_counts(draw, subject, index, by_expert=True)
    drawn = _rows(draw, subject, index, direction, "ring", counts)
    return Case(index, direction, "ring", drawn, counts=counts)


def requests(subject: Subject) -> SearchStrategy[Case]:
    """Ring requests in the subject's role."""
    return products(subject) if subject.role == "executor" else effects(subject)


@st.composite
def batches(draw: DrawFn, subject: Subject, *, size: int) -> list[Case]:
    """Requests that a provider may compute together: one layer group, direction and arithmetic."""
    if subject.role == "helper":
        first = draw(effects(subject))
        by_expert = first.counts is not None
        like = effects(subject, index=first.index, direction=first.direction, by_expert=by_expert)
        return [first] + [draw(like) for _ in range(size - 1)]
    first = draw(products(subject, arithmetics=arithmetics(subject)))
    cases = [first]
    for _ in range(size - 1):
        counts = _expert_counts(draw, subject, first.index, by_expert=first.counts is not None)
        other = _rows(draw, subject, first.index, first.direction, first.arithmetic, counts)
        cases.append(replace(first, rows=other, counts=counts))
    return cases


def _expert_counts(draw: DrawFn, subject: Subject, index: int, *, by_expert: bool | None = None) -> Counts | None:
    """Rows of every expert of a stack: none at all, all at one expert, or a few at each. None for a dense request.

    Args:
        by_expert: True for counts, False for a dense request; None draws one of the two if the group is a stack.
    """
    experts = subject.oracle.entry(index).experts
    if by_expert is None:
        by_expert = experts > 1 and draw(st.booleans())
    if not by_expert:
        return None
    most = min(_MOST_ROWS, subject.row_limit(index))
    if draw(st.booleans()):
        busiest, count = draw(st.integers(0, experts - 1)), draw(st.integers(0, most))
        return tuple(count * (expert == busiest) for expert in range(experts))
    routes = draw(st.lists(st.integers(0, experts - 1), max_size=most))
    return tuple(map(routes.count, range(experts)))


def _count(draw: DrawFn, subject: Subject, index: int) -> int:
    return min(draw(_COUNTS), subject.row_limit(index))
