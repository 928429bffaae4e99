"""`POST /classify`, `/score` and `/rerank` of a model that classifies texts, as vLLM has them. Texts of all requests
and tasks share passes."""

import time
from collections.abc import Sequence

import torch
from fastapi import APIRouter, Request

from tenant.endpoint.api.bodies import ClassifyRequest, JsonRoute, RerankRequest, ScoreRequest
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import Json, new_id, pooled, while_connected
from tenant.endpoint.api.service import endpoint_of
from tenant.endpoint.engine.classifying import TYPES

router = APIRouter(route_class=JsonRoute)
Text = tuple[list[int], list[int] | None]
"""Token ids, and for some models the type of each."""
_AT_A_TIME = 128  # texts


@router.post("/classify")
async def classify(body: ClassifyRequest, http: Request) -> Json:
    """Classify one text or several, by a model or adapter."""
    endpoint = endpoint_of(http)
    service, client = endpoint.service, endpoint.client(http)
    prompts = await while_connected(http, service.prompts(body.input, param="input", client=client))
    found = await _probabilities([(tokens, None) for tokens in prompts], body.model, http, body.use_activation)
    names = service.labels or {}
    data = []
    for index, values in enumerate(found):
        best = max(range(len(values)), key=values.__getitem__)
        data.append({"index": index, "label": names[best], "probs": values, "num_classes": len(values)})
    return _listed("classify", body.model, data, [len(tokens) for tokens in prompts])


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreRequest, http: Request) -> Json:
    """Score pairs of texts: one with each of several, or each with the one at its place."""
    queries = [body.queries] if isinstance(body.queries, str) else body.queries
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    if len(queries) not in (1, len(documents)):
        raise ApiError(
            400, f"{len(queries)} queries and {len(documents)} documents; send one query, or as many", param="queries"
        )
    if len(queries) == 1:
        queries = queries * len(documents)
    values, lengths = await _scores(queries, documents, body.model, http, body.use_activation)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
    return _listed("score", body.model, data, lengths)


@router.post("/v2/rerank")
@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(body: RerankRequest, http: Request) -> Json:
    """Order documents by how well they answer a query."""
    values, lengths = await _scores([body.query] * len(body.documents), body.documents, body.model, http, None)
    results: list[Json] = [
        {"index": index, "relevance_score": value}
        for index, value in sorted(enumerate(values), key=lambda one: -one[1])[: body.top_n or len(values)]
    ]
    for one in results if body.return_documents is not False else ():
        one["document"] = {"text": body.documents[one["index"]]}
    return {"id": new_id("rerank"), "model": body.model, "results": results, "usage": _usage(lengths)}


async def _scores(
    queries: Sequence[str], documents: Sequence[str], model: str, http: Request, activation: bool | None
) -> tuple[list[float], list[int]]:
    """Return the score of each pair, and its number of tokens. Raises `ApiError`: the model has several labels."""
    endpoint = endpoint_of(http)
    service, client = endpoint.service, endpoint.client(http)
    if len(service.labels or ()) != 1:
        raise ApiError(400, f"{model[:80]!a} has several labels and so no score; use /classify", param="model")
    for text in (*queries, *documents):
        service.check_length(text, param="documents")

    def tokenize() -> list[Text]:
        coded = service.tokenizer(list(queries), list(documents))
        return list(zip(coded["input_ids"], coded.get(TYPES) or [None] * len(documents), strict=True))

    texts = await while_connected(http, service.in_thread(client, tokenize))
    found = await _probabilities(texts, model, http, activation)
    return [values[0] for values in found], [len(tokens) for tokens, _ in texts]


async def _probabilities(
    texts: Sequence[Text], model: str, http: Request, activation: bool | None
) -> list[list[float]]:
    """Return the probabilities of each text's labels; the logits if `activation` is False, or for a regression."""
    found: list[list[float]] = [[] for _ in texts]
    problem = endpoint_of(http).service.model.config.problem_type

    def take(index: int, vector: Sequence[float]) -> None:
        logits = torch.tensor(vector, dtype=torch.float64, device="cpu")
        if activation is not False and problem != "regression":
            one_of = len(logits) > 1 and problem != "multi_label_classification"
            logits = logits.softmax(dim=0) if one_of else logits.sigmoid()
        found[index] = logits.tolist()

    await pooled(http, texts, take, model=model, pooling="logits", most=_AT_A_TIME)
    return found


def _listed(kind: str, model: str, data: list[Json], lengths: Sequence[int]) -> Json:
    head = {"id": new_id(kind), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": _usage(lengths)}


def _usage(lengths: Sequence[int]) -> Json:
    return {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
