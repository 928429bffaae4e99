"""The training clients, and the thread that computes their steps.

Theory of operation. Each training client is a task over the shared model, with an optimizer of its own. Its requests
carry sequence numbers, and are computed in their order, whatever the order of arrival. The thread repeats: take the
next short request (a step of an optimizer, a checkpoint) of each key; then choose some examples, in turns over keys and
their training clients, and compute them in one round (`together`), each in a pass of its own. The gradients of a client
are summed in the order of its examples. So losses and gradients have the same bits as if each client were alone.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from symbiosis_priv.errors import CheckpointError
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import OWNED
from tenant.endpoint.tinker.checkpoints import OPTIMIZER, Checkpoints, Lora, Place, Record
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.together import Round
from tenant.endpoint.tinker.wire import Example, Steps, outputs_message
from tenant.model.overlap import overlapped
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import Tasks

log = logging.getLogger(__name__)

ALPHA = 32  # as Tinker's, for every rank
LOGITS = 1 << 30  # bytes of a round's logits; an example may take four times as many, alone


_RANK = 512
_PASSES = 32  # passes of a round
_GAP_S = 600.0  # that later requests wait for one with an earlier sequence number
_SWEEP_S = 5.0
_STOP_S = 60.0
_AVERAGES = ("step", "exp_avg", "exp_avg_sq")


class Run:
    """A training client: its adapter, optimizer, and requests in the order of their sequence numbers."""

    def __init__(self, id: str, client: str, lora: Lora, metadata: dict[str, str] | None = None) -> None:
        self.id, self.client, self.lora, self.metadata = id, client, lora, metadata
        self.task = f"{OWNED}{id.replace(':', '.')}"
        self.parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.AdamW | None = None
        self.used = time.time()
        self.snapshots: list[Place] = []
        self.held = ExitStack()
        self.next = 0  # sequence number
        self.waiting: dict[int, Job] = {}
        self.gap: float | None = None  # since when later requests wait for the next one
        self.error: str | None = None

    def ready(self) -> "Job | None":
        return self.waiting.get(self.next)


class Job:
    """A request of a training client. `work`: computes the result, in the thread; None if it has failed already."""

    def __init__(self, run: Run, future: Future, work: Callable[[], dict[str, Any]] | None) -> None:
        self.run, self.future, self.work = run, future, work


class StepsJob(Job):
    """Examples to compute."""

    def __init__(self, run: Run, future: Future, steps: Steps) -> None:
        super().__init__(run, future, None)
        self.steps = steps
        self.logprobs: list[Tensor] = []
        self.loss = 0.0
        self.before: list[Tensor | None] = []

    def begin(self) -> None:
        """Keep the gradients of earlier requests, which stay if this request fails."""
        if self.steps.backward and not self.before:
            self.before = [None if p.grad is None else p.grad.clone() for p in self.run.parameters]

    def undo(self) -> None:
        for parameter, gradient in zip(self.run.parameters, self.before, strict=False):
            parameter.grad = gradient


class Training:
    """Trains adapters over one model, for many clients.

    Args:
        model: the split model, whose products `Together` computes.
        tasks: its tasks.
        clients: number of keys. With several, a key's training clients may take at most as much memory as stays free.
    """

    def __init__(self, model: Any, tasks: Tasks, checkpoints: Checkpoints, *, name: str, clients: int) -> None:
        self._model, self.tasks, self._checkpoints = model, tasks, checkpoints
        self._name, self._clients = name, clients
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._runs: dict[str, Run] = {}
        self._turns: dict[str, None] = {}  # the clients; who has computed goes to the end
        self._ended: list[Run] = []
        self._closed = False
        self._changed = threading.Condition()
        self.sweep: Callable[[], None] = lambda: None
        """Called by the thread every few seconds."""
        self._thread = threading.Thread(target=self._loop, name="tinker-training", daemon=True)
        self._thread.start()

    @property
    def longest(self) -> int:
        """Largest number of tokens of an example whose logits fit the memory."""
        return max(1, 4 * LOGITS // (4 * self._vocabulary))

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
            raise ApiError(
                404, f"there is no training client {id[:80]!a}; it may have ended with its session", code="not_found"
            )
        run.used = time.time()
        return run

    def add(self, run: Run) -> None:
        with self._changed:
            self._runs[run.id] = run
            self._turns.setdefault(run.client)

    def submit(self, run: Run, seq: int, job: Job) -> None:
        """Take a request. It is computed after those with smaller sequence numbers. Raises `ApiError` if the number
        was used."""
        with self._changed:
            if seq < run.next or seq in run.waiting:
                raise ApiError(400, f"seq_id {seq} of this training client was used already", param="seq_id")
            run.waiting[seq] = job
            if run.ready() is None:
                run.gap = run.gap or time.monotonic()
            self._changed.notify_all()

    def end(self, run: Run) -> None:
        """End a training client: its requests fail, and the thread frees its memory."""
        with self._changed:
            if self._runs.pop(run.id, None) is not None:
                self._ended.append(run)
            run.error = run.error or "the training client has ended"
            waiting, run.waiting = run.waiting, {}
            self._changed.notify_all()
        for job in waiting.values():
            job.future.fail(ApiError(400, run.error))

    # What a request does, called by the thread

    def create(self, run: Run) -> None:
        """Make a new adapter. Raises `ApiError` and `SymbiosisError`."""
        lora = run.lora
        if not 1 <= lora.rank <= _RANK:
            raise ApiError(400, f"rank {lora.rank} is not from 1 to {_RANK}", param="rank")
        targets = list(self._targets(lora))
        if not targets:
            raise ApiError(400, "this model has no linears of the kinds to train", param="lora_config")
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=ALPHA,
            target_modules=targets,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in self._model.modules()),
        )
        with torch.random.fork_rng(devices=[]):
            if lora.seed is None:
                torch.seed()
            else:
                torch.manual_seed(lora.seed)
            self._adopt(run, config)

    def load(self, run: Run, place: Place, *, optimizer: bool) -> None:
        """Continue from a checkpoint. Raises `ApiError` and `SymbiosisError`."""
        record = self._checkpoints.record(place)
        if record.base_model != self._name:
            raise ApiError(400, f"{place.uri} is of the model {record.base_model}, and this one is {self._name}")
        if optimizer and not record.optimizer:
            raise ApiError(400, f"{place.uri} has no optimizer's state; load it without the optimizer")
        folder = self._checkpoints.folder(place)
        run.lora = record.lora
        self._adopt(run, folder)
        if optimizer:
            run.optimizer = self._optimizer(run, _stored(folder / OPTIMIZER, run.parameters))

    def step(self, run: Run, adam: Mapping[str, float]) -> dict[str, Any]:
        """One step of Adam with the gradients so far. Raises `ApiError`."""
        bounds = {"beta1": 1.0, "beta2": 1.0}
        for name, value in adam.items():
            if not isfinite(value) or value < 0 or value >= bounds.get(name, inf):
                raise ApiError(
                    400, f"adam_params.{name} = {value}: write a number from 0{', below 1' * (name in bounds)}"
                )
        clip = adam["grad_clip_norm"]
        norm = float(nn.utils.clip_grad_norm_(run.parameters, clip if clip > 0 else inf))
        if not isfinite(norm):
            for parameter in run.parameters:
                parameter.grad = None
            raise ApiError(400, "the gradient has inf or nan; it was dropped, and the adapter is as before")
        if run.optimizer is None:
            run.optimizer = self._optimizer(run)
        for group in run.optimizer.param_groups:
            group.update(
                lr=adam["learning_rate"],
                betas=(adam["beta1"], adam["beta2"]),
                eps=adam["eps"],
                weight_decay=adam["weight_decay"],
            )
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"metrics": {"grad_norm": norm}}

    def save(self, run: Run, place: Place, *, optimizer: bool, overwrite: bool = False, **record: Any) -> None:
        """Write a checkpoint. `record`: more fields of its record. Raises `ApiError` and `StorageError`."""

        def write(folder: Path) -> None:
            self.tasks.save(run.task, folder)
            if optimizer:
                state = {} if run.optimizer is None else run.optimizer.state
                tensors = {
                    f"{number}.{name}": state[parameter][name].contiguous()
                    for number, parameter in enumerate(run.parameters)
                    if parameter in state
                    for name in _AVERAGES
                }
                save_file(tensors, folder / OPTIMIZER)

        about = Record(base_model=self._name, lora=run.lora, time=time.time(), optimizer=optimizer, **record)
        size = sum(parameter.nbytes for parameter in run.parameters) * (3 if optimizer else 1) + (64 << 10)
        self._checkpoints.save(place, about, write, size=size, overwrite=overwrite)

    def _targets(self, lora: Lora) -> Iterator[str]:
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if isinstance(module, RemoteLayer) or is_linear(module):
                attention = any("att" in part for part in name.split(".")[:-1])
                if lora.train_unembed if module is head else lora.train_attn if attention else lora.train_mlp:
                    yield name

    def _adopt(self, run: Run, source: LoraConfig | Path) -> None:
        """Make or load the adapter of a training client, in place of the one that it has."""
        run.held.close()
        run.optimizer = None
        if run.task in self.tasks:
            self.tasks.unregister(run.task, discard=True)
        self.tasks.register(run.task, source)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Model (has|with) `tie_word_embeddings")  # nothing is merged here
                self.tasks.load(run.task, trainable=True)
            run.parameters = list(self.tasks.parameters(run.task))
            own, others = 4 * sum(one.nbytes for one in run.parameters), 0
            for other in list(self._runs.values()):
                if other is not run:
                    taken = 4 * sum(one.nbytes for one in other.parameters)
                    own, others = (own + taken, others) if other.client == run.client else (own, others + taken)
            free = self.tasks.memory_limit - own - others
            if free < 0 or (self._clients > 1 and own > free):
                raise ApiError(
                    400, f"the training clients of this key would take {own:,} bytes, too many; end some first"
                )
            run.held.enter_context(self.tasks.hold(run.task))
        except BaseException:
            run.parameters = []
            self.tasks.unregister(run.task, discard=True)
            raise

    def _optimizer(self, run: Run, state: Mapping[int, dict[str, Tensor]] | None = None) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(run.parameters, foreach=False)
        for number, values in (state or {}).items():
            optimizer.state[run.parameters[number]] = values
        return optimizer

    # The thread

    def _loop(self) -> None:
        swept = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._ended or any(run.ready() for run in self._runs.values()), _SWEEP_S
                )
                if self._closed:
                    return
            self._free()
            self._short()
            with self._changed:
                jobs = [job for run in self._in_turn() if isinstance(job := run.ready(), StepsJob)]
            try:
                self._compute(self._chosen(jobs))
            except Exception:  # the thread must not end
                log.exception("a round failed")
            if time.monotonic() - swept > _SWEEP_S:
                swept = time.monotonic()
                self._give_up()
                self.sweep()

    def _free(self) -> None:
        """Free the memory and the snapshots of training clients that have ended."""
        with self._changed:
            ended, self._ended = self._ended, []
        for run in ended:
            run.held.close()
            run.parameters, run.optimizer = [], None
            if run.task in self.tasks:
                self.tasks.unregister(run.task, discard=True)
            for place in run.snapshots:
                self._checkpoints.delete(place)

    def _in_turn(self) -> list[Run]:
        order = {client: place for place, client in enumerate(self._turns)}
        return sorted(self._runs.values(), key=lambda run: order[run.client])

    def _short(self) -> None:
        """Compute the next short request of each client."""
        done: set[str] = set()
        with self._changed:
            runs = self._in_turn()
        for run in runs:
            job = run.ready()
            if job is None or isinstance(job, StepsJob) or (job.work is not None and run.client in done):
                continue
            if job.work is not None:
                done.add(run.client)
                self._turns[run.client] = self._turns.pop(run.client)
                try:
                    if run.error is not None:
                        raise ApiError(400, run.error)
                    job.future.set(job.work())
                except Exception as error:
                    if run.next == 0:  # there is nothing to train
                        run.error = f"the training client could not be made: {error}"
                    job.future.fail(error)
            self._finish(run)

    def _finish(self, run: Run) -> None:
        with self._changed:
            run.waiting.pop(run.next, None)
            run.next += 1
            run.gap = time.monotonic() if run.waiting and run.ready() is None else None

    def _give_up(self) -> None:
        """Fail requests that wait too long for an earlier one."""
        with self._changed:
            late = [run for run in self._runs.values() if run.gap and time.monotonic() - run.gap > _GAP_S]
        for run in late:
            run.error = f"the request with seq_id {run.next} never came; start from a checkpoint"
            self.end(run)

    def _chosen(self, jobs: Sequence[StepsJob]) -> list[tuple[StepsJob, Example]]:
        """Choose the examples of a round: one of each client in turn, from its training clients in turn."""
        left = {job: list(job.steps.examples[len(job.logprobs) :]) for job in jobs}
        of: dict[str, list[StepsJob]] = {}
        for job in jobs:
            of.setdefault(job.run.client, []).append(job)
        chosen: list[tuple[StepsJob, Example]] = []
        room = LOGITS
        while of and len(chosen) < _PASSES:
            for client, own in list(of.items()):
                job = own.pop(0)
                size = 4 * self._vocabulary * len(left[job][0].tokens)
                if (chosen and size > room) or len(chosen) == _PASSES:
                    of.clear()
                    break
                room -= size
                chosen.append((job, left[job].pop(0)))
                if left[job]:
                    own.append(job)
                if not own:
                    del of[client]
                self._turns[client] = self._turns.pop(client)
        return chosen

    def _compute(self, chosen: Sequence[tuple[StepsJob, Example]]) -> None:
        """Compute a round. If it fails, compute the examples of each request in a round of their own."""
        if not chosen:
            return
        jobs = list(dict.fromkeys(job for job, _ in chosen))
        try:
            if any(job.run.error is not None for job in jobs):
                raise ApiError(400, "the training client has ended")
            for job in jobs:
                job.begin()
            results = self._round(chosen)
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._compute([one for one in chosen if one[0] is job])
                return
            jobs[0].undo()
            jobs[0].future.fail(error)
            self._finish(jobs[0].run)
            return
        for (job, _), (logprobs, loss) in zip(chosen, results, strict=True):
            job.logprobs.append(logprobs)
            job.loss += loss
        for job in jobs:
            if len(job.logprobs) == len(job.steps.examples):
                job.future.set(outputs_message(job.logprobs, job.loss))
                self._finish(job.run)

    def _round(self, chosen: Sequence[tuple[StepsJob, Example]]) -> list[tuple[Tensor, float]]:
        together = Round(len(chosen))
        device = self._model.device

        def compute(part: tuple[StepsJob, Example]) -> tuple[Tensor, float]:
            job, example = part
            with together.taking_part(), self.tasks.batch([job.run.task]), torch.enable_grad():
                logits = self._model(input_ids=example.tokens[None].to(device), use_cache=False).logits[0]
                targets = example.targets.to(device)
                shape = (len(targets), -1)
                found = logits.float().log_softmax(-1).gather(-1, targets.view(shape)).view(targets.shape)
                inputs = {name: one.to(device) for name, one in example.inputs.items()}
                loss = job.steps.loss.compute(found, inputs, job.steps.config)
                if not loss.isfinite():
                    raise ApiError(400, "the loss is inf or nan; nothing was added to the gradients")
                if job.steps.backward:
                    loss.backward()
                return found.detach().cpu(), float(loss.detach())

        trained = [
            p for job in dict.fromkeys(job for job, _ in chosen) if job.steps.backward for p in job.run.parameters
        ]
        return overlapped(nn.ParameterList(trained), compute, chosen)


def _stored(file: Path, parameters: Sequence[nn.Parameter]) -> dict[int, dict[str, Tensor]]:
    """Read the state of an optimizer. Raises `CheckpointError` unless it fits the parameters."""
    found: dict[int, dict[str, Tensor]] = {}
    try:
        tensors = load_file(file)
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            parameter = parameters[int(number)]
            shape = torch.Size() if name == "step" else parameter.shape
            if name not in _AVERAGES or tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(name)
            found.setdefault(int(number), {})[name] = tensor if name == "step" else tensor.to(parameter.device)
        if any(len(values) != len(_AVERAGES) for values in found.values()):
            raise ValueError("an average is missing")
    except (OSError, SafetensorError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{file.name} does not fit the adapter ({type(error).__name__}); load without it"
        ) from None
    return found
