"""The parts of a large product, sent at the same time over several connections to several executors.

Each slot is one connection and one thread; the first slot uses the caller's thread. A slot takes the next part when
its previous part is done, so a faster executor gets more parts. Towards the end, a slow executor takes no part that
the other slots would finish earlier. The caller's slot uses the cheapest executor, and takes every part that is left.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from symbiosis_priv.errors import QuarantinedError
from tenant.connections.executor_client import LANES, ExecutorClient
from tenant.core.parts import Part
from tenant.routing.route import Route

_MOST_PARTS = 4  # limit of parts of a product per executor: many small parts cost more than they save


class PartQueue:
    """The parts of a product that no slot has taken yet. Thread-safe."""

    def __init__(self, parts: Sequence[Part], slots: Sequence[Route]) -> None:
        self._waiting, self._slots = deque(parts), list(slots)
        self._lock = threading.Lock()

    def take(self, route: Route, *, picky: bool) -> Part | None:
        """Return the next part for a slot at an executor; None if no part is left.

        Args:
            picky: also return None if the other slots would finish all parts earlier; the slot then ends.
        """
        with self._lock:
            if not self._waiting:
                return None
            if picky and self._others_are_faster(route):
                self._slots.remove(route)
                return None
            return self._waiting.popleft()

    def clear(self) -> None:
        """Discard the parts that have not begun."""
        with self._lock:
            self._waiting.clear()

    def _others_are_faster(self, route: Route) -> bool:
        """Returns True if the other slots would finish their parts and all that are left before this slot finishes
        one."""
        size = self._waiting[0].size
        mine = route.health.seconds_for(size)
        costs = [slot.health.seconds_for(size) for slot in self._slots if slot is not route]
        known = [cost for cost in costs if cost]
        if mine is None or not known or len(known) < len(costs):
            return False
        return mine > (len(self._waiting) + len(known)) / sum(1.0 / cost for cost in known)


def multiply_parts(
    parts: Sequence[Part], executors: Sequence[ExecutorClient], work: Callable[[Part, Route | None], None]
) -> None:
    """Run `work` for every part, several at a time.

    Args:
        work: gets a part and the executor to ask first; None if any may be asked.

    Raises:
        Exception: the error of a part that fails: of the part that found a fault, if there is one. By then, no part is
            being sent, and no other part will begin.
    """
    if len(parts) == 1 or not executors:
        for part in parts:
            work(part, None)
        return
    # one slot at every executor before any executor has a second one
    slots = [(executor, lane) for lane in range(LANES) for executor in executors][: len(parts)]
    own, *others = slots
    queue = PartQueue(parts, [executor.route for executor, _ in slots])

    def work_off(route: Route, *, picky: bool) -> None:
        try:
            while (part := queue.take(route, picky=picky)) is not None:
                work(part, route)
        except BaseException:
            queue.clear()
            raise

    # context variables of the thread, and of the results that parts write
    inference = torch.is_inference_mode_enabled()

    def work_beside(route: Route) -> None:
        with torch.inference_mode(inference):
            work_off(route, picky=True)

    jobs = [executor.workers[lane].submit(work_beside, executor.route) for executor, lane in others]
    failures: list[BaseException] = []
    try:
        work_off(own[0].route, picky=False)  # so that no part is left for the slots that have not begun
    except Exception as error:  # an interrupt ends the wait at once
        failures.append(error)
    # parts that have not begun will not begin; the others are bounded by the deadlines of their requests
    failures += [failure for job in jobs if not job.cancel() and (failure := job.exception()) is not None]
    if failures:
        # the part that found a fault says more than a part that stopped because of the quarantine
        raise next((failure for failure in failures if not isinstance(failure, QuarantinedError)), failures[0])


def part_rows(count: int, size: int, *, part_bytes: int, executors: int = 1) -> int:
    """Return the rows of each part of a product of `count` rows and `size` bytes, request and answer together. It
    depends only on sizes and on the number of executors (rule 5)."""
    return -(-count // max(1, min(_MOST_PARTS * max(1, executors), size // part_bytes)))
