"""The training clients, and the thread that computes their steps.

Theory of operation. Each training client is a task over the shared model, with an optimizer of its own. Its requests
arrive one after the other, because the client sends a request when the one before was answered, and are computed in
this order. The thread repeats: take the next short request (a step of an optimizer, a checkpoint) of each key; then
choose some examples, in turns over keys and their training clients, and compute them in one round (`together`), each in
a pass of its own. The gradients of a client are summed in the order of its examples. So losses and gradients have the
same bits as if each client were alone.
"""

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tinker import types
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import OWNED
from tenant.endpoint.tinker.checkpoints import OPTIMIZER, SNAPSHOTS, WEIGHTS, Checkpoints, Place, Record
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.together import Round
from tenant.endpoint.tinker.wire import Example, Steps, outputs_message
from tenant.model.overlap import overlapped
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

ALPHA = 32  # as Tinker's, for every rank
LOGITS = 1 << 30  # bytes of a round's logits; an example may take four times as many, alone

_RANK = 512
_RUNS = 64  # of one key
_SNAPSHOTS = 8  # of one training client; the oldest ones are deleted
_PASSES = 32  # passes of a round
_STOP_S = 60.0
_AVERAGES = ("step", "exp_avg", "exp_avg_sq")
_ADAM = {"learning_rate": "lr", "eps": "eps", "weight_decay": "weight_decay"}


class Run:
    """A training client: its adapter, optimizer, and the requests that wait."""

    def __init__(self, id: str, client: str, lora: types.LoraConfig) -> None:
        self.id, self.client, self.lora = id, client, lora
        self.task = f"{OWNED}{id.replace(':', '.')}"
        self.parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.AdamW | None = None
        self.size = 0  # bytes of memory
        self.snapshots: list[Place] = []
        self.held = ExitStack()
        self.last = -1  # sequence number
        self.jobs = deque[Job]()
        self.error: str | None = None


class Job:
    """A request of a training client: `work`, which returns the result, or `steps`."""

    def __init__(
        self, run: Run, future: Future, work: Callable[[], dict[str, Any]] | None = None, steps: Steps | None = None
    ) -> None:
        self.run, self.future, self.work, self.steps = run, future, work, steps
        self.backward = steps is not None and steps.backward
        self.logprobs: list[Tensor] = []
        self.loss = 0.0
        self.before: list[Tensor | None] = []  # gradients of earlier requests, which stay if this one fails

    def left(self) -> "list[tuple[Job, Example]]":
        return [] if self.steps is None else [(self, one) for one in self.steps.examples[len(self.logprobs) :]]


class Training:
    """Trains adapters over one split model, whose products `Together` computes. The training clients of each of
    `clients` keys take equal parts of the memory for adapters."""

    def __init__(self, model: Any, tasks: Tasks, checkpoints: Checkpoints, *, name: str, clients: int) -> None:
        self._model, self._tasks, self._checkpoints = model, tasks, checkpoints
        self._name, self._memory = name, tasks.memory_limit // clients
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.longest = max(1, LOGITS // self.vocabulary)
        """Largest number of tokens of an example whose logits fit the memory."""
        self._runs: dict[str, Run] = {}
        self._turns: dict[str, None] = {}  # the clients; who has computed goes to the end
        self._ended: list[Run] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="tinker-training", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all requests, after the round in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_STOP_S)
        for run in list(self._runs.values()):
            self.end(run)
        self._free()

    # Requests, called by the routes

    def runs(self, client: str) -> list[Run]:
        with self._changed:
            return [run for run in self._runs.values() if run.client == client]

    def run(self, client: str, id: str) -> Run:
        """Return a training client. Raises `ApiError` if this key has none of this id."""
        with self._changed:
            run = self._runs.get(id)
        if run is None or run.client != client:
            text = f"there is no training client {id[:80]!a}; it may have ended with its session"
            raise ApiError(404, text, code="not_found")
        return run

    def submit(self, seq: int, job: Job) -> None:
        """Take a request; the first one of a training client makes it. Raises `ApiError` unless the number is above all
        earlier ones. Numbers that are left out were those of refused requests."""
        with self._changed:
            if seq <= job.run.last:
                text = f"seq_id {seq}: this training client has sent {job.run.last} already"
                raise ApiError(400, text, param="seq_id")
            if seq == 0:
                if sum(run.client == job.run.client for run in self._runs.values()) >= _RUNS:
                    raise ApiError(400, f"this key has {_RUNS} training clients; end a session first")
                self._runs[job.run.id] = job.run
                self._turns.setdefault(job.run.client)
            job.run.last = seq
            job.run.jobs.append(job)
            self._changed.notify_all()

    def end(self, run: Run) -> None:
        """End a training client: its requests fail, and the thread frees its memory."""
        with self._changed:
            if self._runs.pop(run.id, None) is not None:
                self._ended.append(run)
            run.error = run.error or "the training client has ended"
            jobs, run.jobs = run.jobs, deque()
            self._changed.notify_all()
        for job in jobs:
            job.future.fail(ApiError(400, run.error))

    # What a request does, called by the thread

    def create(self, run: Run) -> None:
        """Make a new adapter. Raises `ApiError` and `SymbiosisError`."""
        if not 1 <= run.lora.rank <= _RANK:
            raise ApiError(400, f"rank {run.lora.rank} is not from 1 to {_RANK}", param="rank")
        if not (targets := self._targets(run.lora)):
            raise ApiError(400, "this model has no linears of the kinds to train", param="lora_config")
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=run.lora.rank,
            lora_alpha=ALPHA,
            target_modules=[*targets],
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in self._model.modules()),
        )
        with torch.random.fork_rng(devices=[]):
            if run.lora.seed is None:
                torch.seed()
            else:
                torch.manual_seed(run.lora.seed)
            self._adopt(run, config, run.lora)

    def load(self, run: Run, place: Place, *, optimizer: bool) -> None:
        """Continue from a checkpoint. Raises `ApiError` and `SymbiosisError`."""
        record, folder = self._checkpoints.record(place), self._checkpoints.folder(place)
        if record.base_model != self._name:
            raise ApiError(400, f"{place.uri} is of the model {record.base_model}, and this one is {self._name}")
        if optimizer and not (folder / OPTIMIZER).exists():
            raise ApiError(400, f"{place.uri} has no optimizer's state; load it without the optimizer")
        self._adopt(run, folder, record.lora)
        if optimizer:
            run.optimizer = torch.optim.AdamW(run.parameters, foreach=False)
            for key, tensor in load_file(folder / OPTIMIZER).items():
                number, _, name = key.partition(".")
                parameter = run.parameters[int(number)]
                run.optimizer.state[parameter][name] = tensor if name == "step" else tensor.to(parameter.device)

    def step(self, run: Run, adam: types.AdamParams) -> dict[str, Any]:
        """One step of Adam with the gradients so far. Raises `ApiError`."""
        for name, value in adam:
            if not 0 <= value < (1 if name.startswith("beta") else inf):
                raise ApiError(400, f"adam_params.{name} = {value}: write a number from 0, for betas below 1")
        norm = float(nn.utils.clip_grad_norm_(run.parameters, adam.grad_clip_norm or inf))
        if not isfinite(norm):
            for parameter in run.parameters:
                parameter.grad = None
            raise ApiError(400, "the gradient has inf or nan; it was dropped, and the adapter is as before")
        if run.optimizer is None:
            run.optimizer = torch.optim.AdamW(run.parameters, foreach=False)
        for group in run.optimizer.param_groups:
            group |= {ours: getattr(adam, name) for name, ours in _ADAM.items()} | {"betas": (adam.beta1, adam.beta2)}
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"metrics": {"grad_norm": norm}}

    def save(self, run: Run, place: Place, *, expires: float | None) -> None:
        """Write a checkpoint. Raises `ApiError`."""

        def write(folder: Path) -> None:
            self._tasks.save(run.task, folder)
            if place.kind == WEIGHTS:
                state = {} if run.optimizer is None else run.optimizer.state
                numbered = [(number, state[one]) for number, one in enumerate(run.parameters) if one in state]
                tensors = {f"{n}.{name}": found[name].contiguous() for n, found in numbered for name in _AVERAGES}
                save_file(tensors, folder / OPTIMIZER)

        record = Record(base_model=self._name, lora=run.lora, time=time.time(), expires=expires)
        size = sum(parameter.nbytes for parameter in run.parameters) * (3 if place.kind == WEIGHTS else 1) + (64 << 10)
        self._checkpoints.save(place, record, write, size=size)
        if place.kind == SNAPSHOTS:
            run.snapshots.append(place)
            for old in run.snapshots[:-_SNAPSHOTS]:
                with suppress(ApiError):  # samples use it
                    self._checkpoints.delete(old)
                    run.snapshots.remove(old)

    def _targets(self, lora: types.LoraConfig) -> dict[str, int]:
        """Return the linears to train, with the number of their inputs and outputs."""
        head, found = self._model.get_output_embeddings(), {}
        for name, one in self._model.named_modules():
            if isinstance(one, RemoteLayer) or is_linear(one):
                attention = any("att" in part for part in name.split(".")[:-1])
                if lora.train_unembed if one is head else lora.train_attn if attention else lora.train_mlp:
                    found[name] = one.nx + one.nf if isinstance(one, Conv1D) else one.in_features + one.out_features
        return found

    def _adopt(self, run: Run, source: LoraConfig | Path, lora: types.LoraConfig) -> None:
        """Make or load the adapter of a training client, in place of the one that it has."""
        size = 4 * 4 * lora.rank * sum(self._targets(lora).values())  # float32, with gradients and Adam's averages
        taken = size + sum(other.size for other in self.runs(run.client) if other is not run)
        if taken > self._memory:
            text = f"the training clients of this key would take {taken:,} bytes of {self._memory:,}; end some first"
            raise ApiError(400, text)
        run.held.close()
        run.optimizer, run.parameters, run.lora = None, [], lora
        if run.task in self._tasks:
            self._tasks.unregister(run.task, discard=True)
        self._tasks.register(run.task, source)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Model (has|with) `tie_word_embeddings")  # nothing is merged here
                self._tasks.load(run.task, trainable=True)
            run.parameters, run.size = list(self._tasks.parameters(run.task)), size
            run.held.enter_context(self._tasks.hold(run.task))
        except BaseException:
            run.parameters = []
            self._tasks.unregister(run.task, discard=True)
            raise

    # The thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._ended or any(run.jobs for run in self._runs.values())
                )
                if self._closed:
                    return
            try:
                self._free()
                done = set[str]()
                for job in self._next():
                    if job.work is not None and job.run.client not in done:
                        done.add(job.run.client)
                        self._work(job, job.work)
                self._compute(self._chosen())
            except Exception as error:  # the thread must not end, nor try the same again and again
                log.exception("a round failed")
                for job in self._next():
                    job.future.fail(error)
                    self._finish(job)

    def _free(self) -> None:
        """Free the memory and the snapshots of training clients that have ended."""
        while self._ended:
            run = self._ended.pop()
            run.held.close()
            run.parameters, run.optimizer = [], None
            if run.task in self._tasks:
                self._tasks.unregister(run.task, discard=True)
            for place in run.snapshots:
                with suppress(ApiError):  # samples use it; the next start deletes it
                    self._checkpoints.delete(place)

    def _next(self) -> list[Job]:
        """The first request of each training client, in the order of their keys' turns."""
        with self._changed:
            order = {client: place for place, client in enumerate(self._turns)}
            return [run.jobs[0] for run in sorted(self._runs.values(), key=lambda run: order[run.client]) if run.jobs]

    def _finish(self, job: Job) -> None:
        with self._changed:
            if job.run.jobs and job.run.jobs[0] is job:  # it has not ended meanwhile
                job.run.jobs.popleft()

    def _work(self, job: Job, work: Callable[[], dict[str, Any]]) -> None:
        self._turns[job.run.client] = self._turns.pop(job.run.client)
        try:
            if job.run.error is not None:
                raise ApiError(400, job.run.error)
            job.future.set(work())
        except Exception as error:
            if not job.run.parameters and job.run.error is None:  # there is nothing to train
                job.run.error = f"the training client could not be made: {error}"
            job.future.fail(error)
        self._finish(job)

    def _chosen(self) -> list[tuple[Job, Example]]:
        """Choose the examples of a round: one of each client in turn, from its training clients in turn."""
        of: dict[str, list[list[tuple[Job, Example]]]] = {}
        for job in self._next():
            of.setdefault(job.run.client, []).append(job.left())
        chosen: list[tuple[Job, Example]] = []
        room = LOGITS
        for job, example in _alternating([[*_alternating(own)] for own in of.values()]):
            room -= 4 * self.vocabulary * len(example.tokens)
            if chosen and (room < 0 or len(chosen) == _PASSES):
                break
            chosen.append((job, example))
        for job, _ in chosen:
            self._turns[job.run.client] = self._turns.pop(job.run.client)
        return chosen

    def _compute(self, chosen: Sequence[tuple[Job, Example]]) -> None:
        """Compute a round. If it fails, compute the examples of each request in a round of their own."""
        jobs = list(dict.fromkeys(job for job, _ in chosen))
        try:
            for job in jobs:
                if job.run.error is not None:
                    raise ApiError(400, job.run.error)
                if job.backward and not job.before:
                    job.before = [None if p.grad is None else p.grad.clone() for p in job.run.parameters]
            results = self._round(chosen) if chosen else []
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._compute([one for one in chosen if one[0] is job])
                return
            for parameter, gradient in zip(jobs[0].run.parameters, jobs[0].before, strict=False):
                parameter.grad = gradient
            jobs[0].future.fail(error)
            self._finish(jobs[0])
            return
        for (job, _), (logprobs, loss) in zip(chosen, results, strict=True):
            job.logprobs.append(logprobs)
            job.loss += loss
        for job in jobs:
            if not job.left():
                job.future.set(outputs_message(job.logprobs, job.loss))
                self._finish(job)

    def _round(self, chosen: Sequence[tuple[Job, Example]]) -> list[tuple[Tensor, float]]:
        together = Round(len(chosen))
        device = self._model.device

        def compute(part: tuple[Job, Example]) -> tuple[Tensor, float]:
            job, example = part
            assert job.steps is not None
            with together.taking_part(), self._tasks.batch([job.run.task]), torch.enable_grad():
                logits = self._model(input_ids=example.tokens[None].to(device), use_cache=False).logits[0]
                targets = example.targets.to(device)
                found = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
                inputs = {name: one.to(device) for name, one in example.inputs.items()}
                loss = job.steps.loss.compute(found, inputs, job.steps.options)
                if not loss.isfinite():
                    raise ApiError(400, "the loss is inf or nan; nothing was added to the gradients")
                if job.backward:
                    loss.backward()
                return found.detach().cpu(), float(loss.detach())

        trained = dict.fromkeys(job.run for job, _ in chosen if job.backward)
        return overlapped(nn.ParameterList(p for run in trained for p in run.parameters), compute, chosen)


def _alternating(lists: Sequence[Iterable[T]]) -> Iterator[T]:
    """The first of each, then the second of each, and so on."""
    left = deque(map(iter, lists))
    while left:
        one = left.popleft()
        for found in one:
            yield found
            left.append(one)
            break
