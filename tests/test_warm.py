"""Forks behave like new processes, and have no module of a tenant from their parent."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

import pytest

from tests.warm import Popen, run


def test_a_fork_has_torch_one_thread_and_no_module_that_holds_a_secret() -> None:
    names = (
        "import os, sys; print(*sys.modules); print(len(os.listdir('/proc/self/task')), *os.listdir('/proc/self/fd'))"
    )
    done = run([sys.executable, "-c", names], capture_output=True, text=True, timeout=100, check=True)
    modules, threads_and_files = done.stdout.splitlines()
    assert {"torch", "provider.serve"} < set(modules.split())
    assert not {name.partition(".")[0] for name in modules.split()}.intersection({"tenant", "threat_model", "tests"})
    assert threads_and_files.split()[0] == "1"
    assert len(threads_and_files.split()) <= 1 + len(("stdin", "stdout", "stderr", "/proc/self/fd"))


@pytest.mark.parametrize(
    ("code", "status", "output", "error"),
    [
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('why')", 1, "", "why"),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "", ""),
        ("import threading, time; threading.Timer(0.1, print, ['late']).start()", 0, "late\n", ""),
    ],
)
def test_a_fork_ends_like_a_process(code: str, status: int, output: str, error: str) -> None:
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (status, output)
    assert error in done.stderr


def test_a_fork_has_its_given_folder_environment_and_input(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:], os.environ, input())")
    command = [sys.executable, "-W", "error", str(tmp_path / "script.py"), "word"]
    with Popen(command, cwd=tmp_path, env={"ONLY": "this"}, stdin=PIPE, stdout=PIPE, text=True) as process:
        with pytest.raises(TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        output, _ = process.communicate("line\n", timeout=60)
    assert output == f"{tmp_path} word environ({{'ONLY': 'this'}}) line\n"
    process.kill()  # it has ended: nothing happens
    assert process.returncode == 0


def test_a_fork_starts_providers_as_forks_and_all_else_as_processes() -> None:
    start = (
        "import sys, subprocess; words = [sys.executable, '-m', {!r}, '--help']; "
        "print(type(subprocess.Popen(words, stdout=subprocess.DEVNULL)).__module__)"
    )
    for module, kind in (("symbiosis_priv.cli", "__main__"), ("json.tool", "subprocess")):
        words = [sys.executable, "-c", start.format(module)]
        assert kind in run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def test_a_fork_can_be_killed_while_another_thread_waits_for_it() -> None:
    with Popen([sys.executable, "-c", "input()"], stdin=PIPE) as process, ThreadPoolExecutor(1) as waiting:
        status = waiting.submit(process.wait)
        with pytest.raises(TimeoutError):
            status.result(0.2)
        process.kill()
        assert status.result(20) == -signal.SIGKILL
