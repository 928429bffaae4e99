"""Coordinated batching: every request once, at the smallest cost that any division has."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from symbiosis_priv.errors import TaskError
from tenant.tasks.coordinated import Batches, Costs, Request, coordinated, divided, fixed, predicted

METHODS = ("LORA", "IA3")
LONGEST, LARGEST = 12, 6


def request(task: int, tokens: int) -> Request:
    method = METHODS[task % len(METHODS)]
    return Request(task=f"task-{task}", method=method, input_ids=torch.arange(1, tokens + 1))


REQUESTS = st.lists(st.builds(request, st.integers(0, 3), st.integers(1, LONGEST)), max_size=7)


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    """Any tables: the program assumes nothing about them."""
    seed = draw(st.integers(0, 1000))
    random = np.random.default_rng(seed)
    shape = (LARGEST + 1, LONGEST + 1)
    return Costs(shared=random.random(shape), own={method: random.random(shape) for method in METHODS})


def cost(batches: Batches, costs: Costs) -> float:
    """The oracle: the shared cost of each batch, and that of each method in it."""
    total = 0.0
    for batch in batches:
        longest = max(request.tokens for request in batch)
        total += float(costs.shared[len(batch), longest])
        for method in METHODS:
            rows = [request for request in batch if request.method == method]
            total += float(costs.own[method][len(rows), longest]) if rows else 0
    return total


@given(requests=REQUESTS, costs=all_costs())
def test_every_request_is_in_one_batch(requests: list[Request], costs: Costs) -> None:
    for batches in (coordinated(requests, costs), divided(requests, costs), fixed(requests, size=3)):
        assert sorted(id(r) for batch in batches for r in batch) == sorted(map(id, requests))
        assert all(0 < len(batch) <= LARGEST for batch in batches)
        assert predicted(batches, costs) == pytest.approx(cost(batches, costs))


@given(requests=REQUESTS, costs=all_costs())
def test_no_part_costs_less_than_the_coordinated_batches(requests: list[Request], costs: Costs) -> None:
    """The parts: batches of the largest size, and those by one of both costs."""
    nothing = np.zeros_like(costs.shared)
    by_shared = divided(requests, replace(costs, own=dict.fromkeys(METHODS, nothing)))
    by_own = divided(requests, replace(costs, shared=nothing))
    least = min(cost(part, costs) for part in (fixed(requests, size=LARGEST), by_shared, by_own))
    assert cost(coordinated(requests, costs), costs) <= least + 1e-9


@given(requests=REQUESTS, costs=all_costs())
def test_no_other_division_of_the_sorted_requests_costs_less(requests: list[Request], costs: Costs) -> None:
    """The oracle tries every division of the requests, in order of their lengths."""
    ordered = sorted(requests, key=lambda r: r.tokens)
    every = []
    for cuts in itertools.product([False, True], repeat=max(0, len(ordered) - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ordered)]
        parts = [ordered[a:b] for a, b in itertools.pairwise(edges) if a < b]
        if all(len(part) <= LARGEST for part in parts):
            every.append(cost(parts, costs))
    assert cost(divided(requests, costs), costs) == pytest.approx(min(every, default=0.0))


def test_requests_outside_the_costs_are_refused() -> None:
    costs = Costs(shared=np.ones((3, 5)), own={"LORA": np.ones((3, 5))})
    with pytest.raises(TaskError, match="tokens"):
        coordinated([request(0, 5)], costs)
    with pytest.raises(TaskError, match="method"):
        coordinated([request(1, 4)], costs)
