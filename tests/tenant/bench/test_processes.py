"""Processes that have a machine of their own in earnest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tenant.bench import processes

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


def test_a_session_that_a_process_has_started_is_among_its_own() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert processes.sessions(os.getpid()) >= {os.getsid(0), child.pid}
        processes.push_back(child.pid, 5)
        group = Path(f"/proc/{child.pid}/autogroup")
        assert not group.exists() or group.read_text().split()[-1] == "5"
        child.communicate(b"\n")
    assert child.pid not in processes.sessions(os.getpid())
    processes.push_back(child.pid, 5)  # it has ended, which is no error
