"""Running a model without weights gives true shapes and known values, in bounded memory and time."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from symbiosis_priv.checkpoints.discovery.known_values import KnownValues, isolated
from symbiosis_priv.errors import UnsupportedModelError

Program = Callable[[Tensor, Tensor], Tensor]
"""A function of integers `[n]` and real numbers `[n, m]`."""

KNOWN: dict[str, Program] = {
    "positions": lambda ids, x: torch.arange(x.shape[0], device=x.device) + ids.to(x.device),
    "mask": lambda ids, x: ids.new_ones(len(ids), x.shape[1]).tril()[ids > 0],
    "runs": lambda ids, x: torch.repeat_interleave(ids, ids),
    "distinct": lambda ids, x: torch.unique_consecutive(ids),
    "sums": lambda ids, x: nn.functional.pad(ids.cumsum(0), (1, 0)),
    "scratch": lambda ids, x: torch.zeros_like(x, dtype=torch.long).index_put_((ids > 1,), torch.tensor(7)),
    "list": lambda ids, x: torch.tensor([n for n in ids.tolist() if n], device=x.device),
}
UNKNOWN: dict[str, Program] = {
    "product": lambda ids, x: x @ x.T,
    "rows of a mask": lambda ids, x: x[ids > 1],
    "rows of positions": lambda ids, x: x[torch.nonzero(ids)[:, 0]],
    "pieces": lambda ids, x: torch.cat([x, *x.new_zeros(len(ids), int(ids.sum()), x.shape[1])]).relu(),
    "scattered": lambda ids, x: torch.zeros_like(x).masked_scatter(x != 0, x) * 2.0 + x,
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=6), columns=st.integers(1, 4))
def test_shapes_are_true_and_values_are_known_unless_they_depend_on_weights(
    name: str, ids: list[int], columns: int
) -> None:
    program = (KNOWN | UNKNOWN)[name]
    real = program(torch.tensor(ids), torch.rand(len(ids), columns) + 1)
    with KnownValues():
        traced = program(torch.tensor(ids), torch.empty(len(ids), columns, device="meta"))
    assert (traced.shape, traced.dtype) == (real.shape, real.dtype)
    assert traced.is_meta is (name in UNKNOWN)
    if name in KNOWN:
        assert torch.equal(traced, real)


def test_a_result_does_not_depend_on_earlier_operations() -> None:
    """The layout of a result is computed once: for one type of each argument (1 == 1.0 == True) and default dtype."""
    x = torch.empty(2, 3, dtype=torch.int32, device="meta")
    with isolated(), KnownValues():
        assert [(x + one).dtype for one in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]
        (x + 2).unsqueeze_(0)
        assert (x + 2).shape == x.shape
        assert (x.T + 1).stride() == x.T.stride()
        torch.set_default_dtype(torch.float64)
        assert (x + 1.0).dtype == torch.float64


def test_an_unknown_value_is_read_as_zero() -> None:
    """Code that asks for an unknown value gets zero. So no row goes to an expert, and row counts show no route."""
    x = torch.empty(3, 4, device="meta")
    with KnownValues():
        assert not x.sum().item()
        assert not (x > 0).any()
        assert (x.argmax(-1) == 1).nonzero().shape == (0, 1)
        assert x[x[:, 0] > 0].shape == (0, 4)
        assert x[0].tolist() == [0.0] * 4
        known = torch.arange(4.0)
        known.copy_(x[0])
        assert known.tolist() == [0.0, 1.0, 2.0, 3.0]


HUGE = 1 << 40
BOMBS: dict[str, Callable[[], object]] = {
    "a buffer": lambda: torch.zeros(HUGE),
    "positions": lambda: torch.arange(HUGE, device="meta"),
    "a table of all pairs": lambda: torch.arange(1 << 16)[:, None] + torch.arange(1 << 16),
    "repeated": lambda: torch.zeros(8).repeat(HUGE),
    "expanded and copied": lambda: torch.zeros(1).expand(HUGE).contiguous(),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_huge_tensor_takes_no_memory(name: str) -> None:
    with KnownValues():
        made = BOMBS[name]()
    assert isinstance(made, Tensor)
    assert made.is_meta


def forever() -> None:
    x = torch.zeros(1 << 16)
    while True:
        x = x + 1


@pytest.mark.parametrize(
    "program",
    [
        forever,
        lambda: torch.repeat_interleave(torch.tensor([HUGE])),
        lambda: torch.bincount(torch.tensor([HUGE])),
        lambda: torch.empty(1 << 17, device="meta").nonzero(),
    ],
    ids=["a loop", "repetitions", "bins", "values of a large tensor"],
)
def test_too_many_operations_and_large_unknown_values_are_refused(program: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedModelError), KnownValues():
        program()


def test_the_callers_settings_and_random_numbers_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded program gets the same random numbers with and without a trace, and the trace does not depend on the
    caller's settings."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    seeded: list[int] = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded.append)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), isolated():
            assert torch.zeros(1).dtype == torch.float32
            assert not torch.is_inference_mode_enabled()
            torch.rand(5)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), expected)
    assert seeded == []  # of a GPU
