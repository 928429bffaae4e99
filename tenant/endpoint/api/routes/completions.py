"""`POST /v1/completions`; and `POST /v1/embeddings`: hidden states of the last layer, pooled and scaled to length 1."""

import base64
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from tenant.endpoint.api.answers import (
    Completion,
    Embedding,
    Embeddings,
    EmbeddingUsage,
    TextChoice,
    TextLogprobs,
    new_id,
)
from tenant.endpoint.api.bodies import CompletionRequest, EmbeddingRequest, JsonRoute
from tenant.endpoint.api.endpoint import endpoint_of
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import (
    DOCUMENTED,
    Collected,
    Running,
    choices,
    collected,
    finish_reason,
    finite,
    respond,
    usage,
    while_connected,
)
from tenant.endpoint.api.service import Service
from tenant.endpoint.engine import requests as engine

router = APIRouter(route_class=JsonRoute)
_NEW_TOKENS = 16  # OpenAI's default
_MOST = 128  # choices of all prompts


@router.post("/v1/completions", response_model=Completion, responses=DOCUMENTED)
async def completions(body: CompletionRequest, http: Request) -> Any:
    """Continue one text or several."""
    endpoint = endpoint_of(http)
    prepared = await _Prepared.of(body, endpoint.service, endpoint.client(http))
    return await respond(prepared, http, streamed=body.stream)


class _Prepared:
    """A request whose fields have been checked, and its answers."""

    def __init__(
        self, body: CompletionRequest, service: Service, *, texts: Sequence[str], requests: list[engine.EngineRequest]
    ) -> None:
        self.requests = requests
        self._body = body
        self._service = service
        self._texts = texts
        self._head: dict[str, Any] = {"id": new_id("cmpl"), "created": int(time.time()), "model": body.model}

    @classmethod
    async def of(cls, body: CompletionRequest, service: Service, client: str) -> "_Prepared":
        """Check the fields and make the requests for the engine, ordered by prompt."""
        service.adapter(body.model)
        prompts = await service.prompts(body.prompt, param="prompt", client=client)
        n = body.n or 1
        if n * len(prompts) > _MOST:
            raise ApiError(400, f"{n} choices of {len(prompts)} prompts are more than {_MOST}", param="n")
        logprobs = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        requests = []
        for prompt in prompts:
            request = service.request(
                body, prompt, client=client, limit=body.max_tokens, default=_NEW_TOKENS, **logprobs
            )
            requests += choices(request, n)
        texts = [""] * len(requests)
        if body.echo:
            texts = [str(service.tokenizer.decode(list(one.prompt), skip_special_tokens=True)) for one in requests]
        return cls(body, service, texts=texts, requests=requests)

    def whole(self, results: list[Collected], running: Running) -> Completion:
        """Return the answer as one object."""
        found = []
        for index, answer in enumerate(results):
            tokens = [(token.id, token.logprob) for token in answer.tokens]
            found.append(
                TextChoice(
                    index=index,
                    text=self._texts[index] + answer.text,
                    logprobs=self._logprobs([*self._of_prompt(index, answer.started), *tokens], 0),
                    finish_reason=finish_reason(answer.done),
                )
            )
        dones = [answer.done for answer in results if answer.done is not None]
        return Completion(**self._head, choices=found, usage=usage(dones, self._prompts, running.ledger()))

    async def chunks(self, running: Running) -> AsyncIterator[Completion]:
        """Yield the chunks of a stream."""
        options = self._body.stream_options
        offsets = [0] * len(self.requests)
        dones: dict[int, engine.Done] = {}

        def chunk(index: int, text: str, tokens: list[Any], done: engine.Done | None = None) -> Completion:
            logprobs = self._logprobs(tokens, offsets[index]) if tokens else None
            offsets[index] += sum(len(self._service.vocabulary.text_of(token)) for token, _ in tokens)
            choice = TextChoice(
                index=index, text=text, logprobs=logprobs, finish_reason=None if done is None else finish_reason(done)
            )
            ledger = running.ledger() if options and options.include_ledger else None
            return Completion(**self._head, choices=[choice], ledger=ledger)

        async for index, event in running:
            if isinstance(event, engine.Started) and self._body.echo:
                yield chunk(index, self._texts[index], self._of_prompt(index, event))
            elif isinstance(event, engine.Token) and (event.text or event.logprob is not None):
                yield chunk(index, event.text, [(event.id, event.logprob)] if event.logprob else [])
            elif isinstance(event, engine.Done):
                dones[index] = event
                yield chunk(index, event.text, [], event)
        if options is not None and options.include_usage:
            in_order = [dones[index] for index in sorted(dones)]
            yield Completion(**self._head, choices=[], usage=usage(in_order, self._prompts, running.ledger()))

    @property
    def _prompts(self) -> int:
        return len(self.requests) // (self._body.n or 1)

    def _of_prompt(self, index: int, started: engine.Started) -> list[tuple[int, engine.TokenLogprob | None]]:
        return list(zip(self.requests[index].prompt, started.prompt_logprobs, strict=False))

    def _logprobs(self, tokens: Sequence[tuple[int, engine.TokenLogprob | None]], offset: int) -> TextLogprobs | None:
        if self._body.logprobs is None:
            return None
        text_of = self._service.vocabulary.text_of
        texts = [text_of(token) for token, _ in tokens]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops: list[dict[str, float] | None] = []
        for text, (_, found) in zip(texts, tokens, strict=True):
            if found is None:
                tops.append(None)
                continue
            top = {text: finite(found.logprob)}
            for other, logprob in found.top:  # several tokens may have the same text; the first is the most probable
                top.setdefault(text_of(other), finite(logprob))
            tops.append(top)
        return TextLogprobs(
            tokens=texts,
            token_logprobs=[None if found is None else finite(found.logprob) for _, found in tokens],
            top_logprobs=tops,
            text_offset=offsets[:-1],
        )


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, http: Request) -> Embeddings:
    """Compute the embedding of one text or of several."""
    endpoint = endpoint_of(http)
    service = endpoint.service
    adapter = service.adapter(body.model)
    prompts = await service.prompts(body.input, param="input", client=endpoint.client(http))
    requests = [
        engine.EngineRequest(
            id=new_id("embd"),
            prompt=tuple(prompt),
            adapter=adapter,
            client=endpoint.client(http),
            pooling=service.pooling,
        )
        for prompt in prompts
    ]
    running = Running(service.engine, requests, endpoint.metrics, service.users)
    try:
        answers = await while_connected(http, collected(running, len(requests)))
    finally:
        running.cancel()
    count = sum(map(len, prompts))
    data = []
    for index, answer in enumerate(answers):
        values = np.array(answer.vector, dtype=np.float64)
        values = (values / max(float(np.linalg.norm(values)), 1e-30)).astype("<f4")
        in_base64 = body.encoding_format == "base64"
        written = base64.b64encode(values.tobytes()).decode() if in_base64 else [float(value) for value in values]
        data.append(Embedding(index=index, embedding=written))
    return Embeddings(
        data=data,
        model=body.model,
        usage=EmbeddingUsage(prompt_tokens=count, total_tokens=count),
    )
