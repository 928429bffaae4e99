"""Start Python processes as forks of one process that has imported torch, transformers and peft already.

`Popen` and `run` are those of `subprocess`, for commands that run Python: `[sys.executable, "-m", MODULE, ...]`, a
script or `-c`. The first use starts the parent of the forks. The parent imports `LIBRARIES`, none of this project's
modules, and starts no thread. So each fork imports this project's modules itself, and no object of them was copied by a
fork (rule 12). At its end a fork joins its threads, runs its exit handlers and exits without freeing the modules. A
fork needs some tenths of a second of CPU for that, and a new process two to five seconds.

Tests of how a process starts or ends (`--help` without torch, rule 12, a script that closes nothing) start new
processes.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.utils.data",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "transformers.trainer",
    "peft",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "cryptography.hazmat.primitives.serialization.ssh",
    "cryptography.x509",
    "hypothesis",
    "jinja2",
    "msgspec",
    "numpy.typing",
    "prometheus_client",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "sqlite3",
    "tomllib",
    "typer",
    "zmq",
)
_NUMBER = struct.Struct("=i")
_REQUEST_BYTES = 1 << 20
_STANDARD = 3  # stdin, stdout, stderr


class Popen(subprocess.Popen[Any]):
    """A fork of the parent, or an ordinary process if `arguments` do not run Python."""

    _status: int | None = None  # a pipe: the process id, and later the exit status

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given, **named).arguments  # type: ignore[attr-defined]
        words = call["args"]
        if isinstance(words, str) or not words or words[0] != sys.executable or call["shell"]:
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        standard = [number if given < 0 else given for number, given in enumerate(pipes[0:1] + pipes[3::2])]
        environment = os.environ if call["env"] is None else call["env"]
        request = {
            "words": [os.fspath(word) for word in words[1:]],
            "environment": dict(environment),
            "folder": os.fspath(call["cwd"] or Path.cwd()),
            "session": call["start_new_session"],
        }
        self._status, end = os.pipe()
        try:
            socket.send_fds(_parent(), [json.dumps(request).encode()], [*standard, end])
        finally:
            os.close(end)
        weakref.finalize(self, os.close, self._status)
        self.pid = self._read()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _read(self) -> int:
        assert self._status is not None
        data = os.read(self._status, _NUMBER.size)
        if not data:
            raise ChildProcessError("the parent of all forks has ended; its reason is above")
        return int(_NUMBER.unpack(data)[0])

    def _ended(self, timeout: float | None) -> bool:
        assert self._status is not None
        if self.returncode is None:
            select.select([self._status], [], [], timeout)  # without the lock, which `kill` takes in another thread
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                    self.returncode = os.waitstatus_to_exitcode(self._read())
        return self.returncode is not None

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        self._ended(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if not self._ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def run(
    words: Sequence[str | Path], *, capture_output: bool = False, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, output, errors)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


_started: socket.socket | None = None
_starting = threading.Lock()


def _parent() -> socket.socket:
    """The socket for requests to the parent of the forks. The parent ends when this end closes."""
    global _started
    with _starting:
        if _started is None:
            _started, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                parent = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            atexit.register(_end, parent, _started)
        return _started


def _end(parent: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    parent.wait(20)


# In the parent


def _forked_with(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request, and report exit statuses. Returns in each fork, with its request."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _report(statuses)
        if requests.fileno() not in ready:
            continue
        data, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _STANDARD + 1)
        if not data:
            os._exit(0)
        pid = os.fork()
        if not pid:
            break
        for file in files[:_STANDARD]:
            os.close(file)
        statuses[pid] = files[_STANDARD]
        _tell(statuses[pid], pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    for number, file in enumerate(files[:_STANDARD]):
        os.dup2(file, number)
    for file in (awake, wake, *files, *statuses.values()):
        os.close(file)
    request: dict[str, Any] = json.loads(data)
    return request


def _report(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        file = statuses.pop(pid)
        _tell(file, status)
        os.close(file)


def _tell(file: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(file, _NUMBER.pack(number))


def _become(*, words: list[str], environment: dict[str, str], folder: str, session: bool) -> None:
    """Run a command line like `python WORDS`."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    sys.path[0] = ""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Run the parent of the forks; and each fork, until it ends."""
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    gc.enable()
    request = _forked_with(socket.socket(fileno=int(sys.argv[1])))
    status: Any = 0
    try:
        _become(**request)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
