"""Coordinated batching: every request once, at the smallest cost that any division has."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from symbiosis_priv.errors import TaskError
from tenant.tasks.coordinated import (
    Batches,
    Costs,
    Request,
    by_task,
    coordinated,
    fixed,
    joined,
)

METHODS = ("LORA", "IA3")
LONGEST, LARGEST = 12, 6


def request(task: int, tokens: int) -> Request:
    method = METHODS[task % len(METHODS)]
    return Request(task=f"task-{task}", method=method, input_ids=torch.arange(1, tokens + 1))


REQUESTS = st.lists(st.builds(request, st.integers(0, 3), st.integers(1, LONGEST)), max_size=7)


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    """Any tables: the programmes assume nothing about them."""
    seed = draw(st.integers(0, 1000))
    random = np.random.default_rng(seed)
    shape = (LARGEST + 1, LONGEST + 1)
    return Costs(shared=random.random(shape), own={method: random.random(shape) for method in METHODS})


@given(requests=REQUESTS, costs=all_costs())
def test_every_request_is_in_one_batch(requests: list[Request], costs: Costs) -> None:
    for batches in (
        coordinated(requests, costs),
        by_task(requests, costs),
        fixed(requests, size=3),
    ):
        assert sorted(id(r) for batch in batches for r in batch) == sorted(map(id, requests))
        assert all(0 < len(batch) <= LARGEST for batch in batches)
    assert all(len({r.task for r in batch}) == 1 for batch in by_task(requests, costs))


@given(requests=REQUESTS, costs=all_costs())
def test_no_other_division_of_the_sorted_requests_costs_less(requests: list[Request], costs: Costs) -> None:
    """The oracle tries every division of the requests, in order of their lengths."""

    def cost(batches: Batches) -> float:
        return sum(float(costs.shared[len(batch), max(r.tokens for r in batch)]) for batch in batches)

    ordered = sorted(requests, key=lambda r: r.tokens)
    every = []
    for cuts in itertools.product([False, True], repeat=max(0, len(ordered) - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ordered)]
        parts = [ordered[a:b] for a, b in itertools.pairwise(edges) if a < b]
        if all(len(part) <= LARGEST for part in parts):
            every.append(cost(parts))
    assert cost(joined([[request] for request in requests], costs)) == pytest.approx(min(every, default=0.0))


def test_requests_outside_the_costs_are_refused() -> None:
    costs = Costs(shared=np.ones((3, 5)), own={"LORA": np.ones((3, 5))})
    with pytest.raises(TaskError, match="tokens"):
        coordinated([request(0, 5)], costs)
    with pytest.raises(TaskError, match="method"):
        coordinated([request(1, 4)], costs)
