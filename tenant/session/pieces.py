"""A large product in pieces that travel side by side, over several connections to every executor that has room.

Each connection has a thread, the first one the caller's own, and takes the next piece when it is done with one: who is
faster does more. Towards the end a slow executor takes none that the others would have finished before it; the caller,
whose own seat is at the executor that costs least, takes whatever is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import torch

from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.network import wire
from tenant.connections.executor import LANES, Executor
from tenant.core.parts import Part
from tenant.routing.route import Route

_MOST_PIECES = 4  # of a product, per executor: many small ones cost more than they hide


class Pieces:
    """What is left of a product. Thread-safe."""

    def __init__(self, parts: Sequence[Part], seats: Sequence[Route]) -> None:
        self._waiting, self._seats = deque(parts), list(seats)
        self._lock = threading.Lock()

    def take(self, route: Route, *, picky: bool) -> Part | None:
        """The next piece for an executor; None if there is none, or, to the picky, none that is worth its while."""
        with self._lock:
            if not self._waiting:
                return None
            if picky and self._others_are_faster(route):
                self._seats.remove(route)
                return None
            return self._waiting.popleft()

    def clear(self) -> None:
        """Begin no other piece."""
        with self._lock:
            self._waiting.clear()

    def _others_are_faster(self, route: Route) -> bool:
        """Whether the other seats would be done with what they have in hand, and with all that is left, before this one
        is with a single piece."""
        size = self._waiting[0].size
        mine = route.health.seconds_for(size)
        costs = [seat.health.seconds_for(size) for seat in self._seats if seat is not route]
        known = [cost for cost in costs if cost]
        if mine is None or not known or len(known) < len(costs):
            return False
        return mine > (len(self._waiting) + len(known)) / sum(1.0 / cost for cost in known)


def share(parts: Sequence[Part], executors: Sequence[Executor], work: Callable[[Part, Route | None], None]) -> None:
    """Do the parts of a product, several at a time, each told whom to ask first.

    Raises what the first of them raises to fail; then no other one begins, and none is still at work.
    """
    if len(parts) == 1 or not executors:
        for part in parts:
            work(part, None)
        return
    # one slot at every executor before any executor has a second one
    seats = [(executor, lane) for lane in range(LANES) for executor in executors][: len(parts)]
    own, *others = seats
    pieces = Pieces(parts, [executor.route for executor, _ in seats])

    def work_off(route: Route, *, picky: bool) -> None:
        try:
            while (part := pieces.take(route, picky=picky)) is not None:
                work(part, route)
        except BaseException:
            pieces.clear()
            raise

    inference = torch.is_inference_mode_enabled()  # belongs to a thread, and to the results that parts write

    def work_beside(route: Route) -> None:
        with torch.inference_mode(inference):
            work_off(route, picky=True)

    jobs = [executor.workers[lane].submit(work_beside, executor.route) for executor, lane in others]
    try:
        work_off(own[0].route, picky=False)  # so that nothing is left: the others may never begin
    except Exception:  # an interrupt need not wait
        wait([job for job in jobs if not job.cancel()])  # bounded by the deadlines of their requests
        raise
    for job in jobs:
        if not job.cancel():  # those that have not begun never will
            job.result()


def piece_rows(count: int, group: GroupEntry, *, piece_bytes: int, executors: int = 1) -> int:
    """Rows of each piece of a product of `count` rows. It depends on sizes and on the number of executors alone
    (rule 5)."""
    return -(-count // max(1, min(_MOST_PIECES * executors, product_bytes(count, group) // piece_bytes)))


def product_bytes(count: int, group: GroupEntry) -> int:
    """Bytes of a product of `count` rows, both ways."""
    return wire.RING32.size(count, group.inputs + group.stacked_outputs)
