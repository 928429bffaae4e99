"""`POST /v1/embeddings`: hidden states of the last layer, pooled and scaled to length 1."""

import base64

import numpy as np
from fastapi import APIRouter, Request

from tenant.endpoint.api.answers import Embedding, Embeddings, EmbeddingUsage, new_id
from tenant.endpoint.api.bodies import EmbeddingRequest, JsonRoute
from tenant.endpoint.api.endpoint import endpoint_of
from tenant.endpoint.api.running import Running, collected, while_connected
from tenant.endpoint.engine import requests as engine

router = APIRouter(route_class=JsonRoute)


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
