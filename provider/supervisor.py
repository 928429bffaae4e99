"""Keeps an executor running, as a thread or as a child process, and lets the gateway's threads ask it.

Either kind counts its executor's ends in `generation`: a thread that waits for an answer notices that the
executor it asked is gone, and tells its tenant to ask again (`BUSY`) instead of waiting for nothing, as it tells
everybody while the next one starts: a tenant may know another provider. A guard asks the executor how it is: a process
that gives no answer for too long is killed, and started again like one that died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
import zmq

from provider import envelope, logs
from provider.admission import Refusal
from provider.config import INPROC, RANKS_VARIABLE, ProviderConfig, to_json
from provider.envelope import Ask, Envelope, ExecutorReport
from provider.executor import build
from provider.lines import Answer, Context, Line, LocalInbox, SocketLine
from symbiosis_priv import start, wire
from symbiosis_priv.errors import ConfigError, RankLostError

log = logs.EventLog(__name__)

_WATCH_S = 0.1  # how often a waiting thread looks whether its executor still lives
_GUARD_S = 1.0  # how often it is asked how it is
_FRESH_S = 0.25  # of what the executor says about itself
_FIRST_BACKOFF_S = 0.5  # so that a start that fails is not tried again before it is reported
_MAX_BACKOFF_S = 5.0
_LONG_LIFE_S = 10 * _MAX_BACKOFF_S
_STARTUP_S = 300.0
_GRACE_S = 1.0  # for the executor's own word that it is late, which comes after the slice that it is at
_LOOPBACK = "lo"
_NOTHING = memoryview(b"")
_SPARE_SOCKETS = 64  # the executor's own, and of connections that are being told that there are too many


class ExecutorHandle(ABC):
    """A running executor, seen from the gateway.

    Args:
        config: the provider's.
        model_digest: what it must serve, also when it is started again.
    """

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        self.config = config
        self.model_digest = model_digest
        self.generation = 0
        self.hangs = 0
        self._answered = -1  # the last generation that has
        self.stopping = threading.Event()
        self._guard = threading.Thread(target=self._run_guard, name="executor-guard", daemon=True)

    @property
    def present(self) -> bool:
        """Whether the executor has answered since it was started last, and has not ended."""
        return self._answered == self.generation

    @abstractmethod
    def start(self) -> None:
        """Start; returns when the executor answers. Raises what it failed with."""

    @abstractmethod
    def stop(self, timeout: float) -> None:
        """Stop, after the gateway has. Does nothing to an executor that was not started."""

    @abstractmethod
    def line(self) -> Line:
        """For one of the gateway's threads."""

    def close(self) -> None:  # noqa: B027 - not every kind has something left
        """After `stop`, when every line is closed."""

    @abstractmethod
    def _hung(self) -> None:
        """It does not answer any more."""

    def _run_guard(self) -> None:
        while not self.stopping.wait(_GUARD_S):
            generation, settings = self.generation, self.config.executor
            patience = settings.hang_timeout_s + (settings.group_timeout_s if settings.ranks > 1 else 0.0)
            if not self.present:  # one that starts may take its time
                patience = max(patience, _STARTUP_S)
            if self._answers(within=patience):
                self._answered = generation
            elif generation == self.generation and not self.stopping.is_set():
                self.hangs += 1
                log.warning("executor_hangs", seconds=round(patience, 1))
                self._hung()

    def _answers(self, *, within: float) -> bool:
        """Whether it says how it is in time. It may be started again meanwhile, or stopped: then it does not."""
        generation, deadline = self.generation, time.monotonic() + within
        with contextlib.closing(self.line()) as line:
            line.send(Ask())
            while line.receive(_WATCH_S) is None:
                if time.monotonic() > deadline or generation != self.generation or self.stopping.is_set():
                    return False
        return True


class ThreadExecutor(ExecutorHandle):
    """An executor in a thread of this process. One that hangs is reported, and `/readyz` fails: nobody can kill it."""

    _thread: threading.Thread | None = None

    def start(self) -> None:
        """See `ExecutorHandle.start`."""
        self._inbox = LocalInbox()
        self._executor = build(self.config, model_digest=self.model_digest, inbox=self._inbox)
        self._answered = self.generation
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()
        self._guard.start()

    def stop(self, timeout: float) -> None:
        """See `ExecutorHandle.stop`."""
        self.stopping.set()
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._executor.stop()
        self._thread.join(timeout)
        self._guard.join()

    def line(self) -> Line:
        """See `ExecutorHandle.line`."""
        return self._inbox.line()

    def _hung(self) -> None:
        pass

    def _run(self) -> None:
        if self.config.executor.threads:
            torch.set_num_threads(self.config.executor.threads)
        try:
            self._executor.run()
        except RankLostError as error:
            log.warning("rank_lost", reason=str(error))
            os._exit(1)  # this is a rank itself: torchrun starts the group again
        except Exception as error:
            log.failure("executor_failed", error)
        finally:
            self.generation += 1


class ProcessExecutor(ExecutorHandle):
    """An executor in a child process, started again whenever it ends."""

    _watcher: threading.Thread | None = None

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        super().__init__(config, model_digest=model_digest)
        self.endpoint = config.executor.endpoint
        self._context: Context = zmq.Context()
        wanted = config.limits.max_connections + _SPARE_SOCKETS
        self._context.set(zmq.MAX_SOCKETS, min(wanted, self._context.get(zmq.SOCKET_LIMIT)))

    def line(self) -> Line:
        """See `ExecutorHandle.line`."""
        return SocketLine(self._context, self.endpoint)

    def close(self) -> None:
        """See `ExecutorHandle.close`."""
        self._context.term()

    def start(self) -> None:
        """See `ExecutorHandle.start`."""
        path = Path(self.endpoint.removeprefix("ipc://"))
        _private_folder(path.parent)
        _require_unused(path)
        self._process = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name="executor-watch", daemon=True)
        self._watcher.start()
        with ExecutorClient(self) as client:
            try:
                client.report(deadline=time.monotonic() + _STARTUP_S)
            except Refusal as error:
                raise ConfigError("the executor's process ended at once; its reason is in the log above") from error
            self._answered = client.generation
        self._guard.start()

    def stop(self, timeout: float) -> None:
        """See `ExecutorHandle.stop`."""
        self.stopping.set()
        if self._watcher is None:
            return
        _close_pipe(self._process)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
        self._watcher.join(timeout)
        if self._guard.ident is not None:
            self._guard.join()

    @property
    def pid(self) -> int:
        """Of the present child."""
        return self._process.pid

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(start.command("provider.executor"), stdin=subprocess.PIPE)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at birth: the watcher sees that
            process.stdin.write(to_json(self.config) + b"\n" + self.model_digest.encode() + b"\n")
            process.stdin.flush()
        return process

    def _kill(self) -> None:
        self._process.kill()

    def _hung(self) -> None:
        self._kill()

    def _watch(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            born = time.monotonic()
            status = self._process.wait()
            was_present = self.present
            self.generation += 1
            _close_pipe(self._process)
            if was_present and time.monotonic() - born > _LONG_LIFE_S:
                backoff = 0.0  # it can be started, and everybody waits
            log.info("executor_ended", status=status)
            if self.stopping.wait(backoff):
                return
            backoff = min(max(_FIRST_BACKOFF_S, 2 * backoff), _MAX_BACKOFF_S)
            self._process = self._spawn()
            if self.stopping.is_set():  # `stop` may have closed the pipe of the one before
                _close_pipe(self._process)
            log.info("executor_restarted", pid=self._process.pid)


class GroupExecutor(ProcessExecutor):
    """A group of ranks that hold the model together, started by torchrun and started again whenever one ends."""

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        self._folder: str | None = None
        if config.executor.endpoint == INPROC:
            self._folder = tempfile.mkdtemp(prefix="ranks-")  # for this user only
            executor = msgspec.structs.replace(config.executor, endpoint=f"ipc://{self._folder}/executor.sock")
            config = msgspec.structs.replace(config, executor=executor)
        super().__init__(config, model_digest=model_digest)

    def stop(self, timeout: float) -> None:
        """See `ExecutorHandle.stop`."""
        super().stop(timeout)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = self.config.executor
        threads = settings.threads or os.cpu_count() or 1
        environment = {
            **os.environ,
            RANKS_VARIABLE: f"{self.model_digest} {to_json(self.config).decode()}",
            "OMP_NUM_THREADS": str(max(1, threads // settings.ranks)),
            "GLOO_SOCKET_IFNAME": _LOOPBACK,  # torch.distributed authenticates nobody
            "NCCL_SOCKET_IFNAME": _LOOPBACK,
        }
        torchrun = start.command("provider.launch", f"--nproc-per-node={settings.ranks}")
        command = [*torchrun, *start.command("provider.ranks")[1:]]
        # stdin reaches rank 0, which ends with it; signals of a terminal are the gateway's to handle
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def make(config: ProviderConfig, *, model_digest: str) -> ExecutorHandle:
    """The kind of executor that the configuration asks for."""
    kind: type[ExecutorHandle] = ThreadExecutor if config.executor.endpoint == INPROC else ProcessExecutor
    if config.executor.ranks > 1 and not dist.is_initialized():  # else this is rank 0 of a group already
        kind = GroupExecutor
    return kind(config, model_digest=model_digest)


class ExecutorClient:
    """One gateway thread's line to the executor: one request at a time, always with a deadline.

    Every request gets one answer, also one that was cancelled or is late, unless its executor is lost. Until then the
    executor may hold the request's memory.
    """

    def __init__(self, handle: ExecutorHandle) -> None:
        self._handle = handle
        self._line = handle.line()
        self._generation = handle.generation
        self._owed = False  # an answer

    @property
    def generation(self) -> int:
        """Of the executor that was asked last."""
        return self._generation

    def __enter__(self) -> ExecutorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def require_present(self) -> None:
        """Raises `Refusal` BUSY while the executor is being started again."""
        if not self._handle.present:
            self._give_up("the executor is being started again; ask again later")

    def send(self, message: Envelope, payload: memoryview = _NOTHING) -> None:
        """Send a request; `receive` its answer."""
        if self._owed:
            self._reconnect()
        self._generation = self._handle.generation
        self._owed = True
        self._line.send(message, payload)

    def receive(self, *, deadline: float, gone: Callable[[], bool] = lambda: False) -> Answer:
        """The answer.

        Args:
            deadline: by `time.monotonic()`; the executor keeps it too, and answers that it is late.
            gone: whether nobody waits for the answer any more: then it is cancelled, and comes soon.

        Raises:
            Refusal: BUSY if the executor died or does not even say that it is late, STOPPING if the provider is.
        """
        cancelled = False
        while (answer := self._receive()) is None:
            if self._lost:
                self._reconnect()
                self._give_up("the executor was lost; ask again")
            if not cancelled and gone():
                self.cancel()
                cancelled = True
            if time.monotonic() > deadline + _GRACE_S:
                self._give_up("the executor is late; ask again later")
        return answer

    def report(self, *, deadline: float) -> ExecutorReport:
        """What the executor says about itself. Raises what `receive` does."""
        self.send(Ask())
        answer = self.receive(deadline=deadline - _GRACE_S)  # nobody says that a report is late
        return msgspec.json.decode(answer.payload, type=ExecutorReport)

    def settle(self) -> None:
        """Return when the executor holds nothing of the last request: it has answered, or it is no more."""
        while self._owed:
            if self._receive() is None and (self._lost or self._handle.stopping.is_set()):
                self._reconnect()

    @property
    def _lost(self) -> bool:
        return self._handle.generation != self._generation

    def _receive(self) -> Answer | None:
        answer = self._line.receive(_WATCH_S)
        if answer is not None:
            self._owed = False
        return answer

    def cancel(self) -> None:
        """Say that nobody waits for the answer any more; it still comes, soon."""
        self._line.send(envelope.Cancel())

    def _give_up(self, detail: str) -> NoReturn:
        stopping = self._handle.stopping.is_set()
        raise Refusal(wire.ErrorCode.STOPPING if stopping else wire.ErrorCode.BUSY, detail)

    def _reconnect(self) -> None:
        # A late answer must not be taken for the next one's: it goes to a line that is no more.
        self._owed = False
        self._line.close()
        self._line = self._handle.line()


class Condition:
    """What the executor said last about itself, for whoever asks for health: no number of askers has it say so more
    often than once in a while, as nobody's share is charged for that. Thread-safe.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._said: tuple[float, ExecutorReport] | None = None

    def report(self, executor: ExecutorClient, *, timeout: float) -> ExecutorReport:
        """The report, a moment old at most; `executor` is the asker's own. Raises what its `receive` does."""
        executor.require_present()
        deadline = time.monotonic() + timeout
        if not self._asking.acquire(timeout=timeout):
            raise Refusal(wire.ErrorCode.BUSY, "the executor is late; ask again later")
        try:
            if self._said is None or time.monotonic() - self._said[0] > _FRESH_S:
                self._said = time.monotonic(), executor.report(deadline=deadline)
            return self._said[1]
        finally:
            self._asking.release()


def _private_folder(path: Path) -> None:
    """Make the folder of the socket, for this user only; what another user could enter is refused."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.geteuid():  # another user's would let root in as well
        raise ConfigError(f"endpoint: others may enter {path}; choose a new folder for the socket, or chmod 700 it")


def _require_unused(path: Path) -> None:
    """ZeroMQ would take the socket away from whoever listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        if not probe.connect_ex(str(path)):
            raise ConfigError(f"endpoint: another provider listens at {path}; choose another path")


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
