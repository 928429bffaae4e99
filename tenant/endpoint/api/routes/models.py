"""`/v1/models`, `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`, `/health`, `/ready` and `/metrics`."""

import logging
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse

from symbiosis_priv.errors import CheckpointError, ConfigError, TaskError
from tenant.endpoint.api.bodies import JsonRoute, LoadRequest, UnloadRequest
from tenant.endpoint.api.errors import ApiError, public
from tenant.endpoint.api.service import OWNED, Endpoint, endpoint_of, sees_all
from tenant.model.loading import warn_of_other_template
from tenant.tasks import Tasks

log = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute)
open_router = APIRouter()
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


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


@router.post("/v1/load_lora_adapter", response_model=None, responses=_TEXT)
async def load_adapter(body: LoadRequest, http: Request) -> PlainTextResponse:
    """Add an adapter of any method from a folder, if the endpoint was started with `--allow-loading`."""
    endpoint = endpoint_of(http)
    tasks, folder = _loading(endpoint)
    if body.lora_name == endpoint.service.name or body.lora_name.startswith(OWNED):
        raise ApiError(400, "this is the base model's name, or begins as those of Tinker's clients", param="lora_name")
    if body.lora_name in tasks:
        raise ApiError(409, f"there is an adapter {body.lora_name} already; unload it first", param="lora_name")
    try:
        path = (folder / body.lora_path).resolve()
        if not path.is_relative_to(folder):
            raise ApiError(404, "the adapter is outside the folder of --allow-loading", param="lora_path")
        tasks.register(body.lora_name, path, within=folder)
        warn_of_other_template(path, endpoint.service.tokenizer)
    except CheckpointError as error:
        log.warning("the adapter of lora_path cannot be used: %s", error)
        raise ApiError(400, public(str(error), {path: body.lora_path}), param="lora_path") from error
    except (ConfigError, OSError, ValueError) as error:
        raise ApiError(404, "there is no PEFT folder of this name", param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None, responses=_TEXT)
async def unload_adapter(body: UnloadRequest, http: Request) -> PlainTextResponse:
    """Unload an adapter that no request uses."""
    endpoint = endpoint_of(http)
    tasks, _ = _loading(endpoint)
    if body.lora_name not in tasks or body.lora_name.startswith(OWNED):
        raise ApiError(404, f"there is no adapter {body.lora_name[:80]!a}", code="model_not_found", param="lora_name")
    if users := endpoint.service.users[body.lora_name]:
        raise ApiError(409, f"{users} requests use this adapter; wait for their end", param="lora_name")
    try:
        tasks.unregister(body.lora_name)
    except TaskError as error:
        raise ApiError(409, str(error), param="lora_name") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/metrics", response_model=None, responses=_TEXT)
async def metrics(http: Request) -> Response:
    """Return figures for Prometheus, to the first key."""
    if not sees_all(http):
        raise ApiError(
            403, "lengths of other keys' texts follow from these figures; ask with the first key", code="key"
        )
    return Response(endpoint_of(http).metrics.text(), media_type=CONTENT_TYPE_LATEST)


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


def _loading(endpoint: Endpoint) -> tuple[Tasks, Path]:
    tasks, folder = endpoint.service.tasks, endpoint.settings.adapters
    if tasks is None or folder is None:
        raise ApiError(403, "start the endpoint with --allow-loading FOLDER to load and unload adapters", code="off")
    return tasks, folder.resolve()
