"""The training clients, and the thread that computes their steps.

Theory of operation. Each training client is a task over the shared model, with an optimizer of its own. Its requests
arrive one after the other, because the client sends a request when the one before was answered, and are computed in
this order. The thread repeats: take the next short request (a step of an optimizer, a checkpoint) of each key; then
choose some examples, in turns over keys and their training clients, and compute them in one round (`together`), each in
a pass of its own. The gradients of a client are summed in the order of its examples. So losses and gradients have the
same bits as if each client were alone. Only this thread takes requests out of the queues.
"""

import logging
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tinker import types
from torch import Tensor, nn

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import OWNED
from tenant.endpoint.tinker.checkpoints import OPTIMIZER, SNAPSHOTS, WEIGHTS, Checkpoints, Place, Record
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.together import Together
from tenant.endpoint.tinker.wire import Example, outputs_message
from tenant.model.overlap import overlapped
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

ALPHA = 32  # as Tinker's, for every rank
LOGITS = 1 << 30  # bytes of a round's logits; an example may take four times as many, alone

_RANK = 512
_SNAPSHOTS = 8  # of one training client; the oldest ones are deleted
_PASSES = 32  # passes of a round
_STOP_S = 60.0


@dataclass(eq=False)
class Run:
    """A training client: its adapter, the averages of its optimizer, and the requests that wait. `size`: bytes of
    memory. `last`: the last sequence number."""

    id: str
    client: str
    lora: types.LoraConfig
    parameters: list[nn.Parameter] = field(default_factory=list)
    averages: defaultdict[Tensor, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    size: int = 0
    snapshots: list[Place] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)
    last: int = -1
    jobs: "deque[Job]" = field(default_factory=deque)
    ended: bool = False

    @property
    def task(self) -> str:
        return f"{OWNED}{self.id.replace(':', '.')}"


@dataclass(eq=False)
class Job:
    """A request of a training client: `work`, which returns the result, or `examples`, whose gradients are added if
    `backward`. `results`: log probabilities and the loss of each example. `before`: the gradients of earlier requests,
    which stay if this one fails."""

    run: Run
    work: Callable[[], dict[str, Any]] | None = None
    examples: Sequence[Example] = ()
    backward: bool = False
    future: Future = field(init=False)
    results: list[tuple[Tensor, float]] = field(default_factory=list)
    error: Exception | None = None
    before: list[Tensor | None] = field(default_factory=list)

    def left(self) -> "list[tuple[Job, Example]]":
        return [(self, one) for one in self.examples[len(self.results) :]]


class Training:
    """Trains adapters over one split model. The training clients of each of `clients` keys take equal parts of the
    memory for adapters."""

    def __init__(
        self, model: Any, tasks: Tasks, checkpoints: Checkpoints, together: Together, *, name: str, clients: int
    ) -> None:
        self._model, self._tasks, self._checkpoints, self._together = model, tasks, checkpoints, together
        self._name, self._memory = name, tasks.memory_limit // clients
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.longest = max(1, LOGITS // self.vocabulary)
        """Largest number of tokens of an example whose logits fit the memory."""
        self._runs: dict[str, dict[str, Run]] = {}  # by client; who has computed goes to the end
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

    # Requests, called by the routes

    def runs(self, client: str) -> list[Run]:
        return [run for run in self._every() if run.client == client and not run.ended]

    def _every(self) -> list[Run]:
        with self._changed:
            return [run for own in self._runs.values() for run in own.values()]

    def run(self, client: str, id: str) -> Run:
        """Return a training client. Raises `ApiError` if this key has none of this id."""
        for run in self.runs(client):
            if run.id == id:
                return run
        raise ApiError(404, f"there is no training client {id[:80]!a}; it may have ended with its session")

    def submit(self, seq: int, job: Job) -> None:
        """Take a request; the first one of a training client makes it. Raises `ApiError` unless the number is above all
        earlier ones. Numbers that are left out were those of refused requests."""
        with self._changed:
            if seq <= job.run.last:
                raise ApiError(400, f"seq_id {seq}: this training client has sent {job.run.last} already")
            self._runs.setdefault(job.run.client, {}).setdefault(job.run.id, job.run)
            job.run.last = seq
            job.run.jobs.append(job)
            self._changed.notify_all()

    def end(self, run: Run) -> None:
        """End a training client: the thread lets its requests fail, and frees its memory."""
        with self._changed:
            run.ended = True
            self._changed.notify_all()

    # What a request does, called by the thread

    def create(self, run: Run) -> None:
        """Make a new adapter. Raises `ApiError` and `SymbiosisError`."""
        if not 1 <= run.lora.rank <= _RANK:
            raise ApiError(400, f"rank {run.lora.rank} is not from 1 to {_RANK}", param="rank")
        if not (targets := self._targets(run.lora)):
            raise ApiError(400, "this model has no linears of the kinds to train", param="lora_config")
        config = LoraConfig(task_type="CAUSAL_LM", r=run.lora.rank, lora_alpha=ALPHA, target_modules=[*targets])
        with torch.random.fork_rng(devices=[]):
            torch.seed() if run.lora.seed is None else torch.manual_seed(run.lora.seed)
            self._adopt(run, config, run.lora)

    def load(self, run: Run, place: Place, *, optimizer: bool) -> None:
        """Continue from a checkpoint. Raises `ApiError` and `SymbiosisError`."""
        record, folder = self._checkpoints.record(place), self._checkpoints.folder(place)
        if record.base_model != self._name:
            raise ApiError(400, f"{place.uri} is of the model {record.base_model}, and this one is {self._name}")
        if optimizer and not (folder / OPTIMIZER).exists():
            raise ApiError(400, f"{place.uri} has no optimizer's state; load it without the optimizer")
        self._adopt(run, folder, record.lora)
        for key, tensor in load_file(folder / OPTIMIZER).items() if optimizer else ():
            number, _, name = key.partition(".")
            parameter = run.parameters[int(number)]
            run.averages[parameter][name] = tensor if name == "step" else tensor.to(parameter.device)

    def step(self, run: Run, adam: types.AdamParams) -> dict[str, Any]:
        """One step of Adam with the gradients so far. Raises `ApiError`."""
        for name, value in adam:
            if not 0 <= value < (1 if name.startswith("beta") else inf):
                raise ApiError(400, f"adam_params.{name} = {value}: write a number from 0, for betas below 1")
        norm = float(nn.utils.clip_grad_norm_(run.parameters, adam.grad_clip_norm or inf))
        options: dict[str, Any] = {"betas": (adam.beta1, adam.beta2), "eps": adam.eps, "foreach": False}
        options |= {"lr": adam.learning_rate, "weight_decay": adam.weight_decay}
        optimizer = torch.optim.AdamW(run.parameters, **options)
        optimizer.state = run.averages
        if isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        if not isfinite(norm):
            raise ApiError(400, "the gradient has inf or nan; it was dropped, and the adapter is as before")
        return {"metrics": {"grad_norm": norm}}

    def save(self, run: Run, place: Place, *, expires: float | None) -> None:
        """Write a checkpoint. Raises `ApiError`."""

        def write(folder: Path) -> None:
            self._tasks.save(run.task, folder)
            if place.kind == WEIGHTS:
                numbered = [(number, run.averages.get(one, {})) for number, one in enumerate(run.parameters)]
                tensors = {f"{n}.{name}": one.contiguous() for n, own in numbered for name, one in own.items()}
                save_file(tensors, folder / OPTIMIZER)

        record = Record(base_model=self._name, lora=run.lora, time=time.time(), expires=expires)
        size = sum(parameter.nbytes for parameter in run.parameters) * (3 if place.kind == WEIGHTS else 1) + (64 << 10)
        self._checkpoints.save(place, record, write, size=size)
        if place.kind == SNAPSHOTS:
            run.snapshots.append(place)
            self._forget(run.snapshots, keep=_SNAPSHOTS)

    def _forget(self, snapshots: list[Place], *, keep: int) -> None:
        for old in snapshots[: max(0, len(snapshots) - keep)]:
            with suppress(ApiError):  # samples use it; the next start deletes it at the latest
                self._checkpoints.delete(old)
                snapshots.remove(old)

    def _targets(self, lora: types.LoraConfig) -> dict[str, int]:
        """Return the linears to train, with the number of their inputs and outputs."""
        head, found = self._model.get_output_embeddings(), {}
        for name, one in self._model.named_modules():
            if isinstance(one, RemoteLayer) or is_linear(one):
                attention = any("att" in part for part in name.split(".")[:-1])
                if lora.train_unembed if one is head else lora.train_attn if attention else lora.train_mlp:
                    found[name] = sum(one.weight.shape)
        return found

    def _adopt(self, run: Run, source: LoraConfig | Path, lora: types.LoraConfig) -> None:
        """Make or load the adapter of a training client, in place of the one that it has."""
        size = 4 * 5 * lora.rank * sum(self._targets(lora).values())  # float32; gradients twice, and Adam's averages
        taken = size + sum(other.size for other in self.runs(run.client) if other is not run)
        if taken > self._memory:
            raise ApiError(400, f"this key's training clients would take {taken:,} bytes of {self._memory:,}; end some")
        self._free(run)
        self._tasks.register(run.task, source)
        with warnings.catch_warnings():
            # nothing is merged here, and PEFT corrects `fan_in_fan_out`
            warnings.filterwarnings("ignore", r"Model (has|with) `tie_word_embeddings|fan_in_fan_out is set")
            self._tasks.load(run.task, trainable=True)
        run.held.enter_context(self._tasks.hold(run.task))
        run.parameters, run.lora, run.size = list(self._tasks.parameters(run.task)), lora, size

    def _free(self, run: Run) -> None:
        run.held.close()
        run.parameters, run.size = [], 0
        run.averages.clear()
        if run.task in self._tasks:
            self._tasks.unregister(run.task, discard=True)

    # The thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(run.ended or run.jobs for run in self._every()))
                if self._closed:
                    break
            try:
                for run in self._every():
                    if run.ended:
                        self._drop(run)
                heads = [run.jobs[0] for run in self._every() if run.jobs]
                for job in {job.run.client: job for job in reversed(heads) if job.work is not None}.values():
                    self._work(job)
                if chosen := self._chosen():
                    self._compute(chosen)
            except Exception:  # the thread must not end
                log.exception("a round failed")
        for run in self._every():
            self._drop(run)

    def _drop(self, run: Run) -> None:
        """Forget a training client that has ended."""
        with self._changed:
            self._runs[run.client].pop(run.id, None)
        while run.jobs:
            run.jobs.popleft().future.fail(ApiError(400, "the training client has ended"))
        self._free(run)
        self._forget(run.snapshots, keep=0)

    def _work(self, job: Job) -> None:
        assert job.work is not None
        try:
            job.future.set(job.work())
        except Exception as error:
            job.run.ended |= not job.run.parameters  # there is nothing to train
            job.future.fail(error)
        job.run.jobs.popleft()

    def _chosen(self) -> list[tuple[Job, Example]]:
        """Choose the examples of a round: one of each client in turn, from its training clients in turn."""
        with self._changed:
            own = [[run.jobs[0].left() for run in runs.values() if run.jobs] for runs in self._runs.values()]
        chosen: list[tuple[Job, Example]] = []
        room = LOGITS
        for job, example in _alternating([_alternating(of) for of in own]):
            room -= 4 * self.vocabulary * len(example.tokens)
            if chosen and (room < 0 or len(chosen) == _PASSES):
                break
            chosen.append((job, example))
        with self._changed:
            for job, _ in chosen:
                runs = self._runs[job.run.client] = self._runs.pop(job.run.client)
                runs[job.run.id] = runs.pop(job.run.id)
        return chosen

    def _compute(self, chosen: list[tuple[Job, Example]]) -> None:
        """Compute a round, and end the requests of which it was the last one. One that fails changes no gradient."""
        jobs = list(dict.fromkeys(job for job, _ in chosen))
        trained = [job for job in jobs if job.backward]
        self._together.active = len(chosen)

        def compute(part: tuple[Job, Example]) -> tuple[Tensor, float]:
            job, example = part
            try:
                with self._together.taking_part(), self._tasks.batch([job.run.task]), torch.enable_grad():
                    return self._pass(job, example)
            except Exception as error:  # of this request alone
                job.error = job.error or error
                return torch.empty(0, dtype=torch.float32, device="cpu"), 0.0

        try:
            for job in trained:
                job.before = job.before or [None if p.grad is None else p.grad.clone() for p in job.run.parameters]
            parameters = nn.ParameterList(p for job in trained for p in job.run.parameters)
            for (job, _), result in zip(chosen, overlapped(parameters, compute, chosen), strict=True):
                job.results.append(result)
        except Exception as error:
            for job in jobs:
                job.error = error
        for job in jobs:
            if job.error is None and job.left():
                continue
            try:
                if job.error is not None:
                    raise job.error
                job.future.set(outputs_message(job.results))
            except Exception as error:
                for parameter, gradient in zip(job.run.parameters, job.before, strict=False):
                    parameter.grad = gradient
                job.future.fail(error)
            job.run.jobs.popleft()

    def _pass(self, job: Job, example: Example) -> tuple[Tensor, float]:
        device = self._model.device
        logits = self._model(input_ids=example.tokens[None].to(device), use_cache=False).logits[0].float()
        found = logits.log_softmax(-1).gather(-1, example.targets[:, None].to(device))[:, 0].cpu()
        loss = example.loss(found)
        if not loss.isfinite():
            raise ApiError(400, "the loss is inf or nan; nothing was added to the gradients")
        if job.backward:
            loss.backward()
        return found.detach(), float(loss.detach())


def _alternating(lists: Iterable[Iterable[T]]) -> list[T]:
    """Return the first of each, then the second of each, and so on."""
    return [one for every in zip_longest(*lists) for one in every if one is not None]
