"""The application: all routes, behind the guard."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from tenant.endpoint.api.endpoint import Endpoint, EndpointMetrics, Settings
from tenant.endpoint.api.errors import ApiError, ErrorAnswer
from tenant.endpoint.api.guard import Guard
from tenant.endpoint.api.routes import chat, completions, models, responses
from tenant.endpoint.api.service import Service

_STATUSES = {
    400: "a field is wrong or not supported",
    401: "the key is missing or wrong",
    403: "not allowed",
    404: "no such model",
    408: "the body was late",
    409: "in use",
    413: "the body is too large",
    421: "the Host header is wrong",
    429: "too many requests wait",
    500: "an error of the endpoint",
    503: "the providers gave no answer, or the endpoint stops",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _STATUSES.items()
}


def create_app(service: Service, settings: Settings, *, routers: Sequence[APIRouter] = ()) -> Guard:
    """Return the ASGI application of an endpoint.

    Args:
        routers: additional routes. They need a key unless `settings.open_paths` has their paths.
    """
    app = FastAPI(
        title="symbiosis-priv tenant serve",
        docs_url=None,  # FastAPI's documentation pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        responses=_ERRORS,
    )
    metrics = EndpointMetrics(service.engine)
    app.state.endpoint = Endpoint(service=service, settings=settings, metrics=metrics)
    app.include_router(models.open_router)
    for router in (models.router, chat.router, completions.router, responses.router, *routers):
        app.include_router(router, dependencies=[Security(HTTPBearer(auto_error=False))])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_field)
    app.add_exception_handler(Exception, _bug)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return Guard(app, settings, metrics)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = "there is no such route; GET /openapi.json lists the routes" if error.status_code == 404 else error.detail
    answer = ApiError(error.status_code, str(detail)).response()
    answer.headers.update(error.headers or {})
    if error.status_code == 405:  # the methods of all routes of the path; starlette names those of one route
        paths = http.app.openapi()["paths"].items()
        matching = [operations for path, operations in paths if compile_path(path)[0].match(http.url.path)]
        if methods := sorted({method.upper() for operations in matching for method in operations}):
            answer.headers["Allow"] = ", ".join(methods)
    return answer


async def _wrong_field(_: Request, error: Exception) -> Response:
    """Return an error that names one wrong field, the innermost one, without its value."""
    assert isinstance(error, RequestValidationError)
    inner = max(error.errors(), key=lambda one: len(one["loc"]))
    if inner["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON").response()
    where, *location = inner["loc"]
    in_body = where == "body"
    place = _place(location, error.body) if in_body and inner["type"] != "missing" else ".".join(map(str, location))
    must_be_empty = inner["type"] == "too_long" and not inner["ctx"]["max_length"]
    if must_be_empty or inner["type"] in ("extra_forbidden", "none_required"):
        message = f"{place} is not supported; leave it out"
    else:
        message = f"{place or 'the body'}: {inner['msg']}"
    return ApiError(400, message[:500], param=place[:200] or None).response()


def _place(location: Sequence[int | str], body: Any) -> str:
    """Return the path of a field in a body. A location also names alternatives of a type (`str`), which are no
    fields."""
    path = []
    for part in location:
        known = part in body if isinstance(body, Mapping) else isinstance(body, list) and isinstance(part, int)
        if known:
            body = body[part]
            path.append(str(part))
    return ".".join(path)


async def _bug(_: Request, __: Exception) -> Response:
    return ApiError(500, "an error in the endpoint; see its log").response()


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with status 400 for a wrong field instead of FastAPI's 422."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
    return app.openapi_schema or {}
