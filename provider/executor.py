"""The executor: takes requests from the gateway's threads, batches them per layer group, computes, replies.

Theory of operation. One thread owns the model and a ROUTER socket. It drains what has arrived, takes the oldest
request, and adds every queued one for the same (group, direction, arithmetic): their rows are flattened to one matrix
without padding, multiplied once, and the product's row slices are sent back as they lie in memory. A helper's
effect is the product of keystream rows, so it joins the ring batch of its group. Ring results do not depend on
what else is in the batch; float results may, within rounding. With nothing to do it loads what nobody has asked for
yet, one small step at a time, so that no tenant waits for the whole of it.

The socket speaks to the gateway's own threads (`inproc://`) or to the gateway's process over a private `ipc://`
socket; requests have been checked by then. A message is `[header, payload]` with the tenant's own header, a reply
`[prefix and header, payload]`, ready for the wire. No request leaves anything behind.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import zmq
from torch import Tensor

from provider import logs
from provider.config import INPROC, ProviderConfig, from_json
from provider.model import ServedModel, open_store
from symbiosis_priv import wire
from symbiosis_priv.errors import CheckpointError, ConfigError, ProtocolError, SymbiosisError
from symbiosis_priv.ring import Direction

log = logs.EventLog(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
Key = tuple[int, Direction, wire.Arithmetic]

_STOP = b""  # an empty header: no tenant's header is, and the gateway forwards nothing else


@dataclass(frozen=True)
class _Job:
    """One request and whom to answer."""

    order: int
    sender: bytes
    request: wire.Execute | wire.Effect
    payload: zmq.Frame

    @property
    def key(self) -> Key:
        return self.request.group, self.request.direction, self.request.arithmetic


@dataclass
class _Queue:
    """Waiting jobs by key, each key in order of arrival."""

    _jobs: dict[Key, deque[_Job]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def put(self, job: _Job) -> None:
        self._jobs.setdefault(job.key, deque()).append(job)

    def take(self, max_rows: int) -> list[_Job]:
        """The oldest job and those that can ride with it."""
        key = min(self._jobs, key=lambda k: self._jobs[k][0].order)
        waiting = self._jobs[key]
        batch = [waiting.popleft()]
        rows = batch[0].request.rows
        while waiting and rows + waiting[0].request.rows <= max_rows:
            rows += waiting[0].request.rows
            batch.append(waiting.popleft())
        if not waiting:
            del self._jobs[key]
        return batch


class Executor:
    """Serves products until stopped.

    Raises ConfigError if it cannot listen at `endpoint`.

    Args:
        model: what to multiply by.
        context: shared with the gateway if `endpoint` is `inproc://`.
        endpoint: where to listen.
        max_batch_rows: rows of several requests in one product; a single larger request runs alone.
        warm_up: load every layer group while there is nothing else to do, not only on first use.
    """

    def __init__(
        self, model: ServedModel, *, context: Context, endpoint: str, max_batch_rows: int, warm_up: bool = False
    ) -> None:
        self._model = model
        self._context = context
        self._max_batch_rows = max_batch_rows
        self._cold: Iterator[None] | None = model.warm_up() if warm_up else None
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        try:
            for address in {endpoint, INPROC}:  # `stop` always comes by the second
                self._router.bind(address)
        except zmq.ZMQError as error:
            self._router.close()
            raise ConfigError(f"endpoint = {endpoint!r}: {error.strerror}; choose another path") from error
        self._queue = _Queue()
        self._requests = 0
        self._stopped = False

    def run(self) -> None:
        """Serve until `stop`; every request that arrived before is answered."""
        with self._router, torch.no_grad():
            while self._queue or not self._stopped:
                self._receive()
                if self._queue:
                    self._run_batch(self._queue.take(self._max_batch_rows))
                elif self._cold and not self._stopped:
                    self._warm_up(self._cold)

    def stop(self) -> None:
        """Ask `run` to end. From any thread."""
        with self._context.socket(zmq.DEALER) as control:
            control.linger = 1000
            control.connect(INPROC)
            control.send_multipart([_STOP, b""])

    def _receive(self) -> None:
        """Take in everything that has arrived; wait only when there is nothing to do."""
        receive = self._router.recv  # part by part: `recv_multipart` takes 5 µs longer, and so does sending so
        while not (self._queue or self._cold or self._stopped) or int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, header, payload = receive(), receive(), receive(copy=False)
            if not header:
                self._stopped = True
                return
            try:
                self._accept(sender, wire.decode_request(header), payload)
            except ProtocolError as error:  # the gateway has checked it, so this is a bug
                log.failure("undecodable_request", error)

    def _accept(self, sender: bytes, request: wire.Request, payload: zmq.Frame) -> None:
        if isinstance(request, wire.Execute | wire.Effect):
            self._requests += 1
            self._queue.put(_Job(self._requests, sender, request, payload))
        elif isinstance(request, wire.Health):
            self._send(sender, self._health())

    def _health(self) -> wire.HealthReport:
        """The executor's part of a report; the gateway, which knows who asks, fills in the rest."""
        return wire.HealthReport(
            name="",
            model_digest="",
            uptime_s=0.0,
            groups=len(self._model.manifest.groups),
            groups_loaded=self._model.groups_loaded,
            requests=0,
            connections=0,
        )

    def _warm_up(self, cold: Iterator[None]) -> None:
        """One step of it."""
        try:
            next(cold)
        except StopIteration:
            self._cold = None
            log.info("warmed_up", groups=self._model.groups_loaded)
        except Exception as error:  # whoever needs that group will be told; the others are loaded when asked for
            self._cold = None
            log.failure("warm_up_failed", error)

    def _run_batch(self, batch: list[_Job]) -> None:
        try:
            group, direction, arithmetic = batch[0].key
            rows = [self._rows(job) for job in batch]
            flat = rows[0] if len(rows) == 1 else torch.cat(rows)
            product = self._model.product(flat, group=group, direction=direction, arithmetic=arithmetic)
        except Exception as error:  # one batch's trouble (memory, a device) is not the next one's
            log.failure("batch_failed", error, group=batch[0].request.group, requests=len(batch))
            failure = wire.Failure(code=wire.ErrorCode.INTERNAL, detail="the executor failed; its operator has a log")
            for job in batch:
                self._send(job.sender, failure)
            return
        parts = product.split([job.request.rows for job in batch]) if len(batch) > 1 else (product,)
        for job, part in zip(batch, parts, strict=True):
            self._send_result(job, part)

    def _rows(self, job: _Job) -> Tensor:
        """A job's rows, over the memory they arrived in."""
        request = job.request
        if isinstance(request, wire.Effect):
            return self._model.mask_rows(request)
        inputs, _ = self._model.manifest.groups[request.group].columns(request.direction)
        rows = wire.as_matrix(job.payload.buffer, rows=request.rows, arithmetic=request.arithmetic)
        return rows.reshape(request.rows, inputs)

    def _send_result(self, job: _Job, product: Tensor) -> None:
        self._send(job.sender, wire.Result.answering(job.request), wire.as_bytes(product))

    def _send(self, sender: bytes, reply: wire.Message, payload: memoryview | bytes = b"") -> None:
        head = wire.encode(reply, payload_bytes=len(payload))
        self._router.send(sender, zmq.SNDMORE)
        self._router.send(head, zmq.SNDMORE)
        self._router.send(payload, copy=False)


def build(config: ProviderConfig, *, model_digest: str, context: Context) -> Executor:
    """The executor that a configuration describes, listening.

    Raises:
        ConfigError: the device, the kernel or the endpoint cannot be used.
        CheckpointError: the checkpoint is not any more the one that the gateway has announced.
    """
    settings = config.executor
    store = open_store(config)
    if store.manifest().digest != model_digest:
        raise CheckpointError(f"{store.path} changed while it was in use; start the provider again")
    model = ServedModel(store, device=settings.device, kernel=settings.kernel, float_memory=settings.float_memory)
    return Executor(
        model,
        context=context,
        endpoint=settings.endpoint,
        max_batch_rows=settings.max_batch_rows,
        warm_up=settings.warm_up,
    )


def main() -> None:
    """An executor as a process of its own, started by `supervisor.ProcessExecutor`.

    Its configuration and the model's digest are the first lines of stdin. The gateway keeps that pipe open: when it
    closes, for whatever reason, the executor ends too. Signals are the gateway's to handle.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    config = from_json(sys.stdin.buffer.readline())
    model_digest = sys.stdin.buffer.readline().decode().strip()
    logs.setup(config.log_level)
    if config.executor.threads:
        torch.set_num_threads(config.executor.threads)
    context: Context = zmq.Context()
    try:
        executor = build(config, model_digest=model_digest, context=context)
    except SymbiosisError as error:
        sys.exit(f"error: {error}")
    threading.Thread(target=wait_for_eof, args=(executor.stop,), name="lifeline", daemon=True).start()
    gc.freeze()  # see `server.serve`
    executor.run()


def wait_for_eof(then: Callable[[], None]) -> None:
    """Call `then` when stdin has closed."""
    while os.read(0, 4096):  # unbuffered: a thread inside sys.stdin would hold its lock when the process ends
        pass
    then()


if __name__ == "__main__":
    main()
