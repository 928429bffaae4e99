"""Expands the keystream for helpers' effects in a separate thread, so that products do not wait for it.

The thread serves tenants in round-robin order, one slice at a time: a small effect does not wait for another tenant's
large effect. AES runs without the GIL.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from provider.fairness.round_robin import RoundRobin

J = TypeVar("J")


@dataclass(frozen=True, eq=False)
class _Slice(Generic[J]):
    job: J
    make: Callable[[], Tensor]


class KeystreamMaker(Generic[J]):
    """Makes keystream slices in one thread.

    Args:
        wake: called in this thread after each slice.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._ordered: RoundRobin[Hashable, _Slice[J]] = RoundRobin()  # by tenant
        self._made: deque[tuple[J, Tensor | Exception]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="keystream", daemon=True)
        self._thread.start()

    def order(self, job: J, tenant: Hashable, make: Callable[[], Tensor]) -> None:
        """Queue a slice of a tenant. `made` returns the job with the result of `make`, or with its exception."""
        with self._changed:
            self._ordered.put(tenant, _Slice(job, make))
            self._changed.notify()

    def forget(self, job: J, tenant: Hashable) -> None:
        """Drop the queued slices of a job. A slice that the thread is making still arrives in `made`."""
        with self._changed:
            for ordered in self._ordered.of(tenant):
                if ordered.job is job:
                    self._ordered.remove(tenant, ordered)

    def made(self) -> list[tuple[J, Tensor | Exception]]:
        """The slices made since the last call: the job, with int32 `[rows, inputs]` or an exception."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def close(self) -> None:
        """Finish the current slice, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (ordered := self._next()) is not None:
            try:
                outcome: Tensor | Exception = ordered.make()
            except Exception as error:  # the executor answers the request with a failure
                outcome = error
            self._made.append((ordered.job, outcome))
            del ordered, outcome  # frees the memory before the thread waits
            self._wake()

    def _next(self) -> _Slice[J] | None:
        with self._changed:
            while not self._ordered and not self._closed:
                self._changed.wait()
            return None if self._closed else self._ordered.get()
