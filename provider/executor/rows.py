"""The rows of requests: joined and copied as bytes, or expanded from helpers' seeds.

Bytes are joined without torch, because every torch operation releases the GIL, and waiting for the GIL takes longer
than copying a few rows. Keystreams are expanded in a thread of their own, so that products do not wait for them. The
thread serves tenants in round-robin order, one slice at a time: a small effect does not wait for another tenant's large
effect. AES runs without the GIL.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from provider.fairness import RoundRobin

_BRIEF_BYTES = 1 << 18  # copying up to this many bytes takes less time than waiting for the GIL


def joined(buffers: Sequence[memoryview]) -> memoryview:
    """The concatenation of all buffers. Not a copy if only one buffer is not empty."""
    if len(buffers) > 1:
        buffers = [buffer for buffer in buffers if buffer]
    if len(buffers) == 1:
        return buffers[0]
    whole, start = empty(sum(map(len, buffers))), 0
    for buffer in buffers:
        fill(whole[start : start + len(buffer)], buffer)
        start += len(buffer)
    return whole


def copy_of(buffer: memoryview) -> memoryview:
    own = empty(len(buffer))
    fill(own, buffer)
    return own


def fill(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, which has the same size."""
    if len(source) <= _BRIEF_BYTES:
        target[:] = source
    else:  # numpy releases the GIL during the copy
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


def empty(size: int) -> memoryview:
    """Uninitialised bytes (a bytearray would be cleared)."""
    return np.empty(size, dtype=np.uint8).data


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
