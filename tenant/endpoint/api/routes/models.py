"""`/v1/models`, `/health` and `/ready`."""

from typing import Any, Literal

from fastapi import APIRouter, Request

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import endpoint_of

router = APIRouter()
open_router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """List the base model and all adapters."""
    return {"object": "list", "data": endpoint_of(http).service.models()}


@router.get("/v1/models/{model:path}")
async def model(model: str, http: Request) -> dict[str, Any]:
    """Describe one model."""
    service = endpoint_of(http).service
    service.adapter(model)
    return next(one for one in service.models() if one["id"] == model)


@open_router.get("/health")
async def health(http: Request) -> dict[Literal["status"], Literal["ok"]]:
    """Report that the endpoint answers."""
    endpoint_of(http).service.engine.load()
    return {"status": "ok"}


@open_router.get("/ready")
async def ready(http: Request) -> dict[Literal["status"], Literal["ok"]]:
    """Report that an executor can be reached; otherwise, an error 503."""
    if not await endpoint_of(http).service.is_ready():
        raise ApiError(503, "no executor can be reached", code="providers")
    return {"status": "ok"}
