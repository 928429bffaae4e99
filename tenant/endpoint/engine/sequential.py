"""The engine for models that `PackedModel` does not support: one request at a time, with `model.generate()`."""

import copy
import logging
import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from symbiosis_priv.errors import ConfigError, OverloadedError, SymbiosisError
from tenant.endpoint.engine.answer import GeneratedAnswer
from tenant.endpoint.engine.requests import Engine, EngineRequest, Load, RequestLedger, Sink
from tenant.endpoint.engine.sampling import token_logprob
from tenant.endpoint.engine.sequence import check, costs, counters
from tenant.endpoint.engine.turns import Turns
from tenant.model.ledger import since
from tenant.session.tally import Ledger
from tenant.tasks import Tasks

log = logging.getLogger(__name__)

_LOGITS = 1 << 30  # limit of the bytes of a prompt's logits
_STOP_S = 60.0  # seconds for the token in progress when the engine closes


class SequentialEngine(Engine):
    """Answers one request at a time; clients take turns.

    Args:
        model: a split or whole model that generates.
        tasks: the adapters; None for none.
        max_waiting: limit of requests that wait. A client may have at most as many of them as stay free.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, tasks: Tasks | None = None, max_waiting: int = 64
    ) -> None:
        self._model = copy.copy(model)  # has its own generation settings and shares the layers
        self._model.generation_config = GenerationConfig()
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._max_waiting = max_waiting
        self._context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._waiting = Turns[_Job]()
        self._running: _Job | None = None
        self._steps = 0  # each yields one token
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="endpoint-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, sink: Sink) -> "_Job":
        check(request, adapters=self._tasks or (), context=self._context)
        logits = len(request.prompt) * self._model.config.get_text_config().vocab_size * 4
        if request.sampling.prompt_logprobs is not None and logits > _LOGITS:
            raise ConfigError(
                f"log probabilities of {len(request.prompt):,} tokens of prompt take {logits:,} bytes here, more than "
                f"{_LOGITS:,}; ask for those of a shorter prompt"
            )
        job = _Job(GeneratedAnswer(request, sink, self._tokenizer), self)
        with self._changed:
            if self._closed:
                raise OverloadedError("the endpoint is stopping")
            self._waiting.check_share(request.client, self._max_waiting)
            self._waiting.add(job)
            self._changed.notify_all()
        return job

    def load(self) -> Load:
        with self._changed:
            return Load(
                running=int(self._running is not None),
                waiting=len(self._waiting),
                steps=self._steps,
                tokens=self._steps,
                rows=self.session_ledger().rows,
            )

    def close(self, *, drain_s: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and self._running is None, timeout=drain_s)
            left = [*self._waiting, *([self._running] if self._running else [])]
        for job in left:
            job.cancel()
        self._thread.join(_STOP_S)

    def withdraw(self, job: "_Job") -> None:
        """Take a cancelled request out of the queue, and report its end in the caller's thread."""
        with self._changed:
            if job not in self._waiting:
                return  # the request runs and ends at its next token, or has ended
            self._waiting.remove(job)
        job.answer.done(RequestLedger())

    def session_ledger(self) -> Ledger:
        """Return the counters of the model's session; zeros without one."""
        return counters(self._model)

    def _next(self) -> "_Job | None":
        with self._changed:
            self._running = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if (job := self._waiting.first()) is None:
                return None
            self._waiting.remove(job)
            self._running, job.before = job, self.session_ledger()
            return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._answer(job)
            except SymbiosisError as error:
                job.answer.fail(error)
            except Exception as error:
                log.error("request %s failed: %s", job.request.id, type(error).__name__)
                job.answer.fail(SymbiosisError(f"the model failed on this request ({type(error).__name__})"))
            else:
                job.answer.done(job.ledger())
            job.final = job.ledger()

    def _answer(self, job: "_Job") -> None:
        request = job.request
        if job.cancelled:
            return
        batch = (
            nullcontext() if self._tasks is None or request.adapter is None else self._tasks.batch([request.adapter])
        )
        ids = torch.tensor([request.prompt], dtype=torch.long, device=self._model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with batch, torch.no_grad():
            if request.pooling is not None:
                hidden = self._model.base_model(**given).last_hidden_state[0]
                job.answer.embedded(hidden[-1] if request.pooling == "last" else hidden.float().mean(dim=0))
                return
            job.answer.start(self._prompt_logprobs(request, given))
            if job.answer.finish is None:
                self._model.generate(
                    **given,
                    generation_config=GenerationConfig(max_new_tokens=request.max_tokens, do_sample=False),
                    logits_processor=LogitsProcessorList([_Steps(job, self)]),
                    stopping_criteria=StoppingCriteriaList([_Ended(job)]),
                )

    def _prompt_logprobs(self, request: EngineRequest, given: dict[str, Tensor]) -> list[Any]:
        top = request.sampling.prompt_logprobs
        if top is None:
            return []
        logits = self._model(**given).logits[0]
        pairs = zip(logits, request.prompt[1:], strict=False)
        return [None, *(token_logprob(row, token, top=top) for row, token in pairs)]

    def count(self) -> None:
        """Count a token."""
        self._steps += 1


class _Job:
    """A request that the engine has accepted."""

    def __init__(self, answer: GeneratedAnswer, engine: SequentialEngine) -> None:
        self.answer, self.request = answer, answer.request
        self.cancelled = False
        self.before: Ledger | None = None  # the session's counters at the start of this request
        self.final: RequestLedger | None = None
        self._engine = engine

    def cancel(self) -> None:
        self.cancelled = True
        self._engine.withdraw(self)

    def ledger(self) -> RequestLedger:
        if self.final is not None or self.before is None:
            return self.final or RequestLedger()
        return costs(since(self.before, self._engine.session_ledger()))


class _Steps(LogitsProcessor):
    """Lets the request's own sampler choose each token: the only token that `generate()` can choose."""

    def __init__(self, job: _Job, engine: SequentialEngine) -> None:
        self._job = job
        self._engine = engine

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = self._job.answer
        if answer.finish is not None or self._job.cancelled:
            return scores  # on a GPU, `generate()` calls `_Ended` one token late
        self._engine.count()
        only = torch.full_like(scores, -torch.inf)
        only[0, answer.add(scores[0])] = 0.0
        return only


class _Ended(StoppingCriteria):
    def __init__(self, job: _Job) -> None:
        self._job = job

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        ended = self._job.answer.finish is not None or self._job.cancelled
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)
