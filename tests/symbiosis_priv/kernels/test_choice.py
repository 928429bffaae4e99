"""The admission of kernels and the choice between them, tested with planted kernels."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.kernels import KERNELS, Packed, bits_per_weight, choose, self_test
from symbiosis_priv.kernels.choice import passes_self_test
from symbiosis_priv.kernels.kernel import PlainKernel
from symbiosis_priv.limits import RingBits
from tests.builds import switched
from tests.gpu.chips import SHEETS

CPU = torch.device("cpu")


class Planted(PlainKernel):
    """A kernel that returns stored results of the plain kernel, so it would always be the fastest; `spoil` alters
    them."""

    name = "planted"

    def __init__(self, spoil: Callable[[Tensor], object] = lambda _: None) -> None:
        self._spoil = spoil
        self._memo: dict[tuple[object, ...], Tensor] = {}
        self.counts: list[int] = []

    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        key = (packed.data.shape, packed.weight_bits, rows.shape, direction)
        if key not in self._memo:
            super().product(packed, rows, direction, out)
            self._memo[key] = out.clone()
        out.copy_(self._memo[key])
        self.counts.append(len(rows))
        self._spoil(out)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planted]:
    def plant(spoil: Callable[[Tensor], object] = lambda _: None) -> Planted:
        planted = Planted(spoil)
        monkeypatch.setitem(KERNELS, "planted", planted)
        return planted

    return plant


def used() -> set[str]:
    """Names of the chosen kernels."""
    return {kernel.name for kernel in choose(weight_bits=10, device=CPU)}


SPOILERS: dict[str, Callable[[Tensor], object]] = {
    "every entry by one": lambda y: y.add_(1),
    "the lowest bit of the last column": lambda y: y[:, -1].bitwise_xor_(1),
    "the last row": lambda y: y[-1].zero_(),
    "the largest sums": lambda y: y.add_(1) if y.unique().numel() == 1 else None,
    "float32 accumulation": lambda y: y.copy_(y.float().clamp(-(2**31), 2**31 - 128).to(torch.int32)),
}


def test_a_kernel_of_another_layout_than_the_chosen_one_is_not_tested(plant: Callable[..., Planted]) -> None:
    planted = plant()
    planted.layout = "planted"  # type: ignore[misc]
    assert "planted" not in used()
    assert not planted.counts


@pytest.mark.parametrize("fault", SPOILERS)
def test_an_inexact_kernel_is_left_out(
    fault: str, plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    plant(SPOILERS[fault]).layout = choose(weight_bits=10, device=CPU).few.layout  # type: ignore[misc]
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        assert "planted" not in used()
    assert "kernel planted is not exact" in caplog.text


def test_an_exact_kernel_is_used(plant: Callable[..., Planted]) -> None:
    """The control: the planted kernel is left out only because of its fault."""
    plant().layout = choose(weight_bits=10, device=CPU).few.layout  # type: ignore[misc]
    assert "planted" in used()


def test_a_kernel_that_cannot_run_is_left_out_with_a_warning(
    plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU without its fast kernel is slow; the log states the reason."""

    def fail(_: Tensor) -> None:
        raise FileNotFoundError("no C compiler")

    planted = plant(fail)
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        assert not passes_self_test(planted, CPU, 10)
    assert "FileNotFoundError: no C compiler" in caplog.text
    with pytest.raises(FileNotFoundError):
        self_test(planted, CPU, 10)
    assert self_test(KERNELS["plain"], CPU, 10)


def test_slow_products_on_a_gpu_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without Triton, for example. The memory plan then counts 16 bits for a weight of 10."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("symbiosis_priv.kernels.chip.chip_of", lambda device: SHEETS["H100 SXM"].chip)
    monkeypatch.setattr("symbiosis_priv.kernels.choice.self_test", lambda *_: True)
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        found = choose(weight_bits=10, device=torch.device("cuda:7"))
    assert {kernel.name for kernel in found} == {"plain"}
    assert "products on cuda:7 take float64" in caplog.text
    assert bits_per_weight(10, "cuda:7") == 16


def test_without_the_library_torch_computes_products() -> None:
    with switched(SYMBIOSIS_PRIV_NATIVE="0"):
        assert used() == {"plain"}


@pytest.mark.skipif(not native.vectorised(), reason="no compiled kernel with vectors here")
def test_the_instruction_set_can_be_forced() -> None:
    *others, best = native.isas()
    expected = {others[-1], best} if best is native.Isa.AMX else {best}
    assert used() == {f"native-{isa.name.lower()}" for isa in expected}
    with switched(SYMBIOSIS_PRIV_ISA="avx2"):
        assert used() == {"native-avx2"}
