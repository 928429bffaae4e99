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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen

import torch
import zmq

from provider import logs
from provider.config.schema import ProviderConfig, to_json
from provider.executor import queues
from provider.executor.client import STARTUP_S, ExecutorHandle
from provider.executor.executor import build
from provider.refusal import Refusal
from symbiosis_priv.errors import ConfigError, DeviceLostError
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
HEARTBEAT_S = 0.5
_MISSED = 10  # heartbeats


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
        except DeviceLostError as error:
            log.warning("device_lost", reason=str(error))
            os._exit(1)  # no thread of this process can use the device again
        except Exception as error:
            log.failure("executor_failed", error)
            if self.config.executor.device != "cpu":  # a GPU has no room for the same weights again
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
    """An executor in a child process, or in a group of them, the ranks, which share the model (`shards`). When one of
    them ends or stops, all are killed and started again. They end when their stdin closes, and the kernel kills them
    with the thread that has started them: call `start` in one that lives as long.

    **Heartbeats.** A collective of ranks that waits for a stopped one raises no error before its timeout, and its error
    names no rank. So each process sends a byte twice a second. A rank is lost if another one has sent more than ten
    since its own last one: bytes are counted and not seconds, so that a machine that was suspended loses no rank."""

    _watcher: threading.Thread | None = None

    def __init__(self, config: ProviderConfig, *, model_digest: str) -> None:
        super().__init__(config, model_digest=model_digest)
        self._folder = Path(tempfile.mkdtemp(prefix="executor-"))  # for this user only
        self.endpoint = f"ipc://{self._folder}/executor.sock"
        self._processes: list[Popen[bytes]] = []  # by rank
        self._context: Context = zmq.Context()
        wanted = config.limits.max_connections + _SPARE_SOCKETS
        self._context.set(zmq.MAX_SOCKETS, min(wanted, self._context.get(zmq.SOCKET_LIMIT)))

    def open_pipe(self) -> queues.RequestPipe:
        return SocketPipe(self._context, self.endpoint)

    def close(self) -> None:
        self._context.term()

    def start(self) -> None:
        PrivateFolder.open(self._folder).close()  # whoever can replace it can put another executor in its place
        self._spawn()
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
            self._close_lead()
            self._watcher.join(timeout)
            self._on_hang()
            self._watcher.join(timeout)
            self._guard.close(timeout)
        if self._watcher is None or not self._watcher.is_alive():  # else it waits for a process that cannot be killed
            self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def _spawn(self) -> None:
        """Start all processes, where others have ended or were not all started."""
        self._end()
        self._processes = []
        meeting = self._folder / "ranks"
        shutil.rmtree(meeting, ignore_errors=True)
        meeting.mkdir(mode=0o700)
        message = f"{to_json(self.config).decode()}\n{self.model_digest}\n{self.endpoint}\n"
        for rank in range(self.config.executor.ranks):
            command = [sys.executable, "-m", "provider.processes.executor_process", str(rank), str(meeting)]
            # the new session keeps a terminal's signals away
            process = Popen(command, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the process has ended; `_watch` notices that
                process.stdin.write(message.encode())

    def _close_lead(self) -> None:
        """Ask rank 0 to end. It ends the other ranks."""
        for process in self._processes[:1]:  # none if the last attempt to start them has failed
            assert process.stdin is not None
            process.stdin.close()

    def _on_hang(self) -> None:
        for process in self._processes:
            process.kill()

    def _end(self) -> None:
        self._on_hang()
        for process in self._processes:
            with process:  # waits for its end
                pass

    def _wait(self) -> tuple[int, int | None]:
        """Wait until a process has ended or is lost. Returns its rank and its status, None if it is lost."""
        ranks, pipes = dict[int, int](), select.poll()
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            ranks[process.stdout.fileno()] = rank
            pipes.register(process.stdout, select.POLLIN)
        silent: dict[int, Counter[int]] = {}  # by rank: bytes of the others since its last one; none while it starts
        while True:
            for pipe, _ in pipes.poll():
                if not os.read(pipe, _MISSED):
                    return ranks[pipe], self._processes[ranks[pipe]].wait()
                for counts in silent.values():
                    counts[ranks[pipe]] += 1
                silent[ranks[pipe]] = Counter()
            for rank, counts in silent.items():
                if max(counts.values(), default=0) > _MISSED:
                    return rank, None

    def _watch(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            born = time.monotonic()
            rank, status = self._wait()
            was_present = self.present
            self.generation += 1
            self._end()  # the other ranks wait for this one
            if was_present and time.monotonic() - born > _LONG_LIFE_S:
                backoff.succeeded()  # the executor ran for long, so it will start again, and tenants wait
                pause_s = 0.0
            else:
                pause_s = backoff.failed()
            log.info("executor_ended", rank=rank, status="no heartbeat" if status is None else status)
            if self.stopping.wait(pause_s):
                return
            while True:
                try:
                    self._spawn()
                    break
                except Exception as error:  # for example no process, descriptor or memory was free
                    log.failure("executor_not_started", error)
                if self.stopping.wait(backoff.failed()):
                    return
            if self.stopping.is_set():  # `stop` may have closed the pipe of the previous process
                self._close_lead()
            log.info("executor_restarted", pid=self.pids[0])


def make(config: ProviderConfig, *, model_digest: str) -> ExecutorHandle:
    """Make the kind of executor that the configuration asks for."""
    settings = config.executor
    kind = ExecutorProcess if settings.own_process or settings.ranks > 1 else ExecutorThread
    handle = kind(config, model_digest=model_digest)
    handle.narrow = settings.device != "cpu" and settings.ranks == 1
    return handle
