"""Slices of one product over a few threads, for code that releases the GIL and has no threads of its own.

Idle threads sleep: nothing spins beside torch's pool or another process. As many threads work on a product as
torch would use (`torch.set_num_threads`), the caller among them. Slices are handed out one by one, so a thread that
other work holds up delays a slice and not its share.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_SLICES_PER_THREAD = 4

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def for_each_slice(work: Callable[[int, int], None], *, total: int, least: int) -> None:
    """Call `work(begin, end)` on slices that cover `range(total)`, in no order, and return when all are done.

    Args:
        least: units that are worth another thread's while; no slice but the last is smaller.
    """
    threads = torch.get_num_threads()
    slices = min(threads * _SLICES_PER_THREAD, total // least)
    if threads == 1 or slices < 2:
        work(0, total)
        return
    step = -(-total // slices)
    begins = deque(range(0, total, step))

    def drain() -> None:
        while True:
            try:
                begin = begins.popleft()
            except IndexError:
                return
            work(begin, min(begin + step, total))

    helpers = [_helpers(threads - 1).submit(drain) for _ in range(min(threads, len(begins)) - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():  # it has begun, so it ends with its slice
            helper.result()


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < count:
        _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="ring"), count
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # a fork has no threads but its own
