"""Runs slices of one product on a few threads, for code that releases the GIL and has no threads of its own.

Idle threads sleep, so they take no cores from torch's pool or from other processes. The number of threads is torch's
(`torch.set_num_threads`), including the caller's thread. Threads take slices one by one, so a thread that is delayed by
other work delays one slice only.
"""

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
        least: smallest slice that is worth another thread; only the last slice may be smaller.
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
        if not helper.cancel():  # it has begun, so wait for the end of its slice
            helper.result()


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < count:
        _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="ring"), count
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # after a fork, the child has only the calling thread
