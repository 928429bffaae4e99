"""Noticing forks (rule 12): secrets, pads and connections belong to the process that made them.

Two signs are needed. Python's fork hook runs in every child of `os.fork`, also in one that has its parent's process id,
as in a new pid namespace. C code that calls libc's `fork` runs no hook of Python's, but its child has another process
id, so `generation` compares it. A child with both, a fork by C code and its parent's process id, is not noticed. Nor is
a copy of the whole machine (a snapshot of a virtual machine, CRIU).
"""

from __future__ import annotations

import os
from collections.abc import Callable

_forks = 0
_pid = os.getpid()
_in_child: list[Callable[[], None]] = []


def generation() -> int:
    """Number of forks between this process and the one that first imported this module.

    An object that was made in one generation and is found in another one has come over a fork. Compare before every
    use of a secret: a fork by C code is noticed here and nowhere else.
    """
    if os.getpid() != _pid:
        _forked()
    return _forks


def call_in_child(function: Callable[[], None]) -> None:
    """Register a function that every forked child calls as soon as it notices the fork."""
    _in_child.append(function)


def _forked() -> None:
    global _forks, _pid
    _pid = os.getpid()
    _forks += 1
    for function in _in_child:
        function()


os.register_at_fork(after_in_child=_forked)
