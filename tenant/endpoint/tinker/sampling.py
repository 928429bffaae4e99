"""Samples from the endpoint's engine, together with the answers of its other routes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tenant.endpoint.api.bodies import CompletionRequest
from tenant.endpoint.api.errors import ApiError, invalid
from tenant.endpoint.api.running import Running, several
from tenant.endpoint.api.service import Service
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.engine.requests import EngineRequest, TokenLogprob

_NO_LOGPROB = -99999.0  # what the client takes for an empty place in a table of most probable tokens


async def requests_of(
    body: types.SampleRequest, service: Service, *, client: str, task: str | None
) -> list[EngineRequest]:
    """Return the requests to the engine: those for the same completions, with Tinker's stop tokens. Raises `ApiError`
    if a field is wrong."""
    if wrong := [chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"]:
        raise ApiError(400, f"a chunk of the prompt is {wrong[0]}; only text is read here", param="prompt")
    params, top = body.sampling_params, (body.topk_sample_logprobs, body.topk_prompt_logprobs)
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [one for one in stop if isinstance(one, str)]
    given = {name: getattr(params, name) for name in ("max_tokens", "seed", "temperature", "top_p")}
    given |= {"model": service.name, "prompt": body.prompt.to_ints(), "n": body.num_samples, "stop": texts}
    given |= {"top_k": max(params.top_k, 0), "logprobs": min(top) if min(top) < 0 else max(top)}
    try:
        checked = CompletionRequest.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from None
    [prompt] = await service.prompts(checked.prompt, param="prompt", client=client)
    one = service.request(
        checked, prompt, client=client, limit=checked.max_tokens, default=service.context, logprobs=top[0]
    )
    ends = one.stop_tokens if params.stop is None else frozenset(stop) - frozenset(texts)
    first, *others = several(replace(one, adapter=task, stop_tokens=ends), body.num_samples)
    if body.prompt_logprobs or top[1]:
        first = replace(first, sampling=replace(first.sampling, prompt_logprobs=top[1]))
    return [first, *others]


async def gathered(body: types.SampleRequest, running: Running) -> bytes:
    """Return the message of all samples of a request."""
    samples = [Gathered() for _ in range(body.num_samples)]
    async for index, event in running:
        samples[index](event)
    ends = [one.done.result() for one in samples]
    message = pb.SampleResponse(prompt_cache_hit_tokens=ends[0].ledger.cached_tokens)
    for one, end in zip(samples, ends, strict=True):
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if end.finish == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.array([token.id for token in one.tokens], np.int32).tobytes(),
            logprobs=_floats(one.logprobs()),
        )
        if top := body.topk_sample_logprobs:
            sequence.topk_sampled_logprobs.CopyFrom(_table(one.logprobs(), top))
    if prompt := samples[0].prompt:
        message.prompt_logprobs = _floats(prompt)
        if top := body.topk_prompt_logprobs:
            message.topk_prompt_logprobs.CopyFrom(_table(prompt, top))
    return bytes(message.SerializeToString())


def _floats(logprobs: Sequence[TokenLogprob | None]) -> bytes:
    return np.array([np.nan if one is None else one.logprob for one in logprobs], np.float32).tobytes()


def _table(logprobs: Sequence[TokenLogprob | None], k: int) -> Any:
    tokens, values = np.zeros((len(logprobs), k), np.int32), np.full((len(logprobs), k), _NO_LOGPROB, np.float32)
    for row, one in enumerate(logprobs):
        for place, (token, value) in enumerate(() if one is None else one.top[:k]):
            tokens[row, place], values[row, place] = token, value
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=values.tobytes(), k=k, length=len(logprobs))
