"""The page's files: what a browser may do with them. The ledger: what it says of each provider, and to whom."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from tenant.endpoint.page.router import page_router, sees
from tenant.masking.registry import registered, scheme_named
from tenant.routing.known_provider import ProviderFigures
from tenant.session.tally import Ledger

FILES = Path(__file__).parents[4] / "tenant/endpoint/page/static"
EXECUTOR = ProviderFigures(
    name="alpha",
    role="executor",
    operator="Alpha GmbH",
    address="127.0.0.1:7401",
    state="up",
    requests=3,
    latency_s=None,
    verified=2,
    rejected=1,
    bytes_sent=40,
    bytes_received=50,
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of("pad")


def client_of(masking: str, *, sees_all: bool = True) -> TestClient:
    app = FastAPI()
    ledger = Ledger(providers=(EXECUTOR,))
    app.include_router(page_router(scheme_named(masking), lambda: ledger, model="tiny"))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["sees_all"] = sees_all
        await app(scope, receive, send)

    return TestClient(guarded)


def test_every_file_has_a_policy_that_allows_this_server_only(client: TestClient) -> None:
    for path in ("/", *(f"/{file.name}" for file in FILES.iterdir() if file.suffix != ".html")):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'self'", "frame-ancestors 'none'", "form-action 'none'"} <= set(policy)
        assert "unsafe" not in str(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_files_name_no_other_server_and_make_no_html() -> None:
    text = "".join(re.sub(r"// .*", "", file.read_text(encoding="utf-8")) for file in FILES.iterdir())
    assert set(re.findall(r"(?:https?:)?//[\w.]+", text)) == {"http://www.w3.org"}  # the name of SVG
    for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "style="):
        assert sink not in text
    stored = re.findall(r"localStorage\.\w+\((\w+)", text)
    assert set(stored) == {"KEY", "name"}  # chats and settings, never the key of the endpoint
    assert re.findall(r"const KEY = (.*);", text) == ['"chats"']
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="page.js">']


def test_every_control_has_a_label() -> None:
    html = (FILES / "index.html").read_text(encoding="utf-8")
    labelled = set(re.findall(r'<label for="(\w+)"', html))
    labelled |= set(re.findall(r'id="(\w+)" aria-label="', html))
    labelled |= {name for label in re.findall(r"<label>.*?</label>", html) for name in re.findall(r'id="(\w+)"', label)}
    assert set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', html)) == labelled


def test_only_the_first_key_sees_what_requests_of_all_keys_cost() -> None:
    """The lengths of other keys' prompts and answers follow from differences of these counters."""
    (seen,) = client_of("pad").get("/ledger").json()["providers"]
    (other,) = client_of("pad", sees_all=False).get("/ledger").json()["providers"]
    same = {"name", "role", "operator", "address", "state", "waited_s", "left_s", "hidden", "sees"}
    assert {name for name in seen if seen[name] == other[name] != None} <= same  # noqa: E711
    assert all(other[name] is None for name in seen.keys() - same)
    assert {seen[name] for name in seen.keys() - same} > {3, 40, 50}


def test_the_ledger_has_every_provider_and_what_it_sees(client: TestClient) -> None:
    answer = client.get("/ledger")
    assert answer.headers["cache-control"] == "no-store"
    said = answer.json()
    assert said["masking"] == "pad"
    [alpha] = said["providers"]
    assert (alpha["operator"], alpha["rejected"], alpha["bytes_received"]) == ("Alpha GmbH", 1, 50)
    assert "random" in alpha["sees"]


def test_a_scheme_that_hides_no_rows_says_so() -> None:
    for scheme in registered():
        for role in scheme.roles:
            assert ("read your text" in sees(scheme, role)) is (role not in scheme.hides_from)
    told = {one.name: client_of(one.name).get("/ledger").json() for one in registered()}
    assert {name for name, ledger in told.items() if ledger["exposed"]} == {"none", "paper-pool"}
    assert {name for name, ledger in told.items() if not ledger["remote"]} == {"simulate"}


def test_events_are_read_across_chunks() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("install Node.js to test the page's parser of event streams")
    program = Path(__file__).with_name("read_events.js").read_text(encoding="utf-8")
    command = [node, "--input-type=module", "--eval", program]
    done = subprocess.run(command, cwd=FILES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
