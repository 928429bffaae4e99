"""The page's files, and `/ledger`: the counters of the session, and what each provider can see."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from symbiosis_priv.limits import Role
from tenant.endpoint.api.service import sees_all
from tenant.masking.scheme import Scheme
from tenant.routing.known_provider import ProviderFigures
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


@dataclass(frozen=True, kw_only=True)
class Provider(ProviderFigures):
    """A provider's figures since the session began; counters and latency are None for all keys but the first. `sees`:
    what it learns about an answer. `hidden`: not the rows."""

    requests: int | None  # type: ignore[assignment]
    verified: int | None  # type: ignore[assignment]
    rejected: int | None  # type: ignore[assignment]
    bytes_sent: int | None  # type: ignore[assignment]
    bytes_received: int | None  # type: ignore[assignment]
    hidden: bool
    sees: str


class SessionLedger(BaseModel):
    """The providers of the session. `summary` names the parties that can read rows, and `assumption` states when rows
    are hidden from the others. `model`: the base model; with its commit if it is on the hub. `remote`: rows are sent to
    providers; `exposed`: an executor can read them."""

    model: str
    masking: str
    summary: str
    assumption: str
    visible: str
    remote: bool
    exposed: bool
    providers: list[Provider]


def page_router(scheme: Scheme, ledger: Callable[[], Ledger | None], *, model: str) -> APIRouter:
    """Return the routes of the page. `/ledger` needs a key, which the application checks. `ledger`: returns the
    counters of the session; None if the scheme has no session."""
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        router.get(path, include_in_schema=False)(_file(name, media_type))

    @router.get("/ledger")
    def session_ledger(http: Request, response: Response) -> SessionLedger:
        """Return the providers, and their counters for the first key."""
        response.headers["Cache-Control"] = "no-store"
        counted = ledger()
        providers = [] if counted is None else counted.providers
        unseen: dict[str, None] = {} if sees_all(http) else dict.fromkeys(_COUNTED)
        return SessionLedger(
            model=model,
            masking=scheme.name,
            summary=scheme.summary,
            assumption=scheme.assumption,
            visible=_VISIBLE,
            remote="executor" in scheme.roles,
            exposed="executor" in scheme.roles - scheme.hides_from,
            providers=[
                Provider(**asdict(one) | unseen, hidden=one.role in scheme.hides_from, sees=sees(scheme, one.role))
                for one in providers
            ],
        )

    return router


def sees(scheme: Scheme, role: Role) -> str:
    """Return what a provider learns about rows, as the scheme declares."""
    return _HIDDEN[role] if role in scheme.hides_from else "your rows, from which it can read your text"


def _file(name: str, media_type: str) -> Callable[[], Response]:
    content = resources.files(__package__).joinpath("static", name).read_bytes()
    return lambda: Response(content, media_type=media_type, headers=HEADERS)
