"""Hostile requests: other users of the machine, web pages, and clients that ask for too much."""

import asyncio
import contextlib
import http.client
import json
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from tenant.endpoint.api.application import Guard
from tenant.endpoint.api.http_server import _Connection
from tests.cases import cases, table
from tests.tenant.endpoint.api.conftest import KEY, Served
from tests.waiting import until

COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 1}


def ask(served: Served, method: str, path: str, body: Any = None, **headers: str | None) -> tuple[int, Any]:
    """Send one request; a header of None is left out. Returns the status and the JSON body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {name: value for name, value in sent.items() if value is not None})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text.decode()


@cases(__file__, "headers")
def test_only_those_with_the_key_and_no_web_pages(served: Served, name: str, value: str | None, status: int) -> None:
    value = None if value is None else value.replace("PORT", str(served.port))
    found, body = ask(served, "POST", "/v1/completions", COMPLETION, **{name: value})
    assert found == status
    assert found == 200 or set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("localhost", 200), ("10.0.0.1", 403)])
def test_rows_are_shown_on_this_machine_only(served: Served, host: str, status: int) -> None:
    asked = COMPLETION | {"stream": True, "stream_options": {"include_usage": True, "include_row": True}}
    assert ask(served, "POST", "/v1/completions", asked, Host=f"{host}:{served.port}")[0] == status


def test_what_needs_no_key(served: Served) -> None:
    for paths, expected in ((("/health", "/ready"), 200), (("/v1/models", "/openapi.json", "/v1/none", "/x"), 401)):
        assert {ask(served, "GET", path, Authorization=None)[0] for path in paths} == {expected}
    assert ask(served, "GET", "/v1/none")[0] == 404
    assert ask(served, "PUT", "/v1/models")[0] == 405


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (None, 400),
        (b"[" * 100_000, 400),
        (b'{"model":"tiny","prompt":"x","max_tokens":1' + b"0" * 5000 + b"}", 400),
        (b'{"model":"tiny","prompt":"x","temperature":NaN}', 400),
        (b'{"model":"tiny","prompt":"\\ud800"}', 400),
        (b"\xff\xfe", 400),
        (b" " * (1 << 20) + b"{}", 413),
        ({"model": "tiny", "prompt": "word " * 100_000}, 400),
        ({"model": "tiny", "prompt": [5] * 300_000}, 400),
        ({"model": "tiny", "prompt": [[5]] * 129}, 400),
        ({"model": "tiny", "prompt": ["x"] * 100, "n": 16}, 400),
        ({"model": "tiny", "prompt": [320]}, 400),
        ({"model": "tiny", "prompt": [True]}, 400),
        ({"model": "tiny", "prompt": "x", "stop": "y" * 10_000}, 400),
        ({"model": "tiny", "prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}, 400),
        ({"model": "x" * 100_000, "prompt": "x"}, 400),
    ],
)
def test_too_much_is_refused_at_once(served: Served, body: Any, status: int) -> None:
    begun = time.monotonic()
    found, answer = ask(served, "POST", "/v1/completions", body)
    assert found == status, answer
    assert len(answer["error"]["message"]) < 600
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["x" * 60 + str(i) for i in range(2000)]},
        *(entry["schema"] for entry in table(__file__, "bombs").values()),
    ],
)
def test_schemas_that_are_bombs(served: Served, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
    begun = time.monotonic()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    found, answer = ask(served, "POST", "/v1/chat/completions", asked | {"response_format": form})
    assert found == 400 or "pattern" in schema, answer
    assert time.monotonic() - begun < 60


def connected(served: Served, sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    found.sendall(sent)
    return found


def test_late_bodies_and_long_heads_are_refused(served: Served) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
    with connected(served, head + b"Content-Length: 10\r\n\r\n{") as late:
        assert b" 408 " in late.recv(1000).splitlines()[0]
    with connected(served, head + b"Content-Length: 10\r\nHost: localhost\r\n\r\n") as twice:
        assert b" 400 " in twice.recv(1000).splitlines()[0]
    with connected(served, head + b"X-Long: " + b"x" * 70_000) as flood:
        assert b" 400 " in flood.recv(1000).splitlines()[0]


def test_connections_without_a_request_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant.endpoint.api.http_server._HEAD_S", 0.2)
    monkeypatch.setattr("tenant.endpoint.api.http_server.CONNECTIONS", 8)
    idle = [connected(served, b"GET /health HTTP/1.1\r\n" * (place % 2)) for place in range(12)]
    assert ask(served, "GET", "/health")[0] == 200
    for one in idle:
        with one, contextlib.suppress(ConnectionResetError):
            assert one.recv(10) == b""


def test_clients_that_do_not_read_hold_no_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise anybody on this machine could hold all connections with answers that nobody reads."""
    connections: list[_Connection] = []
    made = _Connection.connection_made

    def noted(connection: _Connection, transport: Any) -> None:
        connections.append(connection)
        made(connection, transport)

    def unread() -> socket.socket:
        """A connection whose answer waits for the client, as if the kernel's buffers were full."""
        count = len(connections)
        found = connected(served, b"")
        until(lambda: len(connections) > count)
        connections[-1].loop.call_soon_threadsafe(connections[-1].pause_writing)
        found.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: connections[-1].cycle is not None)
        return found

    monkeypatch.setattr(_Connection, "connection_made", noted)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(unread())
        monkeypatch.setattr("tenant.endpoint.api.http_server.CONNECTIONS", len(connections[0].connections))
        assert ask(served, "GET", "/health")[0] == 200  # in the place of one of them
        monkeypatch.undo()
        monkeypatch.setattr(_Connection, "connection_made", noted)
        monkeypatch.setattr("tenant.endpoint.api.http_server._READ_S", 0.1)
        stack.enter_context(unread())
        until(connections[-1].transport.is_closing)


def test_bodies_hold_no_connection_without_a_key(served: Served) -> None:
    """Otherwise anybody on this machine could hold all connections with bodies that never come."""
    for path in ("/health", "/ready"):
        with connected(
            served, f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode()
        ) as open_one:
            assert b" 405 " in open_one.recv(1000).splitlines()[0]


def test_a_key_leaves_places_for_other_keys(served: Served) -> None:
    """The requests of a key wait for their bodies, and another key's request is answered."""

    def head(key: str) -> dict[str, Any]:
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        return {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}

    async def asked() -> list[int]:
        guard, statuses = Guard(Response(), replace(served.settings, requests=8, body_s=60.0)), list[int]()
        never: Any = asyncio.Event().wait

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def at_once() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        waiting = [asyncio.ensure_future(guard(head(KEY), never, send)) for _ in range(20)]
        await asyncio.sleep(0)
        assert statuses == [429] * 16
        await guard(head("sk-other"), at_once, send)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await guard(head(KEY), at_once, send)
        return statuses[16:]

    assert asyncio.run(asked()) == [200, *[503] * 4, 200]  # those that were cancelled got an answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = served.service.engine
    load, step = engine.load, engine.step

    def slow() -> None:  # all tokens take 5 s
        time.sleep(0.01)
        step()

    monkeypatch.setattr(engine, "step", slow)
    body = json.dumps(COMPLETION | {"max_tokens": 480, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = load().steps
    left = connected(served, head.encode() + body)
    until(lambda: load().steps > before)
    left.close()
    until(lambda: load().running == 0)
    assert load().steps < before + 400
