"""Noticing forks (rule 12).

A process id cannot tell: a child in a pid namespace of its own may have its parent's, and ids are used again. The
interpreter's fork hook can: it runs in every child that goes on running Python.

A copy of the whole machine (a snapshot of a virtual machine, CRIU) is no fork, and nothing in it can notice.
"""

from __future__ import annotations

import os

_forks = 0


def generation() -> int:
    """How many forks lie between this process and the one that first imported this module.

    What was made in one generation and is found in another has come over a fork.
    """
    return _forks


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)
