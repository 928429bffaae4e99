"""Processor time and memory of processes, and low priority."""

import os
import subprocess
import sys
from pathlib import Path

from tenant.bench.processes import process_costs

_LOWER = """
import os
from pathlib import Path
from tenant.bench.processes import process_costs
before = os.getpriority(os.PRIO_PROCESS, 0)
process_costs.lower_own_priority(7)
group = Path("/proc/self/autogroup")
print(os.getsid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0) - before)
print(group.read_text().split()[-1] if group.exists() else 7)
"""


def test_a_process_with_low_priority_has_a_session_of_its_own() -> None:
    """Linux divides cores among sessions first, so a priority within a shared session would not suffice."""
    told = subprocess.run([sys.executable, "-c", _LOWER], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True", "7", "7"]


def test_a_session_that_a_process_has_started_is_one_of_its_sessions() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert process_costs.sessions(os.getpid()) >= {os.getsid(0), child.pid}
        process_costs.lower_session_priority(child.pid, 5)
        group = Path(f"/proc/{child.pid}/autogroup")
        assert not group.exists() or group.read_text().split()[-1] == "5"
        child.communicate(b"\n")
    assert child.pid not in process_costs.sessions(os.getpid())
    process_costs.lower_session_priority(child.pid, 5)  # the process has ended, which is not an error


CHILD = """
import time
memory = bytearray(128 << 20)
while time.process_time() < 0.25:  # the system counts in hundredths, rounded down, of several kinds
    pass
print("done", flush=True)
input()
"""


def test_costs_include_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert 0.2 <= process_costs.cpu_seconds([process.pid]) < 60
        assert process_costs.peak_mib([process.pid]) > 128
        process.communicate(b"\n")
    assert process_costs.cpu_seconds([process.pid]) == 0
    assert process_costs.peak_mib([process.pid]) == 0


def test_the_resources_of_a_process_are_counted(tmp_path: Path) -> None:
    before = process_costs.resources([os.getpid()])
    with (tmp_path / "file").open("wb"):
        after = process_costs.resources([os.getpid()])
    assert after.files == before.files + 1
    assert after.threads >= 1
    assert after.bytes > 1 << 20
