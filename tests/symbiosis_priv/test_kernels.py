"""Every kernel against numpy's wrapping int64 product, and the choice between kernels against planted ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from symbiosis_priv import kernels, testing
from symbiosis_priv.errors import ConfigError, RangeError
from symbiosis_priv.kernels import KERNELS, Int32Kernel, RingMatrix

NAMES = ["auto", *KERNELS]
SHAPES = [(1, 1), (1, 7), (9, 1), (3, 5), (8, 16), (33, 65), (70, 31)]


def oracle(rows: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """int64 wraps mod 2^64, so its low 32 bits are the product mod 2^32."""
    x, w = rows.cpu().numpy().astype(np.int64), weight.cpu().numpy().astype(np.int64)
    return torch.from_numpy((x @ (w if transposed else w.T)).astype(np.int32))


def uniform(shape: tuple[int, int], *, bits: int, seed: int = 0) -> Tensor:
    """Uniform signed integers below 2^(bits - 1), both ends included."""
    peak = 2 ** (bits - 1) - 1
    dtype = torch.int32 if bits == 32 else torch.int16
    values = torch.from_numpy(np.random.default_rng(seed).integers(-peak, peak + 1, shape)).to(dtype)
    values.view(-1)[0], values.view(-1)[-1] = -peak, peak
    return values


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_choices", {})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 10, 12])
@pytest.mark.parametrize("kernel", NAMES)
def test_kernels_are_exact(kernel: str, bits: int, transposed: bool) -> None:
    for shape in SHAPES:
        weight = uniform(shape, bits=bits)
        matrix = RingMatrix(weight, weight_bits=bits, kernel=kernel)
        for count in (0, 1, 2, 17, 64, 257):
            rows = uniform((max(count, 1), shape[0 if transposed else 1]), bits=32, seed=count)[:count]
            got = matrix.product(rows, transposed=transposed)
            assert got.is_contiguous()
            assert torch.equal(got, oracle(rows, weight, transposed=transposed))


@pytest.mark.parametrize("kernel", NAMES)
@given(data=st.data(), transposed=st.booleans(), bits=testing.weight_bits())
def test_kernels_are_exact_at_the_corners(kernel: str, data: DataObject, transposed: bool, bits: int) -> None:
    outputs, inputs = data.draw(testing.widths()), data.draw(testing.widths())
    weight = data.draw(testing.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    rows = data.draw(testing.ring_rows(width=outputs if transposed else inputs))
    before = rows.clone()
    got = RingMatrix(weight, weight_bits=bits, kernel=kernel).product(rows, transposed=transposed)
    assert torch.equal(got, oracle(rows, weight, transposed=transposed))
    assert torch.equal(rows, before)  # the caller's rows are read, never written


def test_the_oracle_itself() -> None:
    """Python's integers agree with numpy's wrapping ones."""
    weight, rows = uniform((3, 9), bits=12), uniform((4, 9), bits=32)
    exact = rows.numpy().astype(object) @ weight.numpy().astype(object).T
    wrapped = [[(int(v) + 2**31) % 2**32 - 2**31 for v in row] for row in exact]
    assert oracle(rows, weight, transposed=False).tolist() == wrapped


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [4, 10, 12])
@pytest.mark.parametrize("kernel", NAMES)
def test_wide_products_of_one_sign(kernel: str, bits: int, transposed: bool) -> None:
    """All partial sums at their largest, past the width where float64 has to split (2^(23 - b) terms)."""
    width = min(3 * 2 ** (23 - bits) + 5, 1 << 16)
    peak = 2 ** (bits - 1) - 1
    weight = torch.full((width, 3) if transposed else (3, width), peak, dtype=torch.int16)
    weight[0, 0] -= 1
    matrix = RingMatrix(weight, weight_bits=bits, kernel=kernel)
    for corner in (-(2**31), 2**31 - 1, -0x7F7F7F80, 0x7F7F7F7F):
        rows = torch.full((2, width), corner, dtype=torch.int32)
        rows[1, ::2] += 1
        got = matrix.product(rows, transposed=transposed)
        assert torch.equal(got, oracle(rows, weight, transposed=transposed))


@pytest.mark.parametrize("kernel", NAMES)
@given(data=st.data(), transposed=st.booleans())
def test_batch_composition_changes_nothing(kernel: str, data: DataObject, transposed: bool) -> None:
    """Requests flattened into one matrix get the answers that each would have got alone."""
    weight = data.draw(testing.integer_weights(outputs=13, inputs=24, bits=10))
    rows = data.draw(testing.ring_rows(width=13 if transposed else 24, count=st.integers(1, 40)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    matrix = RingMatrix(weight, weight_bits=10, kernel=kernel)
    whole = matrix.product(rows, transposed=transposed)
    parts = [matrix.product(part, transposed=transposed) for part in torch.tensor_split(rows, cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(matrix.product(rows[order], transposed=transposed), whole[order])


@pytest.mark.parametrize("kernel", NAMES)
def test_layout_and_threads_change_nothing(kernel: str, set_threads: Callable[[int], None]) -> None:
    weight, rows = uniform((48, 64), bits=10), uniform((64, 24), bits=32).t()  # a transposed view
    want = oracle(rows, weight, transposed=False)
    for threads in (1, 2, 4):
        set_threads(threads)
        assert torch.equal(RingMatrix(weight, weight_bits=10, kernel=kernel).product(rows), want)
        strided = uniform((48, 128), bits=32)[::2, ::2]
        got = RingMatrix(weight, weight_bits=10, kernel=kernel).product(strided)
        assert torch.equal(got, oracle(strided, weight, transposed=False))


class Planted(Int32Kernel):
    """Would win every race: it hands out what the int32 kernel once computed."""

    name = "planted"
    spoil: ClassVar[Callable[[Tensor], None]]

    def __init__(self, weight: Tensor, *, weight_bits: int) -> None:
        super().__init__(weight, weight_bits=weight_bits)
        self._memo: dict[tuple[object, ...], Tensor] = {}

    def product(self, rows: Tensor, *, transposed: bool) -> Tensor:
        key = (rows.data_ptr(), rows.shape, transposed)
        if key not in self._memo:
            self._memo[key] = super().product(rows, transposed=transposed)
            type(self).spoil(self._memo[key])
        return self._memo[key]


SPOILERS: dict[str, Callable[[Tensor], object]] = {
    "every entry by one": lambda y: y.add_(1),
    "the lowest bit of the last column": lambda y: y[:, -1].bitwise_xor_(1),
    "the last row": lambda y: y[-1].zero_(),
    "float32 accumulation": lambda y: y.copy_(y.float().clamp(-(2**31), 2**31 - 128).to(torch.int32)),
}


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fault", SPOILERS)
def test_an_inexact_kernel_is_left_out(
    fault: str,
    transposed: bool,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Planted, "spoil", staticmethod(SPOILERS[fault]), raising=False)
    monkeypatch.setitem(KERNELS, "planted", Planted)
    weight = uniform((90, 90), bits=10)
    rows = uniform((count, 90), bits=32)
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        got = RingMatrix(weight, weight_bits=10).product(rows, transposed=transposed)
    assert torch.equal(got, oracle(rows, weight, transposed=transposed))
    assert "kernel planted is not exact" in caplog.text


def test_an_exact_and_faster_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart: the planted kernel loses by its fault and by nothing else."""
    used: list[int] = []
    monkeypatch.setattr(Planted, "spoil", staticmethod(lambda y: used.append(len(y))), raising=False)
    monkeypatch.setitem(KERNELS, "planted", Planted)
    rows = uniform((40, 300), bits=32)
    RingMatrix(uniform((300, 300), bits=10), weight_bits=10).product(rows)
    assert used[-1] == 40


def test_a_named_kernel_must_be_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "spoil", staticmethod(SPOILERS["every entry by one"]), raising=False)
    monkeypatch.setitem(KERNELS, "planted", Planted)
    matrix = RingMatrix(uniform((5, 5), bits=10), weight_bits=10, kernel="planted")
    with pytest.raises(ConfigError, match="planted"):
        matrix.product(uniform((2, 5), bits=32))


def test_a_kernel_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Tensor) -> None:
        raise NotImplementedError("not built for this device")

    monkeypatch.setattr(Planted, "spoil", staticmethod(fail), raising=False)
    monkeypatch.setitem(KERNELS, "planted", Planted)
    weight, rows = uniform((5, 5), bits=10), uniform((2, 5), bits=32)
    assert torch.equal(RingMatrix(weight, weight_bits=10).product(rows), oracle(rows, weight, transposed=False))


def test_limbs_are_not_offered_beyond_their_accumulator() -> None:
    with pytest.raises(ConfigError, match="limbs"):
        RingMatrix(torch.ones(1, (1 << 16) + 1, dtype=torch.int16), weight_bits=4, kernel="limbs").product(
            torch.ones(1, (1 << 16) + 1, dtype=torch.int32)
        )


def test_unknown_kernels_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'fast'.*int32"):
        RingMatrix(torch.ones(1, 1, dtype=torch.int16), weight_bits=8, kernel="fast")


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 4)]
)
def test_wrong_rows_are_refused(rows: Tensor) -> None:
    with pytest.raises(RangeError):
        RingMatrix(torch.ones(5, 4, dtype=torch.int16), weight_bits=8).product(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("kernel", ["auto", "fp64", "limbs"])
def test_kernels_are_exact_on_cuda(kernel: str, bits: int, transposed: bool) -> None:
    for shape in [*SHAPES, (513, 4099)]:
        weight = uniform(shape, bits=bits)
        matrix = RingMatrix(weight, weight_bits=bits, device="cuda", kernel=kernel)
        for count in (0, 1, 2, 17, 64):
            rows = uniform((max(count, 1), shape[0 if transposed else 1]), bits=32, seed=count)[:count]
            got = matrix.product(rows, transposed=transposed)
            assert got.device.type == "cuda"
            assert torch.equal(got.cpu(), oracle(rows, weight, transposed=transposed))
