"""Keeps an executor running: as a thread, as a child process, or as a group of ranks.

The supervisor restarts a process that has ended, and kills and restarts a process that hangs. Messages to another
process pass through a private `ipc://` socket of ZeroMQ.
"""

import contextlib
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

import torch
import torch.distributed as dist
import zmq

from provider import logs
from provider.config.schema import RANKS_VARIABLE, ProviderConfig, to_json
from provider.executor import queues
from provider.executor.client import STARTUP_S, ExecutorHandle
from provider.executor.executor import build
from provider.refusal import Refusal
from provider.shards.rank_group import FOLDER_VARIABLE
from symbiosis_priv.errors import ConfigError, DeviceLostError, RankLostError
from symbiosis_priv.system.files import PrivateFolder
from symbiosis_priv.system.pacing import Backoff

log = logs.EventLog(__name__)

_FIRST_BACKOFF_S = 0.5  # a failed start is reported before the next attempt
_MAX_BACKOFF_S = 5.0
_LONG_LIFE_S = 10 * _MAX_BACKOFF_S
Context = zmq.Context[zmq.Socket[bytes]]
_POSTS = "inproc://executor"  # carries the messages of `SocketInbox.post`
_LINGER_MS = 1000
_ROWS_BYTES = 4
_SPARE_SOCKETS = 64  # for the executor itself, and for connections above the limit while they are refused


class ExecutorThread(ExecutorHandle):
    """An executor in a thread of this process. If an error ends it, another one takes its place. A thread cannot be
    killed: if it hangs, `/readyz` fails."""

    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._build()
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()
        self._ask(STARTUP_S)
        self._guard.start()

    def stop(self, timeout: float) -> None:
        self.stopping.set()
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._executor.stop()
        self._thread.join(timeout)
        self._guard.close(timeout)

    def open_pipe(self) -> queues.RequestPipe:
        return self.inbox.open_pipe()

    def _build(self) -> None:
        self.inbox = queues.LocalInbox()
        self._executor = build(self.config, model_digest=self.model_digest, inbox=self.inbox)

    def _run(self) -> None:
        if self.config.executor.threads:
            torch.set_num_threads(self.config.executor.threads)
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while self._ended_by_error():
            log.warning("executor_restarts")
            if self.stopping.wait(backoff.failed()):
                return

    def _ended_by_error(self) -> bool:
        """Run the executor until it ends. Returns True if an error has ended it, and another one is in its place."""
        try:
            self._executor.run()
            return False
        except (RankLostError, DeviceLostError) as error:
            log.warning("rank_lost" if isinstance(error, RankLostError) else "device_lost", reason=str(error))
            os._exit(1)  # torchrun restarts a rank's group; no thread of this process can use a lost device again
        except Exception as error:
            log.failure("executor_failed", error)
            # the other ranks wait for this one, and a GPU has no room for the same weights again
            if dist.is_initialized() or self.config.executor.device != "cpu":
                os._exit(1)
            try:
                self._build()
            except Exception as again:
                log.failure("executor_failed", again)
                os._exit(1)  # a process that serves nothing must not live: whoever watches it starts it again
            return True
        finally:
            self.generation += 1


class SocketInbox(queues.Inbox):
    """The inbox of an executor whose senders are in another process. Raises `ConfigError`: the path cannot be used."""

    def __init__(self, endpoint: str) -> None:
        self._context: Context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = _LINGER_MS
        try:
            for address in (endpoint, _POSTS):
                self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{endpoint}: {error.strerror}; set TMPDIR to a folder with a short path") from error

    def arrived(self) -> Iterator[queues.InboxMessage]:
        receive = self._router.recv  # part by part: faster than `recv_multipart`
        while int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, head, payload = receive(), receive(), receive(copy=False)
            yield queues.InboxMessage(sender, queues.decode(head), payload.buffer)

    def wait(self, seconds: float | None) -> None:
        if not int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:  # ZeroMQ's timeouts are whole milliseconds: too long
            select.select([self._router.fileno()], [], [], seconds)

    def answer(self, answers: Sequence[queues.AddressedAnswer]) -> None:
        for sender, answer in answers:
            assert isinstance(sender, bytes)
            self._router.send(sender, zmq.SNDMORE)
            self._router.send(answer.failure, zmq.SNDMORE)
            self._router.send(answer.rows.to_bytes(_ROWS_BYTES, "big"), zmq.SNDMORE)
            self._router.send(answer.payload, copy=False)

    def post(self, message: queues.Envelope) -> None:
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as dealer:  # the inbox may be closed
            dealer.linger = _LINGER_MS
            dealer.connect(_POSTS)
            dealer.send(queues.encode(message), zmq.SNDMORE)
            dealer.send(b"")

    def close(self) -> None:
        self._router.close()
        self._context.term()


class SocketPipe(queues.RequestPipe):
    """A pipe to an executor in another process."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.reconnect_ivl = 20
        self._dealer.connect(endpoint)
        self._arrival = select.poll()  # `select.select` takes no descriptor above 1023, and connections use more
        self._arrival.register(self._dealer.fileno(), select.POLLIN)

    def send(self, message: queues.Envelope, payload: memoryview = queues.NOTHING) -> None:
        self._dealer.send(queues.encode(message), zmq.SNDMORE)
        self._dealer.send(payload, copy=False)

    def receive(self, seconds: float) -> queues.ExecutorAnswer | None:
        until = time.monotonic() + seconds
        while not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._arrival.poll(1000 * left)
        failure, rows = self._dealer.recv(), self._dealer.recv()
        return queues.ExecutorAnswer(failure, self._dealer.recv(copy=False).buffer, int.from_bytes(rows, "big"))

    def close(self) -> None:
        self._dealer.close()


class ExecutorProcess(ExecutorHandle):
    """An executor in a child process, which is restarted whenever it ends."""

    _watcher: threading.Thread | None = None

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        super().__init__(config, model_digest=model_digest)
        self._folder = Path(tempfile.mkdtemp(prefix="executor-"))  # for this user only
        self.endpoint = f"ipc://{self._folder}/executor.sock"
        self._context: Context = zmq.Context()
        wanted = config.limits.max_connections + _SPARE_SOCKETS
        self._context.set(zmq.MAX_SOCKETS, min(wanted, self._context.get(zmq.SOCKET_LIMIT)))

    def open_pipe(self) -> queues.RequestPipe:
        return SocketPipe(self._context, self.endpoint)

    def close(self) -> None:
        self._context.term()

    def start(self) -> None:
        PrivateFolder.open(self._folder).close()  # whoever can replace it can put another executor in its place
        self._process = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name="executor-watch", daemon=True)
        self._watcher.start()
        try:
            self._ask(STARTUP_S)
        except Refusal as error:
            raise ConfigError("the executor's process did not start: read the reason in the log") from error
        self._guard.start()

    def stop(self, timeout: float) -> None:
        self.stopping.set()
        if self._watcher is not None:
            _close_pipe(self._process)
            try:
                self._process.wait(timeout)
            except TimeoutExpired:
                self._process.kill()
            self._watcher.join(timeout)
            self._guard.close(timeout)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self) -> Popen[bytes]:
        process = Popen([sys.executable, "-m", "provider.processes.executor_process"], stdin=PIPE)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `_watch` notices that
            process.stdin.write(self.message().encode())
            process.stdin.flush()
        return process

    def message(self) -> str:
        """What the process is told, in a line each: the configuration, the model's digest and the socket."""
        return f"{to_json(self.config).decode()}\n{self.model_digest}\n{self.endpoint}\n"

    def _on_hang(self) -> None:
        self._process.kill()

    def _watch(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            born = time.monotonic()
            status = self._process.wait()
            was_present = self.present
            self.generation += 1
            _close_pipe(self._process)
            if was_present and time.monotonic() - born > _LONG_LIFE_S:
                backoff.succeeded()  # the executor ran for long, so it will start again, and tenants wait
                pause_s = 0.0
            else:
                pause_s = backoff.failed()
            log.info("executor_ended", status=status)
            if self.stopping.wait(pause_s):
                return
            while True:
                try:
                    self._process = self._spawn()
                    break
                except Exception as error:  # for example no process, descriptor or memory was free
                    log.failure("executor_not_started", error)
                if self.stopping.wait(backoff.failed()):
                    return
            if self.stopping.is_set():  # `stop` may have closed the pipe of the previous process
                _close_pipe(self._process)
            log.info("executor_restarted", pid=self._process.pid)


class ExecutorGroup(ExecutorProcess):
    """A group of ranks that share the model. torchrun starts the group; the group restarts whenever a rank ends."""

    def _spawn(self) -> Popen[bytes]:
        rendezvous = self._folder / "rendezvous"
        shutil.rmtree(rendezvous, ignore_errors=True)  # the folder of the previous group
        rendezvous.mkdir(mode=0o700)
        ranks, threads = self.config.executor.ranks, self.config.executor.threads or os.cpu_count() or 1
        command = [sys.executable, "-m", "provider.processes.launch", f"--nproc-per-node={ranks}"]
        command += ["-m", "provider.processes.rank"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, threads // ranks)),
            "GLOO_SOCKET_IFNAME": "lo",  # torch.distributed does not authenticate
            "NCCL_SOCKET_IFNAME": "lo",
            RANKS_VARIABLE: self.message(),
            FOLDER_VARIABLE: str(rendezvous),
        }
        # Rank 0 inherits stdin and ends when it closes. The new session keeps a terminal's signals from the ranks.
        return Popen(command, stdin=PIPE, env=environment, start_new_session=True)


def make(config: ProviderConfig, *, model_digest: str) -> ExecutorHandle:
    """Make the kind of executor that the configuration asks for."""
    kind: type[ExecutorHandle] = ExecutorProcess if config.executor.own_process else ExecutorThread
    if config.executor.ranks > 1 and not dist.is_initialized():  # otherwise this process is rank 0 of a group
        kind = ExecutorGroup
    handle = kind(config, model_digest=model_digest)
    handle.narrow = config.executor.device != "cpu" and config.executor.ranks == 1 and not dist.is_initialized()
    return handle


def _close_pipe(process: Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
