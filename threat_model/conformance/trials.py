"""Tests providers against properties: runs checks, counts examples, and reports results."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.strategies import DrawFn, SearchStrategy

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError, TransportError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.network import wire
from threat_model.conformance.subject import Case, NotTested, OutOfTime, Subject, Violation, WrongRole, effect_case

_MOST_ROWS = 40
_COUNTS = testing.row_counts() | st.integers(0, _MOST_ROWS)


def arithmetics(subject: Subject) -> tuple[wire.Arithmetic, ...]:
    """The arithmetics on which a provider's answers can be judged."""
    return ("ring", "float", "float_bias_free") if subject.floats else ("ring",)


@st.composite
def requests(
    draw: DrawFn,
    subject: Subject,
    *,
    among: Sequence[int] | None = None,
    direction: Direction | None = None,
    by_expert: bool | None = None,
    arithmetics: tuple[wire.Arithmetic, ...] = ("ring",),
    like: Case | None = None,
) -> Case:
    """Valid requests in the subject's role: zero, one and odd row counts; uniform entries, extreme entries, zeros, few
    columns; for a helper any seed, and first rows up to the last that a counter reaches. `by_expert`: True for rows for
    single experts, False for none; None draws one of the two for a stack. `like`: a request whose group, direction and
    arithmetic they repeat, so that a provider may compute them together."""
    if like is not None:
        among, direction, arithmetics = [like.index], like.direction, (like.arithmetic,)
        by_expert = like.counts is not None
    index = draw(st.sampled_from(subject.sampled if among is None else among))
    way: Direction = draw(testing.directions()) if direction is None else direction
    if subject.role == "helper":
        first = draw(st.sampled_from((0, 1, 63, 2**32 - 1, 2**40)) | st.integers(0, 2**61))
        seed = Seed(draw(st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES)))
        arithmetics = ("ring",)
    arithmetic = draw(st.sampled_from(arithmetics))
    counts = _expert_counts(draw, subject, index, by_expert) if arithmetic == "ring" else None
    count = min(draw(_COUNTS), subject.row_limit(index)) if counts is None else sum(counts)
    if subject.role == "helper":
        return effect_case(subject.oracle, index, way, seed=seed, first_row=first, rows=count, counts=counts)
    width, _ = subject.oracle.widths(index, way, by_expert=counts is not None)
    if arithmetic == "ring":
        drawn = draw(testing.ring_rows(width=width, count=count))
    else:
        # Sums of products must stay below 2^128: the error bound does not hold after an overflow.
        drawn = draw(testing.float_rows(width=width, count=count, dtypes=(torch.float32,), largest=2.0**96))
    # Neighbouring columns only, which shrink to the one column that shows a fault. Twice the width, so that the whole
    # row is drawn often, and Hypothesis can shrink the two numbers independently.
    last = min(width - 1, draw(st.integers(0, 2 * width)))
    start = last - min(last, draw(st.integers(0, 2 * width)))
    rows = torch.zeros_like(drawn)
    rows[:, start : last + 1] = drawn[:, start : last + 1]
    return Case(index, way, arithmetic, rows, counts=counts)


def _expert_counts(draw: DrawFn, subject: Subject, index: int, by_expert: bool | None) -> Counts | None:
    """Rows of every expert of a stack: none at all, all at one expert, or a few at each. None for a dense request."""
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


@st.composite
def batches(draw: DrawFn, subject: Subject, *, size: int) -> list[Case]:
    """Requests that a provider may compute together: one layer group, direction and arithmetic."""
    first = draw(requests(subject, arithmetics=arithmetics(subject)))
    return [first, *(draw(requests(subject, like=first)) for _ in range(size - 1))]


PropertyVerdict = Literal["holds", "broken", "not served", "not tested", "no answer", "out of time"]
T = TypeVar("T")
_MOST_UNANSWERED = 2  # after this number of consecutive properties without an answer, the other properties are skipped
_SHRINKING_S = 8.0
_OUT_OF_TIME = "its time was over; --budget gives each provider more"
_NO_FLOATS = (
    "it serves no floats, which only masking = 'paper-pool' needs; its operator sets float_memory_mib under [executor]"
)


@dataclass
class Run:
    """One property's run against one subject: draws examples and counts them."""

    examples: int
    seed: int
    count: int = 0

    def for_all(self, strategy: SearchStrategy[T], check: Callable[[T], None], *, examples: int | None = None) -> None:
        """Run `check` on examples. Raises `Violation`, shrunk by Hypothesis (the last one if the provider fails only
        sometimes); `TransportError` or `OutOfTime`: the other examples are skipped, and nothing is shrunk."""
        failed: list[Violation] = []  # the last one is the smallest: after a failure only smaller examples are tried
        until = float("inf")
        lost: list[Exception] = []

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=self.examples if examples is None else examples,
            deadline=None,
            database=None,
            derandomize=False,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def body(case: T) -> None:
            nonlocal until
            if lost or time.monotonic() > until:
                return
            if not failed:
                self.one()
            try:
                check(case)
            except (TransportError, NotTested, OutOfTime) as error:
                lost.append(error)
            except Violation as violation:
                failed.append(violation)
                until = min(until, time.monotonic() + _SHRINKING_S)
                raise

        try:
            body()
        except Flaky:  # the time limit has passed, or the provider fails only sometimes
            if time.monotonic() < until and not lost:
                failed[-1].what += " (not every time)"
            raise failed[-1] from None
        if lost:
            raise lost[0]

    def one(self) -> None:
        self.count += 1


@dataclass(frozen=True)
class Property:
    """A claim about a provider, and the check that may refute it."""

    name: str
    claim: str
    roles: tuple[wire.Role, ...]
    check: Callable[[Subject, Run], None]
    floats: bool = False


EXECUTOR: Final[tuple[wire.Role, ...]] = ("executor",)
HELPER: Final[tuple[wire.Role, ...]] = ("helper",)


def claim(
    name: str, text: str, roles: tuple[wire.Role, ...] = EXECUTOR + HELPER, *, floats: bool = False
) -> Callable[[Callable[[Subject, Run], None]], Property]:
    """Make a check a property. The arguments are those of `Property`."""
    return lambda check: Property(name, text, roles, check, floats)


@dataclass
class PropertyResult:
    """The result of one property at one provider. `reason`: why the property was not tested, or why there was no
    answer. `wrong_role`: the provider refuses the role, so that no property can be tested."""

    provider: str
    role: wire.Role
    property: Property
    verdict: PropertyVerdict = "holds"
    examples: int = 0
    reason: str | None = None
    violation: Violation | None = None
    wrong_role: bool = False


def passed(results: Sequence[PropertyResult]) -> bool:
    """Returns True if no property is broken or unanswered, and each provider holds at least one."""
    providers = {(r.provider, r.role) for r in results}
    tested = {(r.provider, r.role) for r in results if r.verdict == "holds"}
    return providers == tested and not any(r.verdict in ("broken", "no answer", "out of time") for r in results)


def run_property(chosen: Property, subject: Subject, *, examples: int, seed: int) -> PropertyResult:
    """Test one provider against one property. Raises no error that a provider causes."""
    run = Run(examples, seed)
    result = PropertyResult(subject.name, subject.role, chosen)
    try:
        _ = subject.welcome, subject.floats  # connect now: Hypothesis must not see an error while it draws an example
        if chosen.floats and not subject.floats:
            result.verdict, result.reason = "not served", _NO_FLOATS
        else:
            chosen.check(subject, run)
    except Violation as found:
        result.verdict, result.violation = "broken", found
    except NotTested as why:
        result.verdict, result.reason, result.wrong_role = "not tested", str(why), isinstance(why, WrongRole)
    except OutOfTime:
        subject.close()  # an answer to an earlier request may still arrive on this connection
        result.verdict, result.reason = "out of time", _OUT_OF_TIME
    except SymbiosisError as error:  # for instance a refused certificate, a timeout, or an incomplete frame
        subject.close()
        result.verdict, result.reason = "no answer", str(error)
        if isinstance(error, DeadlineExceededError):
            result.reason += f": not within {subject.deadline_s:g} s; --deadline waits longer"
            if time.monotonic() >= subject.until:
                result.verdict, result.reason = "out of time", _OUT_OF_TIME
    result.examples = run.count
    return result


def verify(
    subjects: Sequence[Subject],
    properties: Sequence[Property],
    *,
    examples: int,
    seed: int,
    budget_s: float = math.inf,
) -> Iterator[PropertyResult]:
    """Test every subject against every property of its role, in order. Yields each result immediately. The tests of one
    subject end after `budget_s` seconds. `seed` is that of Hypothesis and of the rows; the same seed repeats a run. A
    provider should not know it beforehand."""
    for subject in subjects:
        unanswered, answered = 0, False
        skip_reason: str | None = None
        subject.until = time.monotonic() + budget_s
        try:
            for chosen in (p for p in properties if subject.role in p.roles):
                if skip_reason is not None:
                    yield PropertyResult(subject.name, subject.role, chosen, "not tested", reason=skip_reason)
                    continue
                outcome = run_property(chosen, subject, examples=examples, seed=seed)
                unanswered = unanswered + 1 if outcome.verdict == "no answer" else 0
                answered = answered or not unanswered
                if unanswered == _MOST_UNANSWERED:  # unreachable: do not wait for the deadline of every property
                    skip_reason = "it has stopped answering" if answered else "it has not answered at all"
                elif outcome.wrong_role or outcome.verdict == "out of time":
                    skip_reason = outcome.reason
                yield outcome
        finally:
            subject.close()
