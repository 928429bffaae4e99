"""Child processes: answers, errors, and their end with their parent; processor time and memory; low priority."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError, DeadlineExceededError, SymbiosisError
from tenant.bench.processes import Child
from tests.waiting import until

TIMEOUT_S = 60.0


@contextmanager
def serve_division(dividend: float) -> Iterator[Callable[[float], float]]:
    if not dividend:
        raise ConfigError("nothing to divide")
    yield lambda divisor: dividend / divisor


@contextmanager
def serve_sleep() -> Iterator[Callable[[float], int]]:
    def sleep(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    yield sleep


@contextmanager
def serve_death() -> Iterator[Callable[[None], None]]:
    yield lambda _: os._exit(7)


def test_a_child_answers_until_it_is_closed() -> None:
    with Child("division", serve_division, 6.0) as child:
        assert [child.ask(divisor, timeout_s=TIMEOUT_S) for divisor in (2.0, 3.0)] == [3.0, 2.0]
        assert Path(f"/proc/{child.pid}").exists()
    assert not Path(f"/proc/{child.pid}").exists()


def test_errors_of_a_child_are_quoted() -> None:
    with Child("bug", serve_division, 1.0) as bug, pytest.raises(SymbiosisError, match=r"(?s)'bug'.*ZeroDivisionError"):
        bug.ask(0.0, timeout_s=TIMEOUT_S)
    with Child("start", serve_division, 0.0) as start, pytest.raises(SymbiosisError, match="nothing to divide"):
        start.wait_ready()
    with Child("death", serve_death) as death, pytest.raises(SymbiosisError, match="exit status 7"):
        death.ask(None, timeout_s=TIMEOUT_S)


def test_an_answer_has_a_deadline() -> None:
    child: Child[float, int] = Child("sleep", serve_sleep)
    with pytest.raises(DeadlineExceededError, match="'sleep'"):
        child.ask(TIMEOUT_S, timeout_s=0.05)
    child.close(grace_s=0)
    assert not Path(f"/proc/{child.pid}").exists()


PARENT = """
import signal, time
from tenant.bench.link import serve_proxy
from tenant.bench.processes import Child
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
    with Child("proxy", serve_proxy) as child:
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
