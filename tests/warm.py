"""Start Python processes as forks of one process that has imported torch, transformers and peft already.

`Popen` and `run` are the parts of `subprocess` that the tests use, for commands that run Python:
`[sys.executable, "-m", MODULE, ...]`, a script or `-c`. A fork needs some tenths of a second of CPU, and a new process
two to five seconds.

The first use starts the parent of the forks; the workers of pytest-xdist share it. It imports `LIBRARIES`, starts no
thread, and imports no module of a tenant, so that no fork has a copy of a tenant's object (rule 12). A client opens a
connection for each process: it sends the command and its files, and receives the process id, and later the exit status.
Providers that a fork starts are forks, too; its other processes are ordinary ones. Tests of how a process starts or
ends start new processes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.utils.data"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "gpt2", "llama")),
    *("transformers.conversion_mapping", "transformers.generation", "transformers.trainer", "peft"),
    *("cryptography.x509", "fastapi", "hypothesis", "llguidance", "openai", "prometheus_client", "rich.progress"),
    *("safetensors.torch", "sqlite3", "sse_starlette", "typer", "uvicorn", "zmq"),
    *("provider.config.provider_toml", "provider.registry.server", "provider.serve", "provider.shards.sharded"),
)
ADDRESS = "SYMBIOSIS_PRIV_TESTS_WARM"
"""The environment variable that names the socket of the parent."""

_NUMBER = struct.Struct("=i")
_REQUEST_BYTES = 1 << 20
_HIGH = 900  # no file of a new fork has this number or a larger one
_START_S = 120.0
_NewProcess = subprocess.Popen


class Popen(_NewProcess[Any]):
    """A fork of the parent. It has the public methods of `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str | Path],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        text: bool = False,
        bufsize: int = -1,
        start_new_session: bool = False,
    ) -> None:
        assert args[0] == sys.executable, f"only Python runs in a fork: {args}"
        self.args, self.returncode = args, None
        self._communication_started, self._input, self._sigint_wait_secs = False, None, 0.25  # for `communicate`
        self.text_mode, self.encoding, self.errors = text, None, None
        pipes = list[int]()  # ends of the fork
        own: list[IO[Any] | None] = [None, None, None]
        files: list[int] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            if given == subprocess.PIPE:
                read, write = os.pipe()
                pipes.append(write if number else read)
                mode = ("r" if number else "w") + ("" if text else "b")
                own[number] = os.fdopen(read if number else write, mode, bufsize if number or not text else 1)
                files.append(pipes[-1])
            elif given == subprocess.DEVNULL:
                pipes.append(os.open(os.devnull, os.O_RDWR))
                files.append(pipes[-1])
            elif given == subprocess.STDOUT:
                files.append(files[1])
            elif given is None:
                files.append(number)
            else:
                files.append(given if isinstance(given, int) else given.fileno())
        self.stdin, self.stdout, self.stderr = own
        request = {
            "words": [os.fspath(word) for word in args[1:]],
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or Path.cwd()),
            "session": start_new_session,
        }
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._connection.close)
        self._connection.connect(start())
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        for file in pipes:
            os.close(file)
        self._reading = threading.Lock()
        self._connection.settimeout(_START_S)
        self.pid = self._receive()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        select.select([self._connection], [], [], timeout)  # without the lock, so that another thread can poll
        with self._reading:
            if self.returncode is None:
                if not select.select([self._connection], [], [], 0)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = os.waitstatus_to_exitcode(self._receive())
        return self.returncode

    def _receive(self) -> int:
        data = self._connection.recv(_NUMBER.size)
        if not data:
            raise ChildProcessError("the parent of all forks has ended; its reason is above")
        return int(_NUMBER.unpack(data)[0])


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


class _PopenInFork(_NewProcess[Any]):
    """Replaces `subprocess.Popen` in a fork: providers and registries are forks, and others are ordinary processes."""

    def __new__(cls, args: Any, *given: Any, **options: Any) -> Any:
        forked = isinstance(args, list) and args[:3] == [sys.executable, "-m", "symbiosis_priv.cli"] and not given
        return (Popen if forked else _NewProcess)(args, *given, **options)


_address: str | None = os.environ.get(ADDRESS)
_starting = threading.Lock()


def start() -> str:
    """Start the process whose forks are the warm processes, unless it runs. Returns the address of its socket."""
    global _address
    with _starting:
        if _address is None:
            folder = tempfile.mkdtemp(prefix="warm-")
            _address = f"{folder}/socket"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(_address)
                listener.listen(128)
                parent = _NewProcess(
                    [sys.executable, __file__, str(listener.fileno()), _address],
                    pass_fds=[listener.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                    stdin=subprocess.PIPE,  # the parent ends when it closes
                    start_new_session=True,
                )
            atexit.register(_end, parent, folder)
        return _address


def _end(parent: subprocess.Popen[bytes], folder: str) -> None:
    assert parent.stdin is not None
    parent.stdin.close()
    parent.wait(20)
    shutil.rmtree(folder)


# In the parent


def _forked_with(listener: socket.socket) -> dict[str, Any]:
    """Fork for every connection, and report exit statuses. Returns in each fork, with its request."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), listener, awake], [], [])
        if sys.stdin.fileno() in ready:
            os._exit(0)
        if awake in ready:
            os.read(awake, 4096)
            _report(clients)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        data, files, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 3)
        if not data:  # the client has ended
            client.close()
            continue
        pid = os.fork()
        if not pid:
            break
        for file in files:
            os.close(file)
        clients[pid] = client
        _tell(client, pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for opened in (listener, client, *clients.values()):
        opened.close()
    high = [os.dup2(file, _HIGH + number) for number, file in enumerate(files)]
    for file in (awake, wake, *files):
        os.close(file)
    for number, file in enumerate(high):
        os.dup2(file, number)
        os.close(file)
    request: dict[str, Any] = json.loads(data)
    return request


def _report(clients: dict[int, socket.socket]) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with clients.pop(pid) as client:
            _tell(client, status)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        client.send(_NUMBER.pack(number))


def _become(*, words: list[str], environment: dict[str, str], folder: str, session: bool) -> None:
    """Run a command line like `python WORDS`."""
    subprocess.Popen = _PopenInFork  # type: ignore[misc]
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a library may have asked for the parent's
    os.chdir(folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if words[0] == "-u":
        words = words[1:]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    sys.path[0] = ""
    if words[0] == "-m":
        sys.modules.pop(words[1], None)  # otherwise runpy warns that the parent has imported it
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


def _run(**request: Any) -> int:
    """Run a command line like a process of its own, up to its end. Returns its exit status."""
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
    return int(status) & 0xFF


def main() -> None:
    """Run the parent of the forks; and each fork, until it ends."""
    global _address
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    # compiles a thousand regular expressions, which every process that loads a model needs
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    gc.enable()
    _address = sys.argv[2]
    os._exit(_run(**_forked_with(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
