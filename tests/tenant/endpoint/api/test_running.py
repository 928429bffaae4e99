"""The engine's events in the event loop."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import CheckpointError, QuarantinedError, SymbiosisError, UnsupportedMethodError
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import Running
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed, RequestLedger, Sink, Token
from tests.tenant.endpoint.api.conftest import Served

REQUEST = EngineRequest(id="1", prompt=(1,), adapter="lora")


class Scripted:
    """An engine that gives events when it is told to, and its handle."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.cancelled = 0

    def submit(self, request: EngineRequest, sink: Sink) -> "Scripted":
        self.sinks.append(sink)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def ledger(self) -> RequestLedger:
        return RequestLedger(rows=2)


def made(engine: Any, requests: int = 1, keys: int = 1) -> Running:
    endpoint: Any = SimpleNamespace(
        service=SimpleNamespace(engine=engine),
        settings=SimpleNamespace(keys=("sk",) * keys),
    )
    return Running(endpoint, [REQUEST] * requests)


async def running(engine: Scripted, *events: Event) -> Running:
    found = made(engine)
    for event in events:
        await asyncio.to_thread(engine.sinks[0], event)
    return found


def test_a_client_that_does_not_read_is_cancelled() -> None:
    async def run() -> None:
        engine = Scripted()
        slow = await running(engine)
        for _ in range(1025):
            engine.sinks[0](Token(id=1, text="x"))
        await asyncio.sleep(0)
        assert engine.cancelled
        with pytest.raises(ApiError, match="slowly"):
            [event async for event in slow]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (QuarantinedError("provider 'alpha' has lied"), 503, "QuarantinedError"),
        (UnsupportedMethodError("lora_bias is not supported"), 400, "lora_bias is not supported"),
        (CheckpointError("/home/me/lora has no tensor a"), 400, "has no tensor a"),
        (SymbiosisError("the model failed on this request (RuntimeError)"), 500, "RuntimeError"),
    ],
)
def test_a_failure_is_an_error_with_what_concerns_the_client(error: SymbiosisError, status: int, said: str) -> None:
    async def run() -> None:
        with pytest.raises(ApiError, match=said) as raised:
            [event async for event in await running(Scripted(), Failed(error=error))]
        assert raised.value.status == status
        assert not any(word in str(raised.value) for word in ("/home", "alpha"))
        assert ("providers" in str(raised.value)) == (status == 503)

    asyncio.run(run())


def test_costs_are_those_of_running_and_ended_requests() -> None:
    async def run() -> None:
        engine = Scripted()
        both = made(engine, 2)
        assert both.ledger().rows == 4
        for sink in engine.sinks:
            sink(Done(finish="stop", ledger=RequestLedger(rows=5)))
        [event async for event in both]
        assert both.ledger().rows == 10

    asyncio.run(run())


def test_work_of_a_client_that_has_left_keeps_the_thread(served: Served) -> None:
    """Otherwise clients that leave at once would have any number of threads at work."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def long() -> None:
        begun.set()
        assert go_on.wait(60)
        order.append("long")

    async def run() -> None:
        async def work(name: str) -> None:
            await served.service.in_thread("a", lambda: order.append(name))

        left = asyncio.ensure_future(served.service.in_thread("a", long))
        await asyncio.to_thread(begun.wait, 60)
        left.cancel()
        waiting = asyncio.ensure_future(work("dropped"))
        next_one = asyncio.ensure_future(served.service.in_thread("b", lambda: order.append("next")))
        await asyncio.wait({next_one}, timeout=0.1)
        waiting.cancel()
        await asyncio.wait({waiting})
        go_on.set()
        await next_one

    asyncio.run(run())
    assert order == ["long", "next"]


@given(st.integers(0, 10**12))
def test_costs_that_other_keys_rows_change_are_rounded(cost: int) -> None:
    """A step's bytes are divided among its rows, so the exact share would tell how many rows others had."""

    class Costly(Scripted):
        def ledger(self) -> RequestLedger:
            return RequestLedger(rows=7, round_trips=cost, bytes_up=cost, bytes_down=cost, answers_verified=7)

    async def run() -> RequestLedger:
        return made(Costly(), keys=2).ledger()

    found = asyncio.run(run())
    assert (found.rows, found.answers_verified) == (7, 7)
    for shown in (found.round_trips, found.bytes_up, found.bytes_down):
        assert len(str(shown).rstrip("0")) <= 2
        assert abs(shown - cost) <= 0.05 * cost
