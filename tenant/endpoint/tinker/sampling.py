"""Samples from the endpoint's engine, together with the answers of its other routes."""

import hashlib
from collections.abc import Sequence
from typing import Any

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, refused
from tenant.endpoint.api.service import OWNED, Service
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.engine.requests import Done, EngineRequest, Handle, Sampling
from tenant.endpoint.tinker.checkpoints import Checkpoints, Place, Record
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.wire import sample_message
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
    params, tokens = body.sampling_params, list[int]()
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise ApiError(400, f"a chunk of the prompt is {chunk.type}; only text is read here", param="prompt")
        tokens += chunk.tokens
    new = max(service.context - len(tokens), 1) if params.max_tokens is None else params.max_tokens
    last, tops = body.prompt_logprobs_last_n, (body.topk_prompt_logprobs, body.topk_sample_logprobs)
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    within = bool(tokens) and 0 <= min(tokens) <= max(tokens) < service.vocabulary.size
    stops = len(stop) <= 64 and all(0 < len(one) <= 256 for one in stop if isinstance(one, str))
    for field, wanted, holds in (
        ("prompt", f"tokens of the vocabulary of {service.vocabulary.size:,}", within),
        ("num_samples", f"1 to {_MOST_SAMPLES}", 1 <= body.num_samples <= _MOST_SAMPLES),
        ("max_tokens", "at least 0", new >= 0),
        ("topk_prompt_logprobs, topk_sample_logprobs", f"0 to {_MOST_TOP}", all(0 <= k <= _MOST_TOP for k in tops)),
        ("prompt_logprobs_last_n", "1 to one below the prompt's tokens", last is None or 1 <= last < len(tokens)),
        ("stop", "at most 64 tokens, or texts of 1 to 256 characters", stops),
        ("temperature", "0 to 100", 0 <= params.temperature <= 100),
        ("top_p", "above 0 and at most 1", 0 < params.top_p <= 1),
    ):
        if not holds:
            raise ApiError(400, f"{field}: {wanted}", param=field)
    ends = service.ends if params.stop is None else frozenset(one for one in stop if not isinstance(one, str))
    wants_prompt = body.prompt_logprobs or body.topk_prompt_logprobs
    return [
        EngineRequest(
            id=f"{id}-{number}",
            prompt=tuple(tokens),
            adapter=task,
            client=client,
            max_tokens=new,
            stop_tokens=ends,
            stop=tuple(one for one in stop if isinstance(one, str)),
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


def start(body: Any, requests: Sequence[EngineRequest], service: Service, future: Future) -> None:
    """Send all samples of a request to the engine; `future` gets their message. Raises `ApiError` if one is refused."""
    found, handles = [Gathered() for _ in requests], list[Handle]()

    def cancel() -> None:
        for handle in handles:
            handle.cancel()
        future.fail(ApiError(499, "the request was cancelled"))

    def ended(done: Any) -> None:
        try:
            if done.exception() is not None or all(one.done.done() for one in found):
                done.result()
                future.set(_message(body, found, [one.done.result() for one in found]))
        except Exception as error:  # the engine's thread must not see it
            future.fail(error)

    future.cancel = cancel
    for one in found:
        one.done.add_done_callback(ended)
    try:
        for request, sink in zip(requests, found, strict=True):
            handles.append(service.engine.submit(request, sink))
    except SymbiosisError as error:
        cancel()
        raise refused(error) from error


def _message(body: Any, found: Sequence[Gathered], ends: Sequence[Done]) -> bytes:
    if any(one.finish == "cancelled" for one in ends):
        raise ApiError(503, "the sample was cancelled")
    prompt = None
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        scored = found[0].prompt[-(body.prompt_logprobs_last_n or len(found[0].prompt)) :]
        prompt = [*[None] * (len(found[0].prompt) - len(scored)), *scored]
    tops = {"top_prompt": body.topk_prompt_logprobs, "top": body.topk_sample_logprobs}
    stopped = [one.finish == "stop" for one in ends]
    return sample_message(found, stopped, prompt, cached=ends[0].ledger.cached_tokens, **tops)
