"""The executor: takes requests from the gateway's threads, batches them per layer group, computes, replies.

Theory of operation. One thread owns the model and a ROUTER socket. It drains what has arrived, takes the oldest
request, and adds every queued one for the same (group, direction, path): their rows are flattened to one matrix
without padding, multiplied once, and the product's row slices are sent back as they lie in memory. A helper's
effect is the product of keystream rows, so it joins the ring batch of its group. Ring results do not depend on
what else is in the batch; float results may, within rounding.

The socket speaks to the gateway's own threads (`inproc://`) or to the gateway's process over a private `ipc://`
socket; requests have been checked by then. A message is `[header, payload]` with the tenant's own header, a reply
`[prefix and header, payload]`, ready for the wire. No request leaves anything behind.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass, field

import torch
import zmq
from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.ring import Direction

from . import logs
from .config import INPROC, ProviderConfig, from_json
from .model import ServedModel, open_store, widths

log = logs.EventLog(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
Key = tuple[int, Direction, wire.Path]

_STOP = b""  # an empty header: no tenant's header is, and the gateway forwards nothing else


@dataclass(frozen=True)
class _Job:
    """One request and whom to answer."""

    order: int
    sender: zmq.Frame
    request: wire.Execute | wire.Effect
    payload: zmq.Frame

    @property
    def key(self) -> Key:
        return self.request.group, self.request.direction, self.request.path


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

    Args:
        model: what to multiply by.
        context: shared with the gateway if `endpoint` is `inproc://`.
        endpoint: where to listen.
        max_batch_rows: rows of several requests in one product; a single larger request runs alone.
    """

    def __init__(self, model: ServedModel, *, context: Context, endpoint: str, max_batch_rows: int) -> None:
        self._model = model
        self._context = context
        self._max_batch_rows = max_batch_rows
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        for address in {endpoint, INPROC}:  # `stop` always comes by the second
            self._router.bind(address)
        self._queue = _Queue()
        self._requests = 0
        self._stopped = False

    def run(self) -> None:
        """Serve until `stop`; every request that arrived before is answered."""
        with self._router, torch.inference_mode():
            while self._queue or not self._stopped:
                self._receive()
                if self._queue:
                    self._run_batch(self._queue.take(self._max_batch_rows))

    def stop(self) -> None:
        """Ask `run` to end. From any thread."""
        with self._context.socket(zmq.DEALER) as control:
            control.linger = 1000
            control.connect(INPROC)
            control.send_multipart([_STOP, b""])

    def _receive(self) -> None:
        """Take in everything that has arrived; wait only when there is nothing to do."""
        while not (self._queue or self._stopped) or int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, header, payload = self._router.recv_multipart(copy=False)
            if not len(header):
                self._stopped = True
                return
            try:
                self._accept(sender, wire.decode_request(header.buffer), payload)
            except ProtocolError as error:  # the gateway has checked it, so this is a bug
                log.failure("undecodable_request", error)

    def _accept(self, sender: zmq.Frame, request: wire.Request, payload: zmq.Frame) -> None:
        if isinstance(request, wire.Execute | wire.Effect):
            self._requests += 1
            self._queue.put(_Job(self._requests, sender, request, payload))
        elif isinstance(request, wire.Health):
            self._send(sender, self._health())

    def _health(self) -> wire.HealthReport:
        """The executor's part of a report; the gateway fills in the rest."""
        return wire.HealthReport(
            name="",
            model_digest="",
            uptime_s=0.0,
            groups=len(self._model.manifest.groups),
            groups_loaded=self._model.groups_loaded,
            requests=self._requests,
            connections=0,
        )

    def _run_batch(self, batch: list[_Job]) -> None:
        try:
            group, direction, path = batch[0].key
            rows = [self._rows(job) for job in batch]
            flat = rows[0] if len(rows) == 1 else torch.cat(rows)
            product = self._model.product(flat, group=group, direction=direction, path=path)
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
        width, _ = widths(self._model.manifest.groups[request.group], request.direction)
        rows = wire.as_matrix(job.payload.buffer, rows=request.rows, path=request.path)
        return rows.reshape(request.rows, width)

    def _send_result(self, job: _Job, product: Tensor) -> None:
        request = job.request
        result = wire.Result(
            nonce=request.nonce,
            group=request.group,
            direction=request.direction,
            path=request.path,
            rows=request.rows,
        )
        self._send(job.sender, result, wire.as_bytes(product))

    def _send(self, sender: zmq.Frame, reply: wire.Message, payload: memoryview | bytes = b"") -> None:
        head = wire.encode(reply, payload_bytes=len(payload))
        self._router.send_multipart([sender, head, payload], copy=False)


def build(config: ProviderConfig, *, context: Context) -> Executor:
    """The executor that a configuration describes, listening."""
    settings = config.executor
    model = ServedModel(open_store(config), device=settings.device, kernel=settings.kernel)
    return Executor(model, context=context, endpoint=settings.endpoint, max_batch_rows=settings.max_batch_rows)


def main() -> None:
    """An executor as a process of its own, started by `supervisor.ProcessExecutor`.

    Its configuration is the first line of stdin. The gateway keeps that pipe open: when it closes, for
    whatever reason, the executor ends too. Signals are the gateway's to handle.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    config = from_json(sys.stdin.buffer.readline())
    logs.setup(config.log_level)
    if config.executor.threads:
        torch.set_num_threads(config.executor.threads)
    context: Context = zmq.Context()
    executor = build(config, context=context)

    def stop_with_gateway() -> None:
        sys.stdin.buffer.read()
        executor.stop()

    threading.Thread(target=stop_with_gateway, name="lifeline", daemon=True).start()
    executor.run()


if __name__ == "__main__":
    main()
