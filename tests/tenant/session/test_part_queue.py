"""The parts of a product: the error that the caller gets."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from symbiosis_priv.errors import QuarantinedError, VerificationError
from tenant.session.part_queue import multiply_parts

FAULT = VerificationError(provider="beta", group_name="mlp", direction="forward", what="an effect")


@pytest.fixture
def executors() -> Iterator[list[Any]]:
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        provider = SimpleNamespace(health=SimpleNamespace(seconds_for=lambda size: None))
        yield [SimpleNamespace(provider=provider, workers=[worker, worker]) for worker in (one, other)]


@pytest.mark.parametrize("finder", ["first", "last"])
def test_the_caller_gets_the_fault_and_not_the_quarantine_that_follows_it(executors: list[Any], finder: str) -> None:
    parts: list[Any] = [SimpleNamespace(size=1, name=name) for name in ("first", "last")]
    both = threading.Barrier(2)

    def work(part: Any, provider: Any) -> None:
        both.wait(10)
        raise FAULT if part.name == finder else QuarantinedError("beta is quarantined")

    with pytest.raises(VerificationError, match="effect"):
        multiply_parts(parts, executors, work)
