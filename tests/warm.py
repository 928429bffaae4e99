"""Start Python processes as forks of one process that has imported torch, transformers and peft already.

`Popen` and `run` are those of `subprocess`, for commands that run Python: `[sys.executable, "-m", MODULE, ...]`, a
script or `-c`. The first use starts the parent of the forks, which the workers of pytest-xdist share; these are forks,
too. The parent imports `LIBRARIES` and a provider's modules, and starts no thread. It imports no module of a tenant, so
that no fork has a copy of a tenant's object (rule 12). At its end a fork joins its threads, runs its exit handlers and
exits without freeing the modules. A fork needs some tenths of a second of CPU for that, and a new process two to five
seconds. Modules (`-m`) that a fork starts, such as the providers of a demo, are forks of the same parent. A provider
and torchrun have spare forks, which become the processes that they start. `ForkServer` makes `multiprocessing`'s fork
server a fork.

Tests of how a process starts or ends (`--help` without torch, rule 12, a script that closes nothing) start new
processes.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
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
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.data",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.t5.modeling_t5",
    "transformers.conversion_mapping",
    "transformers.generation",
    "transformers.trainer",
    "peft.utils.transformers_weight_conversion",
    "cryptography.hazmat.backends.openssl",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "cryptography.hazmat.primitives.serialization.ssh",
    "cryptography.x509",
    "fastapi",
    "hypothesis",
    "jinja2",
    "llguidance",
    "msgspec",
    "numpy.typing",
    "openai",
    "prometheus_client",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "sqlite3",
    "sse_starlette",
    "tomllib",
    "typer",
    "uvicorn",
    "zmq",
)
PROVIDER = ("provider.config.provider_toml", "provider.registry.server", "provider.serve", "provider.shards.sharded")
ADDRESS = "SYMBIOSIS_PRIV_TESTS_WARM"
"""The environment variable that names the socket of a running parent, which then is used."""

_NUMBER = struct.Struct("=i")
_REQUEST_BYTES = 1 << 20
_STANDARD = 3  # stdin, stdout, stderr
_PASSED = 8  # other files that a fork gets at most
_HIGH = 900  # no file of a new fork has this number or a larger one
CHILDREN = "SYMBIOSIS_PRIV_TESTS_CHILDREN"
"""The environment variable that says how many processes a provider starts as forks. torchrun starts all ranks so."""

_MMAP_THRESHOLD = -3  # a parameter of mallopt(3)
_NewProcess = subprocess.Popen


class Popen(_NewProcess[Any]):
    """A fork of the parent, or an ordinary process if `arguments` do not run Python."""

    _status: int | None = None  # a pipe: the process id, and later the exit status
    _nested = True  # modules that the fork starts are forks, too

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = inspect.signature(_NewProcess._execute_child).bind(self, *given, **named).arguments  # type: ignore[attr-defined]
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
            "nested": self._nested,
            "passed": list(call["pass_fds"]),
        }
        self._send(json.dumps(request).encode(), [*standard, *call["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _send(self, request: bytes, files: list[int]) -> None:
        self._status, end = os.pipe()
        try:
            socket.send_fds(_parent(), [request], [*files, end])
        finally:
            os.close(end)
        weakref.finalize(self, os.close, self._status)
        self.pid = self._read()

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


class Worker(Popen):
    """A worker of pytest-xdist. Its tests decide which processes are forks."""

    _nested = False


class _NestedPopen(Popen):
    """Replaces `subprocess.Popen` in a fork. A provider's own processes are its children, as which they are found: its
    spare forks, or ordinary processes if it has none."""

    spares: ClassVar[list[tuple[int, socket.socket]]] = []  # process id, and where to send the request

    def _execute_child(self, *given: Any, **named: Any) -> None:
        words = given[0]
        if isinstance(words, list | tuple) and "-m" in words[1:3] and (self.spares or not _stays_child(words)):
            super()._execute_child(*given, **named)
        else:
            _NewProcess._execute_child(self, *given, **named)  # type: ignore[attr-defined]

    def _send(self, request: bytes, files: list[int]) -> None:
        if _stays_child(json.loads(request)["words"]):
            self.pid, connection = self.spares.pop(0)
            with connection:
                socket.send_fds(connection, [request], files)
        else:
            super()._send(request, files)


def _stays_child(words: Sequence[str]) -> bool:
    return any("provider.processes." in word for word in words)


class ForkServer(forkserver.ForkServer):
    """The server of `multiprocessing`'s start method "forkserver", as a fork. It ends with this process."""

    def __init__(self) -> None:
        super().__init__()
        self._server: Popen | None = None
        self._starting = threading.Lock()

    def ensure_running(self) -> None:
        with self._starting:
            if self._server is None:
                resource_tracker.ensure_running()
                with mock.patch("multiprocessing.util.spawnv_passfds", self._spawn):
                    super().ensure_running()

    def _spawn(self, path: str, words: list[str], files: list[int]) -> int:
        self._server = Popen([sys.executable, *words[words.index("-c") :]], pass_fds=files)
        self._server.returncode = 0  # nothing waits for its end
        return self._server.pid


_address: str | None = os.environ.get(ADDRESS)
_requests: socket.socket | None = None
_starting = threading.Lock()


def start() -> str:
    """Start the process whose forks are the warm processes, unless it runs. Returns the address of its socket."""
    global _address
    if _address is None:
        folder = tempfile.mkdtemp(prefix="warm-")
        _address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(_address)
            listener.listen()
            parent = _NewProcess(
                [sys.executable, __file__, str(listener.fileno()), _address],
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.PIPE,  # the parent ends when it closes
                start_new_session=True,
            )
        atexit.register(_end, parent, folder)
    return _address


def _parent() -> socket.socket:
    """A connection to the parent."""
    global _requests
    with _starting:
        if _requests is None:
            _requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            atexit.register(_requests.close)
            _requests.connect(start())
        return _requests


def _end(parent: subprocess.Popen[bytes], folder: str) -> None:
    assert parent.stdin is not None
    parent.stdin.close()
    parent.wait(20)
    shutil.rmtree(folder)


# In the parent


def _forked_with(listener: socket.socket) -> dict[str, Any]:
    """Fork for every request, and report exit statuses. Returns in each fork, with its request."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    clients: list[socket.socket] = []
    data, files = b"", list[int]()
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), listener, awake, *clients], [], [])
        if sys.stdin.fileno() in ready:
            os._exit(0)
        if awake in ready:
            os.read(awake, 4096)
            _report(statuses)
        if listener in ready:
            clients.append(listener.accept()[0])
        if not (asking := [client for client in clients if client in ready]):
            continue
        data, files, _, _ = socket.recv_fds(asking[0], _REQUEST_BYTES, _STANDARD + _PASSED + 1)
        if not data:
            clients.remove(asking[0])
            asking[0].close()
            continue
        pid = os.fork()
        if not pid:
            break
        statuses[pid] = files.pop()
        for file in files:
            os.close(file)
        _tell(statuses[pid], pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for opened in (listener, *clients):
        opened.close()
    for file in (awake, wake, files.pop(), *statuses.values()):
        os.close(file)
    return _request(data, files)


def _request(data: bytes, files: list[int]) -> dict[str, Any]:
    """The request of this fork, which gets its standard input, output and error, and the files that are passed."""
    request: dict[str, Any] = json.loads(data)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip([*range(_STANDARD), *request.pop("passed")], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    return request


def _with_spares(request: dict[str, Any]) -> dict[str, Any]:
    """Fork for every child that this process will have. Returns the request of this process, and in each fork its
    own."""
    ranks = re.search(r"provider\.processes\.launch .*--nproc-per-node[= ](\d+)", " ".join(request["words"]))
    children = request["environment"].pop(CHILDREN, 0)
    for _ in range(int(ranks[1] if ranks else children)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for opened in (ours, *(connection for _, connection in _NestedPopen.spares)):
                opened.close()
            _NestedPopen.spares.clear()
            with theirs:
                data, files, _, _ = socket.recv_fds(theirs, _REQUEST_BYTES, _STANDARD + _PASSED)
            if not data:  # the parent has ended
                os._exit(0)
            return _with_spares(_request(data, files))
        theirs.close()
        _NestedPopen.spares.append((pid, ours))
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


def _become(*, words: list[str], environment: dict[str, str], folder: str, session: bool, nested: bool) -> None:
    """Run a command line like `python WORDS`."""
    if nested:
        for module in [known for known in sys.modules.values() if vars(known).get("Popen") is _NewProcess]:
            module.Popen = _NestedPopen  # type: ignore[attr-defined]
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if threshold := environment.get("MALLOC_MMAP_THRESHOLD_"):  # the C library reads it when a new process starts
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, int(threshold))
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


def main() -> None:
    """Run the parent of the forks; and each fork, until it ends."""
    global _address
    gc.disable()
    for name in LIBRARIES + PROVIDER:
        importlib.import_module(name)
    # compiles a thousand regular expressions, which every process that loads a model needs
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    inspect.getmodule(inspect.currentframe(), "none")  # fills a table that torch reads for each registered operator
    for library in list(vars(weakref.finalize)["_registry"]):
        library.atexit = False  # torch removes each registered operator, which takes a tenth of a second
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    gc.enable()
    _address = sys.argv[2]
    request = _with_spares(_forked_with(socket.socket(fileno=int(sys.argv[1]))))
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
