"""Keeps a secret in memory that is not swapped, and a process from being read by other programs of its user.

Both are best effort: a system that refuses leaves things as they are, and `symbiosis-priv tenant check --machine` says
what is open. Copies that a computation makes (derived keys, cipher contexts) are in ordinary memory.
"""

import ctypes
import mmap
import resource
import sys
from typing import NoReturn

_PR_SET_DUMPABLE, _MADV_DONTDUMP, _MADV_WIPEONFORK = 4, 16, 18


class LockedSecret:
    """A secret in a page of its own: locked, in no core file, and zero in a forked child."""

    def __init__(self, secret: bytes) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._size = len(secret)
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))
        length, libc = ctypes.c_size_t(mmap.PAGESIZE), ctypes.CDLL(None)
        libc.mlock(address, length)
        if sys.platform == "linux":
            for advice in (_MADV_DONTDUMP, _MADV_WIPEONFORK):
                libc.madvise(address, length, advice)
        self._page[: self._size] = secret

    def __bytes__(self) -> bytes:
        return self._page[: self._size]

    def __repr__(self) -> str:
        return "LockedSecret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is neither copied nor stored")


def protect_process() -> None:
    """Forbid core files of this process and its children, and, on Linux, that other programs of the same user trace
    it or read its memory (`ptrace`, `/proc/PID/mem`)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
