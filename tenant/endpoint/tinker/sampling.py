"""Samples from the endpoint's engine, together with the answers of its other routes."""

from collections.abc import Sequence
from typing import Any

from tinker import types

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError, refused
from tenant.endpoint.api.service import Service
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.engine.requests import Done, EngineRequest, Handle, Sampling
from tenant.endpoint.tinker.futures import Future
from tenant.endpoint.tinker.wire import sample_message

_MOST_SAMPLES = 256
_MOST_TOP = 20
_SEED = 1 << 63


def requests_of(
    body: types.SampleRequest, service: Service, *, client: str, task: str | None, id: str
) -> list[EngineRequest]:
    """Return the requests to the engine for a `SampleRequest`. Raises `ApiError` if a field is wrong."""
    params, kinds = body.sampling_params, {chunk.type for chunk in body.prompt.chunks}
    if wrong := sorted(kinds - {"encoded_text"}):
        raise ApiError(400, f"a chunk of the prompt is {wrong[0]}; only text is read here", param="prompt")
    tokens = tuple(body.prompt.to_ints())
    new = max(service.context - len(tokens), 1) if params.max_tokens is None else params.max_tokens
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    within = bool(tokens) and 0 <= min(tokens) <= max(tokens) < service.vocabulary.size
    texts = [one for one in stop if isinstance(one, str)]
    for field, wanted, holds in (
        ("prompt", f"tokens of the vocabulary of {service.vocabulary.size:,}", within),
        ("num_samples", f"1 to {_MOST_SAMPLES}", 1 <= body.num_samples <= _MOST_SAMPLES),
        ("max_tokens", "at least 0", new >= 0),
        ("topk_prompt_logprobs", f"0 to {_MOST_TOP}", 0 <= body.topk_prompt_logprobs <= _MOST_TOP),
        ("topk_sample_logprobs", f"0 to {_MOST_TOP}", 0 <= body.topk_sample_logprobs <= _MOST_TOP),
        ("stop", "64 of 1 to 256 characters", len(stop) <= 64 and all(0 < len(one) <= 256 for one in texts)),
        ("temperature", "0 to 100", 0 <= params.temperature <= 100),
        ("top_p", "above 0 and at most 1", 0 < params.top_p <= 1),
    ):
        if not holds:
            raise ApiError(400, f"{field}: {wanted}", param=field)
    ends = service.ends if params.stop is None else frozenset(one for one in stop if not isinstance(one, str))
    return [
        EngineRequest(
            id=f"{id}-{number}",
            prompt=tokens,
            adapter=task,
            client=client,
            max_tokens=new,
            stop_tokens=ends,
            stop=tuple(texts),
            sampling=Sampling(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                seed=None if params.seed is None else (params.seed + number) % _SEED,
                logprobs=body.topk_sample_logprobs,
                prompt_logprobs=body.topk_prompt_logprobs if _wants_prompt(body) and not number else None,
            ),
            bucket=service.answer_bucket,
        )
        for number in range(body.num_samples)
    ]


def size_of(body: types.SampleRequest, requests: Sequence[EngineRequest]) -> int:
    """Return the bytes of memory that a request and its longest result take."""
    prompt, new = len(requests[0].prompt), sum(one.max_tokens for one in requests)
    return int(8 * (prompt * (2 + body.topk_prompt_logprobs) + new * (1 + body.topk_sample_logprobs)))


def start(body: types.SampleRequest, requests: Sequence[EngineRequest], service: Service, future: Future) -> None:
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


def _wants_prompt(body: types.SampleRequest) -> bool:
    return bool(body.prompt_logprobs or body.topk_prompt_logprobs)


def _message(body: types.SampleRequest, found: Sequence[Gathered], ends: Sequence[Done]) -> bytes:
    if any(one.finish == "cancelled" for one in ends):
        raise ApiError(503, "the sample was cancelled")
    return sample_message(
        found,
        [one.finish == "stop" for one in ends],
        found[0].prompt if _wants_prompt(body) else None,
        cached=ends[0].ledger.cached_tokens,
        top_prompt=body.topk_prompt_logprobs,
        top=body.topk_sample_logprobs,
    )
