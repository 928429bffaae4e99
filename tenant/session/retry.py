"""Records the failures of one request, and decides how long to retry."""

import logging
import secrets
import time

from symbiosis_priv.errors import DeadlineExceededError, UncoveredError
from symbiosis_priv.federation import Peer
from tenant.routing.route import Route
from tenant.session.options import SessionOptions
from tenant.session.runtime import Runtime
from tenant.session.tally import Tally

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0
_MANY_REDRAWS = 4  # after more redraws, all helpers fail, and retrying without a pause does not help
_jitter = secrets.SystemRandom().random


class RetryState:
    """The state of retries for one part of a product.

    Attributes:
        began, deadline: start of the first attempt and end of the last, by `time.monotonic`.
        asked_at: time at which the present executor was asked, by `time.monotonic`.
        patience_s: seconds that the present executor may take.
        last: the executor that failed last.
        fault: the error to raise if no provider is left.
        effect_error: the error of the last lost effect.
        redraws: number of times that pads were replaced.
        late: helpers whose effects have not come in time.
        refused: executors that answered with an error.
        declined: helpers that answered with an error.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime) -> None:
        self._options, self._runtime = options, runtime
        self.began = self.asked_at = time.monotonic()
        self.deadline = self.began + options.deadline_s
        self.patience_s = options.deadline_s
        self.last: Route | None = None
        self.fault: Exception | None = None
        self.late: set[Peer] = set()
        self.refused: set[Route] = set()
        self.declined: set[Peer] = set()
        self.faults = 0
        self.effect_error: BaseException | None = None
        self.redraws = 0
        self._error: Exception | None = None
        self._failed: dict[Route, float] = {}
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, route: Route, error: Exception) -> None:
        """Record that the executor was lost, late or busy, or that it refused."""
        self.last, self._error = route, error
        self._failed.setdefault(route, time.monotonic())

    def faulted(self, fault: Exception) -> None:
        """Record that a provider was found at fault."""
        self.fault = fault
        self.faults += 1

    def before_request(self, *, pause: bool) -> None:
        """Check the deadline before each request; wait first if `pause` is True.

        Raises:
            DeadlineExceededError: the deadline has passed, or would pass during the wait.
            UncoveredError: no executor could be asked.
        """
        pause = pause or self.redraws > _MANY_REDRAWS
        wait_s = self._pause_s if pause else 0.0
        if time.monotonic() + wait_s >= self.deadline:
            raise self._too_late()
        if not pause:
            return
        if self.last is not None:
            self._runtime.notices.waiting(
                self.last.peer.label, since=self.began, until=self.deadline, why=str(self._error)
            )
        self._runtime.closing.wait(wait_s * (0.5 + _jitter() / 2))
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def succeeded(self, route: Route, tally: Tally) -> None:
        """Record that the executor's answer was right. Counts a takeover if another executor had failed before."""
        if not self._failed:  # the common case
            return
        failed = [(since, other) for other, since in self._failed.items() if other is not route]
        if failed:
            since, other = min(failed, key=lambda pair: pair[0])
            seconds = time.monotonic() - since
            tally.add(takeovers=1, takeover_s=seconds)
            log.info("%s took over from %s within %.2f s", route, other, seconds)

    def _too_late(self) -> Exception:
        waited = f"within {self._options.deadline_s:g} s"
        if not self._failed and self.effect_error is not None:
            late = DeadlineExceededError(
                f"no effects from the helpers {waited} (last: {self.effect_error}). Are they running? "
                f"{self._options.deadline_option} waits longer."
            )
            late.__cause__ = self.effect_error
            return late
        if not self._failed:
            return self.fault or UncoveredError(
                f"no executor of these layers was available {waited}. Are they running? "
                f"{self._options.deadline_option} waits longer."
            )
        names = " nor ".join(route.peer.label for route in self._failed)
        running = "Is it running?" if len(self._failed) == 1 else "Are they running?"
        late = DeadlineExceededError(
            f"no answer from {names} {waited} (last: {self._error}). {running} "
            f"{self._options.deadline_option} waits longer."
        )
        late.__cause__ = self._error
        return late
