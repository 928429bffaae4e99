"""Child processes of benchmarks end with their parent. (`test_bench_commands.py` runs the benchmarks.)"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

PARENT = """
import contextlib, signal, time
from tenant.bench.processes import Child
@contextlib.contextmanager
def serve():
    yield print
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
    with Child("child", serve) as child:
        child.wait_ready()
        print(child.pid, flush=True)
        time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
def test_no_child_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        child = Path("/proc") / process.stdout.readline().strip()
        assert child.name != "proc"
        process.send_signal(number)
    until(lambda: not child.exists())
