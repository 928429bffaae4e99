"""A rank that ends its group kills its own torchrun with all of its ranks, and no other process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provider.shards import torchrun
from tests.provider.processes import has_ended
from tests.waiting import until

# Two ranks, of which the first stops; torchrun (this script) does not notice it.
GROUP = """
import os, signal, subprocess, sys, time
from provider.shards import torchrun
if len(sys.argv) > 1:
    torchrun.end_with_torchrun()
    os.write(1, f'{os.getpid()}\\n'.encode())
    if sys.argv[1] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.readline()
    torchrun.kill()
    time.sleep(60)
else:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in (0, 1)]
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank cannot end with its parent")
def test_the_whole_group_ends_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP, encoding="utf-8")
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    group = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    assert group.stdin is not None
    assert group.stdout is not None
    assert bystander.stdin is not None
    ranks = [int(group.stdout.readline()) for _ in range(2)]
    group.stdin.write(b"now\n")
    group.stdin.flush()
    assert group.wait(30) == -signal.SIGKILL
    until(lambda: all(map(has_ended, ranks)))
    assert bystander.poll() is None
    for pipe in (group.stdin, group.stdout, bystander.stdin):
        pipe.close()
    bystander.wait(30)


@pytest.mark.parametrize("parent", [None, -1, 0, 1, "this process"])
def test_only_the_parent_is_killed(parent: int | str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered process id is killed only if the kernel reports it as the parent's."""
    monkeypatch.setattr(torchrun, "_parent", os.getpid() if parent == "this process" else parent)
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: killed.append(process))
    torchrun.kill()
    assert not killed


def test_the_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert [rank for rank in range(9) if torchrun.is_here(rank)] == [4, 5, 6]


FLOODED = """
import sys
from provider.shards import torchrun
from tests.waiting import until
torchrun.limit_memory(64 << 20)
kept = []
try:
    for _ in range(1024):
        kept.append(bytes(1 << 20))
except MemoryError:
    sys.exit(len(kept))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is used")
def test_data_sent_to_a_store_cannot_fill_the_memory() -> None:
    megabytes = subprocess.run([sys.executable, "-c", FLOODED], check=False, timeout=60).returncode
    assert 40 <= megabytes <= 64
