"""Checks every HTTP request before the application sees it: host, origin, key, the client's share of the requests in
progress, and the size of the body.

The body of a request without a key is not read, so such a request ends with its answer.

Other users of this machine can connect to loopback, and so can web pages in a browser on this machine. A page does not
know the key; the checks of `Host` and `Origin` refuse pages even if it did.
"""

import asyncio
import hmac
import logging
import traceback
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from symbiosis_priv.network.addresses import names_host
from symbiosis_priv.system.fair_share import FairShare
from tenant.endpoint.api.endpoint import EndpointMetrics, Settings
from tenant.endpoint.api.errors import ApiError

log = logging.getLogger(__name__)

_DROPPED = 8  # times the limit: up to this size, the rest of a body is read, because most clients send all first


class Guard:
    """An ASGI application that checks requests before it passes them to another one."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: EndpointMetrics) -> None:
        self.app = app
        self._settings = settings
        self._metrics = metrics
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
            try:
                headers = Headers(scope=scope)
                hosts, origins = headers.getlist("host"), headers.getlist("origin")
                if not names_host(hosts, self._settings.hosts):
                    raise ApiError(421, "the Host header does not name this endpoint; see --host", code="host")
                if any(_origin_host(origin) != hosts[0] for origin in origins):
                    raise ApiError(403, "web pages of other origins may not use this endpoint", code="origin")
                scheme, _, key = headers.get("authorization", "").partition(" ")
                given = sha256(key.strip().encode()).digest()
                found = [known for known in self._digests if hmac.compare_digest(known, given)]
                client = found[0].hex()[:16] if scheme.lower() == "bearer" and found else ""
                if not client and scope["path"] not in self._settings.open_paths:
                    raise ApiError(401, "send the endpoint's key: Authorization: Bearer KEY", code="invalid_api_key")
                scope.setdefault("state", {})["client"] = client
                if not self._places.take(client):
                    message = "too many requests of this key are in progress; try again later"
                    raise ApiError(429, message, code="overloaded")
                try:
                    if not client:
                        receive = _no_body
                    elif scope["path"] not in self._settings.streamed_paths:
                        receive = await self._whole_body(headers, receive)
                    await self.app(scope, receive, noted)
                finally:
                    self._places.give_back(client)
            except ApiError as error:
                if not status:
                    await error.response()(scope, receive, noted)
            except Exception as error:  # its text may quote a prompt, so only its type and place are logged
                log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
                if not status:
                    await ApiError(500, "an error in the endpoint; see its log").response()(scope, receive, noted)
        finally:
            self._metrics.answered(getattr(scope.get("route"), "path", "other"), status)

    async def _whole_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body within limits of size and time. Returns a `receive` that passes the body to the application."""
        limit = self._settings.body_limit
        too_large = ApiError(413, f"the body of the request exceeds {limit:,} bytes", code="too_large")
        if int(headers.get("content-length", "0")) > _DROPPED * limit:
            raise too_large
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(self._settings.body_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client has closed the connection")
                    part = message.get("body", b"")
                    more, size = message.get("more_body", False), size + len(part)
                    if size <= limit:
                        body += part
                    elif size > _DROPPED * limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body of the request did not arrive in {self._settings.body_s:g} s") from None
        if size > limit:
            raise too_large
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return replay


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _origin_host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
