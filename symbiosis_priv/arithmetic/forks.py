"""Detects forks (rule 12), because secrets, pads and connections belong to the process that made them.

Detection uses two signs. Python's fork hook runs in every child of `os.fork`, even if the child has its parent's
process id, as in a new pid namespace. C code that calls libc's `fork` does not run the hook, but the child has another
process id, which `generation` compares. A fork by C code into a new pid namespace can escape both signs. A copy of the
whole machine (a snapshot of a virtual machine, CRIU) is not detected either.
"""

import os
from collections.abc import Callable

_forks = 0
_pid = os.getpid()
_in_child: list[Callable[[], None]] = []


def generation() -> int:
    """Number of forks between this process and the one that first imported this module.

    If an object was made in another generation, it was copied by a fork. Compare the generation before every use of a
    secret, because only this function detects a fork by C code.
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
