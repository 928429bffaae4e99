"""`POST /v1/completions`; and `POST /v1/embeddings`: hidden states of the last layer, pooled and scaled to length 1."""

import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from tenant.endpoint.api.bodies import CompletionRequest, EmbeddingRequest, JsonRoute, StreamOptions
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import (
    Json,
    Running,
    finish_reason,
    finite,
    new_id,
    pooled,
    respond,
    several,
    usage,
    while_connected,
)
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.engine import requests as engine

router = APIRouter(route_class=JsonRoute)
_NEW_TOKENS = 16  # OpenAI's default
_MOST = 128  # choices of all prompts
_AT_A_TIME = 16  # embeddings


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, http: Request) -> Any:
    """Continue one text or several."""
    endpoint = endpoint_of(http)
    prepared = await while_connected(http, _Prepared.of(body, endpoint.service, endpoint.client(http)))
    return await respond(prepared, http, streamed=body.stream)


@dataclass
class _Prepared:
    """A request whose fields have been checked, and its answers. With `echo`, `_texts` has the prompt of each request,
    and `_places` those of its tokens in the text."""

    requests: list[engine.EngineRequest]
    _body: CompletionRequest
    _service: Service
    _texts: Sequence[str]
    _places: Sequence[Sequence[int]]
    _head: Json

    @classmethod
    async def of(cls, body: CompletionRequest, service: Service, client: str) -> "_Prepared":
        """Check the fields and make the requests for the engine, ordered by prompt."""
        service.adapter(body.model)
        prompts = await service.prompts(body.prompt, param="prompt", client=client)
        n = body.n or 1
        if n * len(prompts) > _MOST:
            field = "prompt" if n == 1 else "n"
            raise ApiError(400, f"{n} choices of {len(prompts)} prompts are more than {_MOST}", param=field)
        logprobs: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        requests = []
        for prompt in prompts:
            request = service.request(
                body, prompt, client=client, limit=body.max_tokens, default=_NEW_TOKENS, **logprobs
            )
            requests += several(request, n)
        texts, places = [""] * len(requests), list[list[int]]()
        if body.echo:
            decoded = [await service.in_thread(client, partial(service.decode, prompt)) for prompt in prompts]
            texts, places = map(list, zip(*(one for one in decoded for _ in range(n)), strict=True))
        head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": body.model}
        return cls(requests, body, service, texts, places, head)

    async def chunks(self, running: Running) -> AsyncIterator[Json]:
        options = self._body.stream_options or StreamOptions()
        dones: dict[int, engine.Done] = {}
        unused = {"usage": None} if options.include_usage else {}

        def chunk(index: int, text: str, tokens: list[Any], done: engine.Done | None = None) -> Json:
            choice = {
                "index": index,
                "text": text,
                "logprobs": self._logprobs(tokens) if tokens else None,
                "finish_reason": None if done is None else finish_reason(done),
            }
            ledger = {"ledger": vars(running.ledger())} if options.include_ledger else {}
            return {**self._head, **unused, "choices": [choice], **ledger}

        async for index, event in running:
            if isinstance(event, engine.Started) and self._body.echo:
                prompt = self.requests[index].prompt
                of_prompt = list(zip(prompt, event.prompt_logprobs, self._places[index], strict=False))
                yield chunk(index, self._texts[index], of_prompt)
            elif isinstance(event, engine.Token) and (event.text or event.logprob is not None):
                place = len(self._texts[index]) + event.place
                yield chunk(index, event.text, [(event.id, event.logprob, place)] if event.logprob else [])
            elif isinstance(event, engine.Done):
                dones[index] = event
                yield chunk(index, event.text, [], event)
        if options.include_usage or not self._body.stream:
            prompts = len(self.requests) // (self._body.n or 1)
            yield {**self._head, "choices": [], "usage": usage(dones, prompts, running.ledger())}

    async def whole(self, running: Running) -> Json:
        choices: list[Json] = [{"index": i, "logprobs": self._logprobs([])} for i in range(len(self.requests))]
        texts: list[list[str]] = [[] for _ in choices]
        async for chunk in self.chunks(running):
            used = chunk.get("usage")
            for part in chunk["choices"]:
                choice = choices[part["index"]]
                texts[part["index"]].append(part["text"])
                choice["finish_reason"] = part["finish_reason"]
                for name, more in (part["logprobs"] or {}).items():
                    choice["logprobs"][name] += more
        for choice, text in zip(choices, texts, strict=True):
            choice["text"] = "".join(text)
        return {**self._head, "choices": choices, "usage": used}

    def _logprobs(self, tokens: Sequence[tuple[int, engine.TokenLogprob | None, int]]) -> Json | None:
        """Return the log probabilities of tokens with their places in the text; None if they were not requested."""
        if self._body.logprobs is None:
            return None
        text_of = self._service.vocabulary.text_of
        texts = [text_of(token) for token, _, _ in tokens]
        tops: list[dict[str, float] | None] = []
        for text, (_, found, _) in zip(texts, tokens, strict=True):
            if found is None:
                tops.append(None)
                continue
            top = {text: finite(found.logprob)}
            for other, logprob in found.top:  # several tokens may have the same text; the first is the most probable
                top.setdefault(text_of(other), finite(logprob))
            tops.append(top)
        return {
            "tokens": texts,
            "token_logprobs": [None if found is None else finite(found.logprob) for _, found, _ in tokens],
            "top_logprobs": tops,
            "text_offset": [place for *_, place in tokens],
        }


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
    """Compute the embedding of one text or of several."""
    endpoint = endpoint_of(http)
    service = endpoint.service
    given = service.prompts(body.input, param="input", client=endpoint.client(http))
    prompts = await while_connected(http, given)
    found = [b""] * len(prompts)  # as JSON, because a list of numbers takes twice as much memory

    def take(index: int, vector: Sequence[float]) -> None:
        written = _written(vector, in_base64=body.encoding_format == "base64")
        found[index] = json.dumps({"object": "embedding", "index": index, "embedding": written}).encode()

    texts = [(tokens, None) for tokens in prompts]
    await pooled(http, texts, take, model=body.model, pooling=service.pooling, most=_AT_A_TIME)
    count = sum(map(len, prompts))
    head = {"object": "list", "data": [], "model": body.model}
    empty = json.dumps(head | {"usage": {"prompt_tokens": count, "total_tokens": count}}).encode()
    content = empty.replace(b"[]", b"[" + b",".join(found) + b"]", 1)
    return Response(content, media_type="application/json")


def _written(vector: Sequence[float], *, in_base64: bool) -> list[float] | str:
    """Return an embedding, scaled to length 1: numbers, or base64 of float32 in little-endian order."""
    values = np.array(vector, dtype=np.float64)
    values = (values / max(float(np.linalg.norm(values)), 1e-30)).astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if in_base64 else values.tolist()
