"""Processes that have a machine of their own in earnest."""

from __future__ import annotations

import subprocess
import sys

_GIVE_WAY = """
import os
from pathlib import Path
from tenant.bench import processes
before = os.getpriority(os.PRIO_PROCESS, 0)
processes.give_way(7)
group = Path("/proc/self/autogroup")
print(os.getsid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0) - before)
print(group.read_text().split()[-1] if group.exists() else 7)
"""


def test_who_gives_way_does_so_to_other_sessions_too() -> None:
    """Linux shares cores out among sessions first: a priority within one's own is not enough."""
    told = subprocess.run([sys.executable, "-c", _GIVE_WAY], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True", "7", "7"]
