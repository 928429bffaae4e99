"""The page's files, and `/ledger`: the counters of the session, and what each provider can see."""

from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response

from symbiosis_priv.limits import Role
from tenant.endpoint.api.service import sees_all
from tenant.masking.scheme import Scheme
from tenant.session.tally import Ledger

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript")
        for name in ("page", "chats", "dom", "events", "ledger", "markdown")
    },
}
"""The page's files and their types, by path. They need no key."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""These headers forbid the browser to load files from other servers, run inline scripts, or show the page in a
frame."""

_HIDDEN: dict[Role, str] = {
    "executor": "integers that it cannot tell from random ones, in place of your rows",
    "helper": "a random seed, and none of your rows",
}
_COUNTED = ("requests", "verified", "rejected", "bytes_sent", "bytes_received", "latency_s")
_VISIBLE = "how many rows there are, for which layer, when, and when the answer ends"


def page_router(scheme: Scheme, ledger: Callable[[], Ledger | None], *, model: str) -> APIRouter:
    """Return the routes of the page. `/ledger` needs a key, which the application checks. `ledger`: returns the
    counters of the session; None if the scheme has no session. `model`: the base model; with its commit if it is on the
    hub."""
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        router.get(path)(_file(name, media_type))

    @router.get("/ledger")
    def session_ledger(http: Request, response: Response) -> dict[str, Any]:
        """Return what the scheme hides, and the providers; with their counters for the first key. `remote`: rows are
        sent to providers; `exposed`: an executor can read them; `sees`: what a provider learns about an answer."""
        response.headers["Cache-Control"] = "no-store"
        counted = ledger()
        providers = [] if counted is None else counted.providers
        unseen: dict[str, None] = {} if sees_all(http) else dict.fromkeys(_COUNTED)
        return {
            "model": model,
            "masking": scheme.name,
            "summary": scheme.summary,
            "assumption": scheme.assumption,
            "visible": _VISIBLE,
            "remote": "executor" in scheme.roles,
            "exposed": "executor" in scheme.roles - scheme.hides_from,
            "providers": [
                asdict(one) | unseen | {"hidden": one.role in scheme.hides_from, "sees": sees(scheme, one.role)}
                for one in providers
            ],
        }

    return router


def sees(scheme: Scheme, role: Role) -> str:
    """Return what a provider learns about rows, as the scheme declares."""
    return _HIDDEN[role] if role in scheme.hides_from else "your rows, from which it can read your text"


def _file(name: str, media_type: str) -> Callable[[], Response]:
    content = resources.files(__package__).joinpath("static", name).read_bytes()
    return lambda: Response(content, media_type=media_type, headers=HEADERS)
