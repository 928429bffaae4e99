"""The parts of a large product, sent at the same time over several connections to several executors.

Each slot is one connection and one thread; the first slot uses the caller's thread. A slot takes the next part when its
previous part is done, so a faster executor gets more parts. A slot ends early if the other slots would finish all parts
sooner without it. The caller's slot uses the executor with the lowest cost, and takes every part that is left.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from symbiosis_priv.errors import QuarantinedError
from tenant.connections.executor_client import PARALLEL_CHANNELS, ExecutorClient
from tenant.core.parts import Part
from tenant.routing.known_provider import KnownProvider

_MOST_PARTS = 4  # limit of parts of a product per executor: many small parts cost more than they save


class PartQueue:
    """The parts of a product that no slot has taken yet. Thread-safe."""

    def __init__(self, parts: Sequence[Part], slots: Sequence[KnownProvider]) -> None:
        self._waiting, self._slots = deque(parts), list(slots)
        self._lock = threading.Lock()

    def take(self, provider: KnownProvider, *, only_if_faster: bool) -> Part | None:
        """Return the next part for a slot at an executor; None if no part is left. `only_if_faster`: also return None
        if the other slots would finish all remaining parts before this slot finishes one. The slot then ends."""
        with self._lock:
            if not self._waiting:
                return None
            if only_if_faster:
                size = self._waiting[0].size
                mine = provider.health.seconds_for(size)
                costs = [slot.health.seconds_for(size) for slot in self._slots if slot is not provider]
                known = [cost for cost in costs if cost]
                if mine is not None and known and len(known) == len(costs):
                    others_s = (len(self._waiting) + len(known)) / sum(1.0 / cost for cost in known)
                    if mine > others_s:
                        self._slots.remove(provider)
                        return None
            return self._waiting.popleft()

    def clear(self) -> None:
        """Discard the parts that have not begun."""
        with self._lock:
            self._waiting.clear()


def multiply_parts(
    parts: Sequence[Part], executors: Sequence[ExecutorClient], work: Callable[[Part, KnownProvider | None], None]
) -> None:
    """Run `work` for every part, several at a time. `work`: computes a part. Its arguments are the part and the
    executor to ask first; None for any executor. Raises `Exception`: the error of a part that failed; if a part found a
    fault, the error of that part. It is raised when no part is being sent any more, and no other part will begin."""
    if len(parts) == 1 or not executors:
        for part in parts:
            work(part, None)
        return
    # one slot at every executor before any executor has a second one
    slots = [(executor, number) for number in range(PARALLEL_CHANNELS) for executor in executors][: len(parts)]
    own, *others = slots
    queue = PartQueue(parts, [executor.provider for executor, _ in slots])

    def run_parts(provider: KnownProvider, *, only_if_faster: bool) -> None:
        try:
            while (part := queue.take(provider, only_if_faster=only_if_faster)) is not None:
                work(part, provider)
        except BaseException:
            queue.clear()
            raise

    inference = torch.is_inference_mode_enabled()

    def run_in_thread(provider: KnownProvider) -> None:
        with torch.inference_mode(inference):  # threads inherit no modes, and parts write to the caller's tensors
            run_parts(provider, only_if_faster=True)

    jobs = [executor.workers[number].submit(run_in_thread, executor.provider) for executor, number in others]

    def run_own() -> None:
        try:
            run_parts(own[0].provider, only_if_faster=False)  # takes every part that is left
        finally:
            for job in jobs:
                job.cancel()

    run_beside(jobs, run_own)


def run_beside(jobs: Sequence[Future[None]], own: Callable[[], None]) -> None:
    """Run `own` in this thread while `jobs` run in others. Raises the error of one that found a fault, else any error,
    when all have ended: they are bounded by the deadlines of their requests."""
    failures: list[BaseException] = []
    try:
        own()
    except Exception as error:  # an interrupt ends the wait at once
        failures.append(error)
    failures += [failure for job in jobs if not job.cancelled() and (failure := job.exception()) is not None]
    if failures:  # a request that was stopped because of a quarantine says less than the one that found the fault
        raise next((failure for failure in failures if not isinstance(failure, QuarantinedError)), failures[0])


def part_rows(count: int, size: int, *, part_bytes: int, executors: int = 1) -> int:
    """Return the rows of each part of a product of `count` rows and `size` bytes, request and answer together. The
    result depends only on sizes and on the number of executors (rule 5)."""
    return -(-count // max(1, min(_MOST_PARTS * max(1, executors), size // part_bytes)))
