"""Tests providers against properties: runs checks, counts examples, and reports results."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from symbiosis_priv.errors import SymbiosisError, TransportError
from symbiosis_priv.network import wire
from threat_model.conformance.raw_connection import OutOfTime
from threat_model.conformance.subject import NotTested, Subject, Violation, WrongRole

PropertyVerdict = Literal["holds", "broken", "not served", "not tested", "no answer", "out of time"]
T = TypeVar("T")
_MOST_UNANSWERED = 2  # after this number of consecutive properties without an answer, the other properties are skipped
_SHRINKING_S = 8.0
_NO_FLOATS = (
    "it serves no floats, which only masking = 'paper-pool' needs; its operator sets float = true under [executor]"
)


@dataclass
class Run:
    """One property's run against one subject: draws examples and counts them."""

    examples: int
    seed: int
    count: int = 0
    tick: Callable[[], None] = field(default=lambda: None)

    def for_all(self, strategy: SearchStrategy[T], check: Callable[[T], None], *, examples: int | None = None) -> None:
        """Run `check` on examples. Raises the Violation of the smallest failing example.

        Raises:
            Violation: shrunk by Hypothesis. If the provider fails only sometimes: the last violation.
            TransportError: the provider cannot be reached: the other examples are skipped, and nothing is shrunk.
            OutOfTime: the provider's time limit has passed before an example failed.
        """
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
        self.tick()


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


@dataclass(frozen=True)
class PropertyResult:
    """The result of one property at one provider.

    Args:
        reason: the reason why the property was not tested, or why there was no answer.
        wrong_role: True if the provider refuses the role, so that no property can be tested.
    """

    provider: str
    role: wire.Role
    property: Property
    verdict: PropertyVerdict
    examples: int = 0
    seconds: float = 0.0
    reason: str | None = None
    violation: Violation | None = None
    culprit: str | None = None
    wrong_role: bool = False


def run_property(
    chosen: Property, subject: Subject, *, examples: int, seed: int, tick: Callable[[], None] = lambda: None
) -> PropertyResult:
    """Test one provider against one property. Raises no error that a provider causes."""
    run = Run(examples, seed, tick=tick)
    begun = time.monotonic()
    verdict: PropertyVerdict = "holds"
    reason = violation = culprit = None
    wrong_role = False
    try:
        if chosen.floats and not subject.oracle.floats:
            raise NotTested("needs the checkpoint (--model)")
        _ = subject.welcome, subject.floats  # connect now: Hypothesis must not see an error while it draws an example
        if chosen.floats and not subject.floats:
            verdict, reason = "not served", _NO_FLOATS
        else:
            chosen.check(subject, run)
    except Violation as found:
        verdict, violation, culprit = "broken", found, found.culprit or subject.name
    except NotTested as why:
        verdict, reason, wrong_role = "not tested", str(why), isinstance(why, WrongRole)
    except OutOfTime:
        subject.close()  # an answer to an earlier request may still arrive on this connection
        verdict, reason = "out of time", "its time was over; --budget gives each provider more"
    except SymbiosisError as error:  # for instance a refused certificate, a timeout, or an incomplete frame
        subject.close()
        verdict, reason = "no answer", str(error)
    return PropertyResult(
        provider=subject.name,
        role=subject.role,
        property=chosen,
        verdict=verdict,
        examples=run.count,
        seconds=time.monotonic() - begun,
        reason=reason,
        violation=violation,
        culprit=culprit,
        wrong_role=wrong_role,
    )


def verify(
    subjects: Sequence[Subject],
    properties: Sequence[Property],
    *,
    examples: int,
    seed: int,
    budget_s: float = math.inf,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[PropertyResult]:
    """Test every subject against every property of its role, in order. Yields each result immediately.

    Args:
        budget_s: time limit in seconds for the tests of one subject. Properties after it are not tested.
        seed: seed of Hypothesis and of the rows; the same seed repeats a run. A provider should not know it beforehand.
    """
    for subject in subjects:
        unanswered, answered = 0, False
        skip_reason: str | None = None
        until = time.monotonic() + budget_s
        for one in (subject, *subject.executors):  # a helper is compared with executors
            one.dialler.until = until
        try:
            for chosen in (p for p in properties if subject.role in p.roles):
                if skip_reason is not None:
                    yield PropertyResult(subject.name, subject.role, chosen, "not tested", reason=skip_reason)
                    continue
                outcome = run_property(chosen, subject, examples=examples, seed=seed, tick=tick)
                unanswered = unanswered + 1 if outcome.verdict == "no answer" else 0
                answered = answered or not unanswered
                if unanswered == _MOST_UNANSWERED:  # unreachable: do not wait for the deadline of every property
                    skip_reason = "it has stopped answering" if answered else "it has not answered at all"
                elif outcome.wrong_role or outcome.verdict == "out of time":
                    skip_reason = outcome.reason
                yield outcome
        finally:
            subject.close()
