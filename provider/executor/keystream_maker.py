"""Keystream for helpers' effects, made slice by slice in a thread of its own: the one that multiplies never waits.

A tenant's slices are made one after the other, tenants by turns, so that a large effect holds up nobody's small one.
AES runs without the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from provider.round_robin import RoundRobin

J = TypeVar("J")


@dataclass(frozen=True, eq=False)
class _Slice(Generic[J]):
    job: J
    make: Callable[[], Tensor]


class KeystreamMaker(Generic[J]):
    """Makes slices in the background.

    Args:
        wake: called from the maker's thread whenever a slice has been made.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._wanted: RoundRobin[Hashable, _Slice[J]] = RoundRobin()  # by tenant
        self._made: deque[tuple[J, Tensor | Exception]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="keystream", daemon=True)
        self._thread.start()

    def want(self, job: J, tenant: Hashable, make: Callable[[], Tensor]) -> None:
        """Have `make` called in this tenant's turn; what it returns or raises comes out of `made` with the job."""
        with self._changed:
            self._wanted.put(tenant, _Slice(job, make))
            self._changed.notify()

    def forget(self, job: J, tenant: Hashable) -> None:
        """Make nothing more for a job. One slice may be in the making."""
        with self._changed:
            for wanted in self._wanted.of(tenant):
                if wanted.job is job:
                    self._wanted.remove(tenant, wanted)

    def made(self) -> list[tuple[J, Tensor | Exception]]:
        """What has been made since the last call, int32 `[rows, inputs]` each."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def close(self) -> None:
        """Finish the slice in the making, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                outcome: Tensor | Exception = wanted.make()
            except Exception as error:  # the executor answers for it
                outcome = error
            self._made.append((wanted.job, outcome))
            del wanted, outcome  # not to be kept until the next one comes
            self._wake()

    def _next(self) -> _Slice[J] | None:
        with self._changed:
            while not self._wanted and not self._closed:
                self._changed.wait()
            return None if self._closed else self._wanted.get()
