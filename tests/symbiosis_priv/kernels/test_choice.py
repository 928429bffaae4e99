"""The admission of kernels and the choice between them, tested with planted kernels."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import KERNELS, Packed, RingMatrix, choice, choose, self_test, tune
from symbiosis_priv.kernels.choice import candidates
from symbiosis_priv.kernels.kernel import Int32Kernel, Kernel
from symbiosis_priv.limits import RingBits
from tenant.bench.kernels import measure_kernels
from tests.builds import switched

CPU = torch.device("cpu")
SHAPE = (300, 300)
WEIGHT = torch.arange(-511, 512, dtype=torch.int16).repeat(88)[: 300 * 300].reshape(SHAPE)


class Planted(Int32Kernel):
    """A kernel that returns stored results of the int32 kernel, so it would always be the fastest; `spoil` alters
    them."""

    name = "planted"

    def __init__(self, spoil: Callable[[Tensor], object] = lambda _: None) -> None:
        self._spoil = spoil
        self._memo: dict[tuple[object, ...], Tensor] = {}
        self.counts: list[int] = []

    def is_candidate(self, device: torch.device) -> bool:
        return True

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


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels.json"


def used(memory: Path | None, *, kernel: str = "auto") -> set[str]:
    """Names of the kernels of every class."""
    return set(choose(SHAPE, weight_bits=10, device=CPU, kernel=kernel, results=memory).kernels.values())


SPOILERS: dict[str, Callable[[Tensor], object]] = {
    "every entry by one": lambda y: y.add_(1),
    "the lowest bit of the last column": lambda y: y[:, -1].bitwise_xor_(1),
    "the last row": lambda y: y[-1].zero_(),
    "float32 accumulation": lambda y: y.copy_(y.float().clamp(-(2**31), 2**31 - 128).to(torch.int32)),
}


def test_a_kernel_of_another_layout_than_the_chosen_one_is_not_tested(plant: Callable[..., Planted]) -> None:
    planted = plant()
    planted.layout = "planted"  # type: ignore[misc]
    assert "planted" not in used(None)
    assert not planted.counts


@pytest.mark.parametrize("fault", SPOILERS)
def test_an_inexact_kernel_is_left_out(
    fault: str, plant: Callable[..., Planted], memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(SPOILERS[fault])
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert planted not in candidates(CPU)
    assert "planted" not in used(memory)
    assert "kernel planted is not exact" in caplog.text


def test_a_kernel_that_cannot_run_is_left_out_with_a_warning(
    plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU without its fast kernel is slow; the log states the reason."""

    def fail(_: Tensor) -> None:
        raise FileNotFoundError("no C compiler")

    planted = plant(fail)
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.kernels"):
        assert planted not in candidates(CPU)
    assert "FileNotFoundError: no C compiler" in caplog.text
    with pytest.raises(FileNotFoundError):
        self_test(planted, CPU)
    assert self_test(KERNELS["int32"], CPU)
    timed = [row["kernel"] for row in measure_kernels(inputs=8, outputs=8, row_counts=[1], repeat=1)]
    assert timed.count("int32") == 2  # directions
    assert "planted" not in timed


def test_a_kernel_that_is_inexact_for_a_shape_only_is_left_out(plant: Callable[..., Planted], memory: Path) -> None:
    planted = plant(lambda y: y.add_(y.shape[1] == SHAPE[0]))
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert planted in candidates(CPU)
    assert "planted" not in used(memory)


def test_an_exact_and_faster_kernel_is_chosen_and_remembered(plant: Callable[..., Planted], memory: Path) -> None:
    """The control: the planted kernel is refused only because of its fault."""
    planted = plant()
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert used(memory) == {"planted"}
    measured = len(planted.counts)
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert len(planted.counts) == measured
    assert used(None) != {"planted"}  # without a memory file, choosing never measures
    assert len(planted.counts) == measured


def test_an_incomplete_measurement_is_not_used(plant: Callable[..., Planted], memory: Path) -> None:
    """The file is of another release, or damaged."""
    plant()
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    ((key, whole),) = json.loads(memory.read_text()).items()
    half = {"forward few": "planted"}
    parts: list[dict[str, object]] = [{"kernels": {}}, {"kernels": half}, {"layout": "nonsense", "kernels": {}}]
    for part in parts:
        memory.write_text(json.dumps({key: whole | part}))
        assert choose(SHAPE, weight_bits=10, device=CPU, results=memory) == choose(SHAPE, weight_bits=10, device=CPU)


def test_a_slower_kernel_is_not_chosen(plant: Callable[..., Planted], memory: Path) -> None:
    plant(lambda _: time.sleep(0.02))
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert memory.is_file()
    assert "planted" not in used(memory)


def test_a_remembered_kernel_that_no_longer_exists_is_not_used(
    plant: Callable[..., Planted], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = used(None)
    plant()
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    monkeypatch.delitem(KERNELS, "planted")
    assert used(memory) == default


def test_a_shardable_kernel_is_chosen_although_another_is_faster(plant: Callable[..., Planted], memory: Path) -> None:
    planted = plant()
    planted.shard_granule = None  # type: ignore[assignment, misc]
    for shardable in (True, False):
        tune(WEIGHT, weight_bits=10, device=CPU, shardable=shardable, results=memory)
    assert used(memory) == {"planted"}
    for where in (memory, None):
        found = choose(SHAPE, weight_bits=10, device=CPU, shardable=True, results=where)
        assert all(KERNELS[name].shard_granule is not None for name in found.kernels.values())


DEEP = b'{"a": {"layout": "", "kernels": {}, "later": ' + b"[" * 10_000


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b'{"\xff": {}}', DEEP])
def test_a_damaged_memory_is_measured_again(content: bytes, plant: Callable[..., Planted], memory: Path) -> None:
    plant()
    memory.parent.mkdir()
    memory.write_bytes(content)
    assert used(memory)
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert used(memory) == {"planted"}


def test_candidates_of_one_layout_are_not_measured(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, exact = next(iter(candidates(CPU))).layout, choice._exact_for

    def of_one_layout(*args: Any, **options: Any) -> list[Kernel]:
        return [kernel for kernel in exact(*args, **options) if kernel.layout == layout]

    monkeypatch.setattr(choice, "_exact_for", of_one_layout)
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    assert not memory.exists()


def test_a_measurement_is_found_by_a_process_with_another_number_of_threads(
    plant: Callable[..., Planted], memory: Path, set_threads: Callable[[int], None]
) -> None:
    """Weights are packed before an executor sets its threads."""
    plant()
    set_threads(1)
    tune(WEIGHT, weight_bits=10, device=CPU, results=memory)
    set_threads(2)
    assert used(memory) == {"planted"}


def test_measurements_are_separate_for_shapes_and_bits() -> None:
    known = {choice._shape_class(shape, 10, CPU) for shape in [(64, 64), (64, 128), (128, 64)]}
    known.add(choice._shape_class((64, 64), 8, CPU))
    assert len(known) == 4
    assert choice._shape_class((64, 64), 8, CPU) == choice._shape_class((70, 60), 8, CPU)


def test_a_named_kernel_must_be_exact_too(plant: Callable[..., Planted]) -> None:
    plant(SPOILERS["every entry by one"])
    with pytest.raises(ConfigError, match="planted"):
        RingMatrix(WEIGHT, weight_bits=10, kernel="planted")


def test_limbs_are_not_offered_beyond_their_accumulator() -> None:
    wide = torch.ones(1, (1 << 16) + 1, dtype=torch.int16)
    with pytest.raises(ConfigError, match="limbs"):
        RingMatrix(wide, weight_bits=4, kernel="limbs")
    assert RingMatrix(wide, weight_bits=4).chosen(1).name != "limbs"


def test_without_the_library_torch_computes_products() -> None:
    with switched(SYMBIOSIS_PRIV_NATIVE="0"):
        found = choose(SHAPE, weight_bits=10, device=CPU)
        assert found.layout == "plain"
        assert found.kernel(FORWARD, 1).name == "int32"
        assert found.kernel(BACKWARD, 64).name == "fp64"
        with pytest.raises(ConfigError, match="native-avx2"):
            choose(SHAPE, weight_bits=10, device=CPU, kernel="native-avx2")


@pytest.mark.skipif(not native.vectorised(), reason="no compiled kernel with vectors here")
def test_the_instruction_set_can_be_forced() -> None:
    *others, best = native.isas()
    expected = {others[-1], best} if best is native.Isa.AMX else {best}
    assert used(None) == {f"native-{isa.name.lower()}" for isa in expected}
    with switched(SYMBIOSIS_PRIV_ISA="avx2"):
        assert used(None) == {"native-avx2"}
        assert {choose(SHAPE, weight_bits=10, device=CPU).kernel(d, 9).name for d in DIRECTIONS} == {"native-avx2"}
