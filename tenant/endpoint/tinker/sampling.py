"""Samples from the endpoint's engine, together with the answers of its other routes."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, refused
from tenant.endpoint.api.service import OWNED, Service
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed, Handle, Sampling, Started, Token
from tenant.endpoint.engine.requests import TokenLogprob as Logprob
from tenant.endpoint.tinker.checkpoints import Checkpoints, Place, Record
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.wire import Sample, Sizes, checked_tokens, sample_message
from tenant.tasks import Tasks

_MOST_SAMPLES = 256
_MOST_TOP = 20
_SEED = 1 << 63


def task_name(place: Place, record: Record) -> str:
    """Return the name of a checkpoint's task. Another checkpoint at the same place has another one."""
    identity = "\n".join((*place, str(record.time)))
    return f"{OWNED}{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def task_of(place: Place, tasks: Tasks, checkpoints: Checkpoints) -> str:
    """Return the task of a checkpoint, which is registered if it is not. Raises `ApiError` if there is no such
    checkpoint, or its folder is not a PEFT folder."""
    task = task_name(place, checkpoints.record(place))
    if task not in tasks:
        try:
            tasks.register(task, checkpoints.folder(place), within=checkpoints.folder(place))
        except SymbiosisError as error:
            raise refused(error) from error
    return task


def requests_of(body: Any, service: Service, *, client: str, task: str | None, id: str) -> list[EngineRequest]:
    """Return the requests to the engine for a `SampleRequest`. Raises `ApiError`: a field is wrong, or not offered."""
    for field in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(body, field):
            raise ApiError(400, f"{field} is not offered here; leave it out", param=field)
    params, tokens = body.sampling_params, []
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise ApiError(400, f"a chunk of the prompt is {chunk.type}; only text is read here", param="prompt")
        tokens += chunk.tokens
    try:
        checked = np.array(tokens, np.int64)
    except (OverflowError, ValueError):
        raise ApiError(400, "a token of the prompt is no token of this model", param="prompt") from None
    sizes = Sizes(vocabulary=service.vocabulary.size, tokens=service.context)
    checked_tokens(checked, sizes, name="prompt")
    left = service.context - len(tokens)
    new = left if params.max_tokens is None else params.max_tokens
    if not 1 <= body.num_samples <= _MOST_SAMPLES:
        raise ApiError(400, f"num_samples is from 1 to {_MOST_SAMPLES}", param="num_samples")
    if not 0 <= new <= left:
        raise ApiError(400, f"max_tokens: this prompt leaves {left:,} tokens of the context", param="max_tokens")
    tops = body.topk_prompt_logprobs, body.topk_sample_logprobs
    if not all(0 <= top <= _MOST_TOP for top in tops):
        raise ApiError(400, f"top-k log probabilities: k is from 0 to {_MOST_TOP}")
    last = body.prompt_logprobs_last_n
    if last is not None and not 1 <= last < len(tokens):
        raise ApiError(400, "prompt_logprobs_last_n is from 1 to one below the prompt's tokens")
    stop, texts = _stop(params.stop, service)
    if not 0 <= params.temperature <= 100 or not 0 < params.top_p <= 1:
        raise ApiError(400, "temperature is from 0 to 100, and top_p above 0 and at most 1", param="sampling_params")
    wants_prompt = body.prompt_logprobs or body.topk_prompt_logprobs
    return [
        EngineRequest(
            id=f"{id}-{number}",
            prompt=tuple(tokens),
            adapter=task,
            client=client,
            max_tokens=new,
            stop_tokens=stop,
            stop=texts,
            sampling=Sampling(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                seed=None if params.seed is None else (params.seed + number) % _SEED,
                logprobs=body.topk_sample_logprobs,
                prompt_logprobs=body.topk_prompt_logprobs if wants_prompt and not number else None,
            ),
            bucket=service.answer_bucket,
        )
        for number in range(body.num_samples)
    ]


def _stop(given: Any, service: Service) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the tokens and texts that end a sample: for None, those of the model; for an empty list, none."""
    if given is None:
        return service.ends, ()
    stops = [given] if isinstance(given, str) else list(given)
    if len(stops) > 64 or any(isinstance(one, str) and not 0 < len(one) <= 256 for one in stops):
        raise ApiError(400, "stop: at most 64 tokens, or texts of 1 to 256 characters", param="stop")
    texts = tuple(one for one in stops if isinstance(one, str))
    return frozenset(one for one in stops if not isinstance(one, str)), texts


class Samples:
    """The samples of one request, while the engine computes them. `future` gets their message."""

    def __init__(self, body: Any, requests: Sequence[EngineRequest], future: Future) -> None:
        self._body, self._requests, self._future = body, requests, future
        self._tokens: list[list[Token]] = [[] for _ in requests]
        self._dones: dict[int, Done] = {}
        self._prompt: tuple[Logprob | None, ...] = ()
        self._handles: list[Handle] = []

    def start(self, submit: Callable[[EngineRequest, Callable[[Event], None]], Handle]) -> None:
        """Send all requests to the engine. Raises `ApiError` if it refuses one."""
        try:
            for number, request in enumerate(self._requests):
                self._handles.append(submit(request, partial(self._receive, number)))
        except SymbiosisError as error:
            self.cancel()
            raise refused(error) from error

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._future.fail(ApiError(499, "the request was cancelled"))

    def _receive(self, number: int, event: Event) -> None:
        """Receive an event, in the engine's thread."""
        if isinstance(event, Started) and not number:
            self._prompt = event.prompt_logprobs
        elif isinstance(event, Token):
            self._tokens[number].append(event)
        elif isinstance(event, Failed):
            self._future.fail(event.error)
        elif isinstance(event, Done):
            self._dones[number] = event
            if event.finish == "cancelled":
                self._future.fail(ApiError(503, "the sample was cancelled"))
            if len(self._dones) == len(self._requests):
                try:
                    self._future.set(self._message())
                except Exception as error:  # the engine's thread must not see it
                    self._future.fail(error)

    def _message(self) -> bytes:
        body, samples = self._body, []
        for number, tokens in enumerate(self._tokens):
            done = self._dones[number]
            ended = [*tokens, *([done.stop] if done.stop is not None else [])]
            logprobs = [one.logprob for one in ended if one.logprob is not None]
            samples.append(Sample(tokens=[one.id for one in ended], logprobs=logprobs, stopped=done.finish == "stop"))
        prompt: list[Logprob | None] | None = None
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            unscored = len(self._prompt) - (body.prompt_logprobs_last_n or len(self._prompt))
            prompt = [None if place < unscored else one for place, one in enumerate(self._prompt)]
        cached = self._dones[0].ledger.cached_tokens
        tops = {"top_prompt": body.topk_prompt_logprobs, "top": body.topk_sample_logprobs}
        return sample_message(samples, prompt, cached=cached, **tops)
