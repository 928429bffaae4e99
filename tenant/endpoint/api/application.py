"""The application: all routes, behind the guard that checks every request."""

import asyncio
import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from symbiosis_priv.network.addresses import names_host
from symbiosis_priv.system.fair_share import FairShare
from tenant.endpoint.api.errors import ApiError, shown
from tenant.endpoint.api.routes import chat, classify, completions, messages, models, responses
from tenant.endpoint.api.service import Endpoint, Service, Settings

_DROPPED = 8
_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "store": "nothing is stored here, so leave it out, or send false",
    "best_of": "use n",
    "reasoning": "use chat_template_kwargs of /v1/chat/completions, if the model's template has such an option",
    "stop_token_ids": "use stop, with texts",
    "guided_json": "use response_format",
    "structured_outputs": "use response_format",
    "format": "use response_format",
    "options": "send temperature, top_k and so on as fields of the body",
    "audio": "answers are texts",
    "web_search_options": "the endpoint sends nothing to other servers; use tools",
}
"""What to do in place of fields that clients of OpenAI, vLLM and Ollama send."""


class Guard:
    """Checks every HTTP request before an ASGI application sees it: host, origin, key, the client's share of the
    requests in progress, and the size of the body. The body of a request without a key is not read, so such a request
    ends with its answer.

    The first key sees what the requests of all keys cost, because the lengths of their texts follow from it.

    Other users of this machine can connect to loopback, and so can web pages in a browser on this machine. A page does
    not know the key; the checks of `Host` and `Origin` refuse pages even if it did.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._settings = settings
        self._places = FairShare[str](settings.requests)  # requests in progress, by client
        self._digests = [sha256(key.encode()).digest() for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            headers = Headers(scope=scope)
            hosts, origins = headers.getlist("host"), headers.getlist("origin")
            if not names_host(hosts, self._settings.hosts):
                raise ApiError(421, "the Host header does not name this endpoint; see --host", code="host")
            if any(origin.partition("://")[2] != hosts[0] for origin in origins):
                raise ApiError(403, "web pages of other origins may not use this endpoint", code="origin")
            scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
            given = sha256(key.strip().encode()).digest()
            found = [known for known in self._digests if hmac.compare_digest(known, given)]
            client = found[0].hex()[:16] if scheme.lower() == "bearer" and found else ""
            opened = scope["path"] in self._settings.open_paths or scope["path"].startswith(self._settings.signed)
            if not client and not opened:
                raise ApiError(401, "send the endpoint's key: Authorization: Bearer KEY", code="invalid_api_key")
            scope.setdefault("state", {})["client"] = client
            scope["state"]["sees_all"] = bool(client) and found[0] == self._digests[0]
            if not self._places.take(client):
                message = "too many requests of this key are in progress; try again later"
                raise ApiError(429, message, code="overloaded")
            try:
                receive = await _whole_body(receive, headers, self._settings) if client else _no_body(receive)
                await self.app(scope, receive, noted)
            finally:
                self._places.give_back(client)
        except asyncio.CancelledError:  # the answers in progress have had their time to end
            if status:
                raise
            await ApiError(503, "the endpoint is stopping", code="stopping").response()(scope, receive, noted)
        except Exception as error:
            answer = shown(error)
            if not status:
                await answer.response()(scope, receive, noted)


async def _whole_body(receive: Receive, headers: Headers, settings: Settings) -> Receive:
    """Read the body, of at most `body_limit` bytes, which must arrive in time. Returns a `receive` that passes it to
    the application. Most clients send all before they read an answer, so up to eight times as many bytes are read and
    dropped before a body is refused."""
    limit, seconds = settings.body_limit, settings.body_s
    too_large = ApiError(413, f"the body of the request exceeds {limit:,} bytes", code="too_large")
    if int(headers.get("content-length", "0")) > _DROPPED * limit:
        raise too_large
    body, size, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client has closed the connection")
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
                if size > (_DROPPED * limit if more else limit):
                    raise too_large
                body += message.get("body", b"") if size <= limit else b""
    except TimeoutError:
        raise ApiError(408, f"the body of the request did not arrive in {seconds:g} s") from None
    return _replayed(bytes(body), receive)


def _no_body(receive: Receive) -> Receive:
    """Return a `receive` of an empty body. After it, only the end of the connection is told: who waits for that would
    otherwise never give the event loop back."""

    async def end() -> Message:
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return _replayed(b"", end)


def _replayed(body: bytes, then: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await then()

    return replay


def create_app(service: Service, settings: Settings, *, routers: Sequence[APIRouter] = ()) -> Guard:
    """Return the ASGI application of an endpoint. `routers`: more routes, with a key unless `open_paths` has them."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.endpoint = Endpoint(service=service, settings=settings)
    app.include_router(models.open_router)
    generating = (chat.router, completions.router, responses.router, messages.router)
    for router in (models.router, *((classify.router,) if service.labels else generating), *routers):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_field)
    bug = "an error in the endpoint; see its log"
    app.add_exception_handler(Exception, lambda *_: ApiError(500, bug).response())
    return Guard(app, settings)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    missing = f"there is no such route here, {request.url.path[:200]!a}; docs/endpoint.md lists the routes"
    answer = ApiError(error.status_code, missing if error.status_code == 404 else str(error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


async def _wrong_field(_: Request, error: Exception) -> Response:
    """Return an error that names one wrong field without its value."""
    assert isinstance(error, RequestValidationError)
    inner = min(error.errors(), key=lambda one: one["loc"][-1] != "type")  # another type has other fields
    if inner["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON").response()
    where, *location = inner["loc"]
    if where == "body":
        # a location also names forms of a value (`bodies`), which are no fields
        absent = location[-1:] if inner["type"] == "missing" else []
        body, path = error.body, []
        for part in location:
            if part in body if isinstance(body, Mapping) else isinstance(body, list) and isinstance(part, int):
                body = body[part]
                path.append(part)
        location = [*path, *absent]
    place = ".".join(map(str, location))
    hint = _INSTEAD.get(place)
    if hint is not None or inner["type"] == "extra_forbidden":
        message = f"{place} is not supported; {hint or 'leave it out'}"
    else:
        message = f"{place or 'the body'}: {inner['msg']}"
    return ApiError(400, message[:500], param=place[:200] or None).response()
