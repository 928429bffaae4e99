"""The training clients, and the thread that computes their steps.

Theory of operation. Each training client is a task over the shared model, with an optimizer of its own. Its requests
arrive one after the other, because the client sends a request when the one before was answered, and are computed in
this order. Each request makes the thread compute a round: the next short request (a step of an optimizer, a checkpoint)
of each key; then some examples, in turns over keys and their training clients (`together`). The gradients of a client
are summed in the order of its examples. So losses and gradients have the same bits as if each client were alone. Only
this thread takes requests out of the queues.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
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
from tenant.endpoint.tinker.checkpoints import OPTIMIZER, WEIGHTS, Checkpoints, Place
from tenant.endpoint.tinker.futures import Result
from tenant.endpoint.tinker.together import PASSES, Together
from tenant.endpoint.tinker.wire import Example, outputs_message
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import Tasks
from tenant.worker import Worker

T = TypeVar("T")

ALPHA = 32  # as Tinker's, for every rank
LOGITS = 1 << 30  # bytes of a round's logits; an example may take four times as many, alone
_STOP_S = 60.0


@dataclass(eq=False)
class Run:
    """A training client: its adapter, its optimizer, and the requests that wait. `size`: bytes of memory. `last`: the
    last sequence number. `computed`: the last round with examples of this training client."""

    id: str
    client: str
    lora: types.LoraConfig
    parameters: list[nn.Parameter] = field(default_factory=list)
    optimizer: Any = None
    size: int = 0
    held: ExitStack = field(default_factory=ExitStack)
    last: int = -1
    jobs: "deque[Job]" = field(default_factory=deque)
    computed: int = 0

    @property
    def task(self) -> str:
        return f"{OWNED}{self.id.replace(':', '.')}"


@dataclass(eq=False)
class Job:
    """A request of a training client: `work`, which returns the result, or `examples`, whose gradients are added if
    `backward`. `gradients`: those of earlier requests, with those of `results`; the request that succeeds sets them."""

    run: Run
    work: Callable[[], Result] | None = None
    examples: Sequence[Example] = ()
    backward: bool = False
    done: Future[Result] = field(default_factory=Future)
    results: list[tuple[Tensor, float]] = field(default_factory=list)
    gradients: Sequence[Tensor | None] = ()
    error: Exception | None = None

    def left(self) -> "list[tuple[Job, Example]]":
        return [] if self.error else [(self, one) for one in self.examples[len(self.results) :]]

    def add(self, logprobs: Tensor, loss: float, gradients: Sequence[Tensor | None]) -> None:
        """Add the results of the next example."""
        before = self.gradients if self.results else [parameter.grad for parameter in self.run.parameters]
        self.gradients = [
            old if new is None else new if old is None else old + new
            for old, new in zip(before, gradients or [None] * len(before), strict=True)
        ]
        self.results.append((logprobs, loss))


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
        self._runs: dict[str, Run] = {}
        self._computed = Counter[str]()  # by key, the last round with its examples, also of clients that have ended
        self._rounds = 0
        self._thread = Worker("tinker-training")

    def close(self) -> None:
        """Stop after the round in progress."""
        self._thread.stop()
        self._thread.join(_STOP_S)
        self._together.close()

    # Requests, called by the routes

    def runs(self, client: str | None = None) -> list[Run]:
        """Return the training clients of a key, or all."""
        return [run for run in list(self._runs.values()) if client in (None, run.client)]

    def run(self, client: str, id: str) -> Run:
        """Return a training client. Raises `ApiError` if this key has none of this id."""
        run = self._runs.get(id)
        if run is None or run.client != client:
            raise ApiError(404, f"there is no training client {id[:80]!a}; it may have ended with its session")
        return run

    def submit(self, seq: int, job: Job) -> None:
        """Take a request; the first one of a training client makes it. Raises `ApiError` unless the number is above all
        earlier ones. Numbers that are left out were those of refused requests."""
        if seq <= job.run.last:
            raise ApiError(400, f"seq_id {seq}: this training client has sent {job.run.last} already")
        job.run.last = seq
        job.run.jobs.append(job)
        self._runs[job.run.id] = job.run
        self._thread.submit(self._round)

    def end(self, run: Run) -> None:
        """End a training client: the thread lets its requests fail, and frees its memory."""
        self._runs.pop(run.id, None)
        self._thread.submit(self._drop, run)

    # What a short request does, called by the thread

    def create(self, run: Run) -> Result:
        """Make a new adapter. Raises `ApiError` and `SymbiosisError`."""
        targets = [*self._targets(run.lora)]
        config = LoraConfig(task_type="CAUSAL_LM", r=run.lora.rank, lora_alpha=ALPHA, target_modules=targets)
        if not -(2**63) <= (run.lora.seed or 0) < 2**64:
            raise ApiError(400, "the seed is no number of 64 bits", param="lora_config")
        with torch.random.fork_rng(devices=[]):
            torch.seed() if run.lora.seed is None else torch.manual_seed(run.lora.seed)
            self._adopt(run, config, run.lora)
        return {"model_id": run.id}

    def load(self, run: Run, place: Place, *, optimizer: bool) -> Result:
        """Continue from a checkpoint. Raises `ApiError` and `SymbiosisError`."""
        lora, folder = self._checkpoints.record(place).lora, self._checkpoints.folder(place)
        if optimizer and not (folder / OPTIMIZER).exists():
            raise ApiError(400, f"{place.uri} has no optimizer's state; load it without the optimizer")
        self._adopt(run, folder, lora)
        if optimizer:
            state = defaultdict[int, dict[str, Tensor]](dict)
            for key, tensor in load_file(folder / OPTIMIZER).items():
                number, _, name = key.partition(".")
                state[int(number)][name] = tensor
            run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
        return {"path": place.uri, "model_id": run.id}

    def step(self, run: Run, adam: types.AdamParams) -> Result:
        """One step of Adam with the gradients so far. Raises `ApiError`."""
        for name, value in adam:
            least, end = 1e-30 if name == "eps" else 0, 1 if name.startswith("beta") else inf  # 0 / eps is a number
            if not least <= value < end:
                raise ApiError(400, f"adam_params.{name} = {value}: write a number from {least:g}, below {end}")
        norm = float(nn.utils.clip_grad_norm_(run.parameters, adam.grad_clip_norm or inf))
        [group], betas = run.optimizer.param_groups, (adam.beta1, adam.beta2)
        group.update(lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)
        if isfinite(norm):
            run.optimizer.step()
        run.optimizer.zero_grad()
        if not isfinite(norm):
            raise ApiError(400, "the gradient has inf or nan; it was dropped, and the adapter is as before")
        return {"metrics": {"grad_norm": norm}}

    def save(self, run: Run, place: Place, answer: dict[str, Any], expires: datetime | None = None) -> Result:
        """Write a checkpoint. Raises `ApiError`."""
        state = run.optimizer.state_dict()["state"] if place.kind == WEIGHTS else {}
        tensors = {f"{number}.{name}": one for number, own in state.items() for name, one in own.items()}

        def write(folder: Path) -> None:
            self._tasks.save(run.task, folder)
            if place.kind == WEIGHTS:
                save_file(tensors, folder / OPTIMIZER)

        size = sum(one.nbytes for one in (*run.parameters, *tensors.values()))
        self._checkpoints.save(place, write, size, base_model=self._name, lora=run.lora, expires_at=expires)
        return answer

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
        left = self._memory - sum(other.size for other in self.runs(run.client) if other is not run)
        if not 0 < size <= left:
            text = f"rank {lora.rank} of the chosen linears takes {size:,} bytes; this key's training clients have"
            raise ApiError(400, f"{text} {left:,} left, and there must be something to train", param="lora_config")
        self._free(run)
        self._tasks.register(run.task, source)
        run.held.callback(self._tasks.unregister, run.task, discard=True)
        self._tasks.load(run.task, trainable=True)
        run.held.enter_context(self._tasks.hold(run.task))
        run.parameters, run.lora, run.size = list(self._tasks.parameters(run.task)), lora, size
        run.optimizer = torch.optim.AdamW(run.parameters, foreach=False)

    def _free(self, run: Run) -> None:
        run.held.close()
        run.parameters, run.optimizer, run.size = [], None, 0

    # The thread

    def _round(self) -> None:
        heads = [run.jobs[0] for run in self.runs() if run.jobs]
        try:
            for job in {job.run.client: job for job in reversed(heads) if job.error or not job.examples}.values():
                self._finish(job)
            if chosen := self._chosen():
                self._compute(chosen)
        except Exception as error:  # of this module: the next rounds answer with it, and it is logged then
            for job in heads:
                job.error = error
        if any(run.jobs for run in self.runs()):
            self._thread.submit(self._round)

    def _chosen(self) -> list[tuple[Job, Example]]:
        """Choose the examples of a round: one of each key in turn, from its training clients in turn. Those whose
        examples were computed last go to the end."""
        of_key = defaultdict[str, list[Run]](list)
        for run in sorted(self.runs(), key=lambda run: run.computed):
            of_key[run.client].append(run)
        keys = sorted(of_key, key=self._computed.__getitem__)
        turns = _alternating(_alternating(run.jobs[0].left() for run in of_key[key] if run.jobs) for key in keys)
        chosen: list[tuple[Job, Example]] = []
        room, self._rounds = LOGITS, self._rounds + 1
        for job, example in turns:
            room -= 4 * self.vocabulary * len(example.tokens)
            if chosen and (room < 0 or len(chosen) == PASSES):
                break
            chosen.append((job, example))
            self._computed[job.run.client] = job.run.computed = self._rounds
        return chosen

    def _compute(self, chosen: Sequence[tuple[Job, Example]]) -> None:
        """Compute a round, and answer the requests of which it was the last one."""
        for (job, _), done in zip(chosen, self._together.run(self._pass, chosen), strict=True):
            try:
                job.add(*done.result())
            except Exception as error:  # of this request alone
                job.error = error
        for job in dict.fromkeys(job for job, _ in chosen):
            if not job.left():
                self._finish(job)

    def _pass(self, chosen: tuple[Job, Example]) -> tuple[Tensor, float, Sequence[Tensor | None]]:
        """Return the log probabilities of an example's targets, its loss, and its gradients."""
        job, example = chosen
        device = self._model.device
        with self._tasks.batch([job.run.task]), torch.autograd.set_multithreading_enabled(False):
            logits = self._model(input_ids=example.tokens[None].to(device), use_cache=False).logits[0].float()
            found = logits.log_softmax(-1).gather(-1, example.targets[:, None].to(device))[:, 0].cpu()
            loss = example.loss(found)
            gradients = torch.autograd.grad(loss, job.run.parameters, allow_unused=True) if job.backward else ()
            if not all(one.isfinite().all() for one in (loss, *gradients) if one is not None):
                raise ApiError(400, "the loss is inf or nan, or its gradient; nothing was added to the gradients")
            return found.detach(), float(loss.detach()), gradients

    def _finish(self, job: Job) -> None:
        """Answer a request. One that fails changes no gradient; without an adapter, its training client ends."""
        job.run.jobs.popleft()
        try:
            if job.error is not None:
                raise job.error
            result = outputs_message(job.results) if job.work is None else job.work()
        except Exception as error:
            job.done.set_exception(error)
            if not job.run.parameters:
                self.end(job.run)
        else:
            for parameter, gradient in zip(job.run.parameters, job.gradients, strict=False):
                parameter.grad = gradient
            job.done.set_result(result)

    def _drop(self, run: Run) -> None:
        """Forget a training client that has ended."""
        while run.jobs:
            run.jobs.popleft().done.set_exception(ApiError(400, "the training client has ended"))
        self._free(run)
        self._checkpoints.forget_snapshots(self._checkpoints.owner(run.client), run.id, keep=0)


def _alternating(lists: Iterable[Iterable[T]]) -> list[T]:
    """Return the first of each, then the second of each, and so on."""
    return [one for every in zip_longest(*lists) for one in every if one is not None]
