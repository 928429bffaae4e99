"""Every kernel, instruction set and direction, compared with numpy's wrapping int64 product; dense and by expert."""

import gc
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.layers import Joined
from symbiosis_priv.errors import RangeError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import KERNELS, RingMatrix, choose
from symbiosis_priv.limits import RingBits
from symbiosis_priv.network import wire
from tests import drawn
from tests.builds import compiled, only, use_library
from tests.stacks import expert_counts, expert_product

AMX = KERNELS["native-amx"]
NAMES = [
    "auto",
    *(
        pytest.param(name, marks=pytest.mark.skipif(not kernel.supports(torch.device("cpu")), reason="not on this CPU"))
        for name, kernel in KERNELS.items()
        if kernel is not AMX
    ),
    "native-amx",
]
RING_BITS: tuple[RingBits, ...] = (32, 24)
TRITON_NAMES = ("triton-int8", "triton-fp16")  # their interpreter is slow
NATIVE_NAMES = [name for name in NAMES if getattr(name, "values", ("",))[0] not in TRITON_NAMES]
COMPILED_NAMES = [name for name in NATIVE_NAMES if str(getattr(name, "values", (name,))[0]).startswith("native-")]
# For Triton, few widths. `test_kernels_are_exact_at_the_corners` draws from all widths.
WIDTHS = {"triton-int8": (8, 12), "triton-fp16": (10,)}
EVERY_DIGIT = [
    pytest.param(value, bits, marks=getattr(name, "marks", ()))
    for name in NAMES
    for value in getattr(name, "values", (name,))
    for bits in WIDTHS.get(str(value), (4, 8, 10, 12))
]
CPU = torch.device("cpu")
SHAPES = [(1, 1), (1, 7), (9, 1), (3, 5), (33, 65), (64, 128), (70, 31)]
DEEP = [(65, 1031), (1031, 65)]  # more terms than any kernel takes in one block, and an odd remainder


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with its AMX instructions in plain C; all else is what runs with AMX, and needs AVX-512."""
    if native.Isa.AVX512 not in native.isas():
        pytest.skip("native-amx needs AVX-512, also where its tiles are emulated")
    return compiled(tmp_path_factory.mktemp("emulation"), flags="-DRING_EMULATE_TILES")


@pytest.fixture(autouse=True)
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`native-amx` runs with emulated tiles on processors without AMX."""
    chosen = request.node.callspec.params.get("kernel") if hasattr(request.node, "callspec") else None
    if chosen == "native-amx" and not AMX.supports(CPU):
        use_library(monkeypatch, request.getfixturevalue("emulation"))
        assert AMX.supports(CPU)


def matrix_of(weight: Tensor, kernel: str, *, bits: int = 10, device: str = "cpu") -> RingMatrix:
    with only(kernel):
        return RingMatrix(weight, weight_bits=bits, device=device)


def oracle(rows: Tensor, weight: Tensor, direction: Direction) -> Tensor:
    return expert_product(weight, (len(rows),), rows, direction, "outputs")


def assert_equal(got: Tensor, want: Tensor, ring_bits: RingBits = 32) -> None:
    """Equal modulo 2^ring_bits."""
    assert torch.equal(got << 32 - ring_bits, want << 32 - ring_bits)


def uniform(shape: tuple[int, int], *, bits: int, seed: int = 0) -> Tensor:
    """Uniform signed integers below 2^(bits - 1), both ends included."""
    peak = 2 ** (bits - 1) - 1
    dtype = torch.int32 if bits == 32 else torch.int16
    values = torch.from_numpy(np.random.default_rng(seed).integers(-peak, peak + 1, shape)).to(dtype)
    values.view(-1)[0], values.view(-1)[-1] = -peak, peak
    return values


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("kernel", "bits"), EVERY_DIGIT)
def test_kernels_are_exact(kernel: str, bits: int, direction: Direction) -> None:
    counts = (0, 3, 65) if kernel in TRITON_NAMES else (0, 1, 2, 3, 64, 513)  # both sides of a tile or block
    for shape in SHAPES + DEEP:
        weight = uniform(shape, bits=bits)
        matrix = matrix_of(weight, kernel, bits=bits)
        for count in counts if shape in SHAPES else (1, 5):
            rows = uniform((max(count, 1), shape[1 if direction == FORWARD else 0]), bits=32, seed=count)[:count]
            for ring_bits in RING_BITS if kernel not in TRITON_NAMES or count == 3 else RING_BITS[:1]:
                got = matrix.product(rows, direction, ring_bits=ring_bits)
                assert got.is_contiguous()
                assert_equal(got, oracle(rows, weight, direction), ring_bits)


@pytest.mark.parametrize("kernel", COMPILED_NAMES)
@given(
    direction=testing.directions(),
    bits=st.sampled_from([8, 10, 15]),
    ring_bits=st.sampled_from([24, 32]),
    terms=st.integers(1, 900) | st.sampled_from([64, 128, 192, 256, 320, 512, 640, 1100]),
    columns=st.integers(1, 300) | st.sampled_from([64, 128, 192, 256, 512, 600]),
    count=st.integers(1, 40) | st.sampled_from([3, 4, 16, 17, 64, 100]),
    cut=st.integers(0, 4),
)
def test_compiled_blocks_and_slices_cover_the_whole_product(
    kernel: str,
    direction: Direction,
    bits: int,
    ring_bits: RingBits,
    terms: int,
    columns: int,
    count: int,
    cut: int,
) -> None:
    """Whole and partial blocks, row groups of every size, weights of every packed width, one slice and two."""
    shape = (columns, terms) if direction == FORWARD else (terms, columns)
    weight, rows = uniform(shape, bits=bits), uniform((count, terms), bits=32, seed=terms)
    out = torch.empty((count, columns), dtype=torch.int32)

    def in_two(work: Callable[[int, int], None], *, total: int, least: int) -> None:
        for begin, end in itertools.pairwise([0, min(cut, total), total]):
            work(begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("symbiosis_priv.native.for_each_slice", in_two)
        packed = KERNELS[kernel].pack(weight, weight_bits=bits)
        KERNELS[kernel].product(packed, rows, direction, out, ring_bits=ring_bits)
    assert_equal(out, oracle(rows, weight, direction), ring_bits)


@pytest.mark.parametrize("kernel", NAMES)
@given(data=st.data(), direction=testing.directions(), bits=drawn.weight_bits(), ring_bits=st.sampled_from(RING_BITS))
def test_kernels_are_exact_at_the_corners(
    kernel: str, data: DataObject, direction: Direction, bits: int, ring_bits: RingBits
) -> None:
    outputs, inputs = data.draw(drawn.widths()), data.draw(drawn.widths())
    weight = data.draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    rows = data.draw(testing.ring_rows(width=inputs if direction == FORWARD else outputs))
    before = rows.clone()
    matrix = matrix_of(weight, kernel, bits=bits)
    got = matrix.product(rows, direction, ring_bits=ring_bits)
    assert_equal(got, oracle(rows, weight, direction), ring_bits)
    assert torch.equal(rows, before)  # the caller's rows are read, never written
    if (few := matrix.few(direction, len(rows), ring_bits)) is not None:  # the same from payload to payload
        encoding = wire.encoding_of("ring", ring_bits)
        payload = np.frombuffer(b"?" + encoding.pack(rows), dtype=np.uint8)
        answer = np.zeros(2 + encoding.size(*got.shape), dtype=np.uint8)
        few(payload.ctypes.data + 1, answer.ctypes.data + 1)
        assert not answer[0]
        assert not answer[-1]
        assert_equal(encoding.unpack(bytearray(answer[1:-1]), rows=len(rows)), got, ring_bits)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bits", [4, 10, 12, 15])
@pytest.mark.parametrize("kernel", NATIVE_NAMES)
def test_wide_products_of_one_sign(kernel: str, bits: int, direction: Direction) -> None:
    """All partial sums are largest, beyond the width at which float64 must split (2^(23 - b) terms)."""
    width = min(3 * 2 ** (23 - bits) + 5, 1 << 16)
    peak = 2 ** (bits - 1) - 1
    weight = torch.full((3, width) if direction == FORWARD else (width, 3), peak, dtype=torch.int16)
    weight[0, 0] -= 1
    matrix = matrix_of(weight, kernel, bits=bits)
    for corner in (-(2**31), 2**31 - 1, -0x7F7F7F80, 0x7F7F7F7F):
        rows = torch.full((9, width), corner, dtype=torch.int32)  # `plain` multiplies fewer in int32
        rows[1, ::2] += 1
        for ring_bits in RING_BITS:
            got = matrix.product(rows, direction, ring_bits=ring_bits)
            assert_equal(got, oracle(rows, weight, direction), ring_bits)


@pytest.mark.parametrize("kernel", NAMES)
def test_layout_and_threads_change_nothing(kernel: str, set_threads: Callable[[int], None]) -> None:
    weight, rows = uniform((48, 64), bits=10), uniform((64, 24), bits=32).t()  # a transposed view
    want = oracle(rows, weight, FORWARD)
    for threads in (1, 2, 4):
        set_threads(threads)
        assert torch.equal(matrix_of(weight, kernel).product(rows), want)
        strided = uniform((48, 128), bits=32)[::2, ::2]
        got = matrix_of(weight, kernel).product(strided)
        assert torch.equal(got, oracle(strided, weight, FORWARD))


@pytest.mark.parametrize("kernel", COMPILED_NAMES)
def test_slices_and_products_run_at_the_same_time(
    kernel: str, set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symbiosis_priv.kernels.kernel._SLICE_BYTES", 1)  # a slice per panel
    set_threads(4)
    weight, rows = uniform((1000, 300), bits=10), uniform((50, 300), bits=32)
    matrix, want = matrix_of(weight, kernel), oracle(rows, weight, FORWARD)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(got, want) for got in pool.map(matrix.product, [rows] * 6))


STORED = {"panels": (8, 10, 16), "plain": (8, 16, 16), "digits": (8, 10, 12)}


@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize("kernel", NAMES)
def test_one_packed_copy_serves_both_directions(kernel: str, bits: int) -> None:
    """As many bits per weight as the layout has, and nothing else of that size: no original, no second layout, no
    candidate."""
    outputs, inputs = 192, 384

    def multiplied() -> RingMatrix:
        matrix = matrix_of(uniform((outputs, inputs), bits=bits), kernel, bits=bits)
        for count, direction in itertools.product((1, 64), DIRECTIONS):
            matrix.product(uniform((count, matrix.columns(direction)[0]), bits=32), direction)
        return matrix

    multiplied()  # makes the kernel's own buffers
    before, matrix = held(outputs * inputs), multiplied()
    made = [t for key, t in held(outputs * inputs).items() if key not in before]
    stored = STORED[matrix.chosen(1).layout][(8, 10, 12).index(bits)]
    assert sum(t.nbytes for t in made) == matrix.nbytes == outputs * inputs * stored // 8


def held(size: int) -> dict[int, Tensor]:
    """The tensors of this process with at least `size` entries."""
    gc.collect()
    return {id(t): t for t in gc.get_objects() if type(t) is Tensor and t.numel() >= size}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kernel", NAMES)
def test_results_can_be_written_into_a_given_tensor(kernel: str, direction: Direction) -> None:
    weight = uniform((70, 31), bits=10)
    matrix = matrix_of(weight, kernel)
    width, columns = matrix.columns(direction)
    rows = uniform((300, width), bits=32)  # more than one block of rows
    buffer = torch.full((302, columns), 7, dtype=torch.int32)
    out = matrix.product(rows, direction, out=buffer[1:-1])
    assert out.data_ptr() == buffer[1].data_ptr()
    assert torch.equal(out, oracle(rows, weight, direction))
    assert set(buffer[[0, -1]].flatten().tolist()) == {7}


@pytest.mark.parametrize("shape", [(2, 3), (5,), (2, 5), (4, 5)])
def test_wrong_rows_and_counts_are_refused(shape: tuple[int, ...]) -> None:
    matrix = RingMatrix(torch.ones(12, 5, dtype=torch.int16), weight_bits=8, height=4).as_stack(3, transposed=False)
    for counts in (None,) if shape != (4, 5) else ((2, 1, 0), (4,)):
        with pytest.raises(RangeError, match="experts" if counts else None):
            matrix.product(torch.zeros(shape, dtype=torch.int32 if shape != (2, 5) else torch.float32), counts=counts)


@pytest.mark.parametrize("kernel", [name for name in NATIVE_NAMES if name != "auto"])
@settings(max_examples=15)
@given(
    counts=expert_counts(3),
    bits=st.sampled_from([8, 10]),
    joined=st.sampled_from(["outputs", "inputs"]),
    direction=testing.directions(),
    data=st.data(),
)
def test_a_stack_serves_dense_products_and_products_by_expert(
    kernel: str, counts: Counts, bits: int, joined: Joined, direction: Direction, data: DataObject
) -> None:
    experts, height, width = len(counts), KERNELS[kernel].granule * 2, 37
    generator = torch.Generator().manual_seed(0)
    peak = 2 ** (bits - 1)
    packed = torch.randint(1 - peak, peak, (experts * height, width), generator=generator, dtype=torch.int16)
    weight = packed if joined == "outputs" else packed.t()
    matrix = matrix_of(packed, kernel, bits=bits).as_stack(experts, transposed=joined == "inputs")
    rows = data.draw(testing.ring_rows(width=matrix.columns(direction, by_expert=True)[0], count=sum(counts)))
    got = matrix.product(rows, direction, counts=counts)
    assert got.is_contiguous()
    assert torch.equal(got, expert_product(weight, counts, rows, direction, joined))
    dense = data.draw(testing.ring_rows(width=matrix.columns(direction)[0], count=2))
    assert torch.equal(matrix.product(dense, direction), expert_product(weight, (2,), dense, direction, joined))


@pytest.mark.parametrize("height", [64, 24, 1])
def test_the_chosen_layout_can_be_cut_between_experts(height: int) -> None:
    assert all(height % kernel.granule == 0 for kernel in choose(weight_bits=10, device=CPU, height=height))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("kernel", ["auto", "plain", *TRITON_NAMES])
def test_kernels_are_exact_on_cuda(kernel: str, bits: int, direction: Direction) -> None:
    for shape in [*SHAPES, *DEEP, (513, 4099)]:
        weight = uniform(shape, bits=bits)
        matrix = matrix_of(weight, kernel, bits=bits, device="cuda")
        for count in (0, 1, 2, 17, 64):
            rows = uniform((max(count, 1), shape[1 if direction == FORWARD else 0]), bits=32, seed=count)[:count]
            got = matrix.product(rows, direction)
            assert got.device.type == "cuda"
            assert torch.equal(got.cpu(), oracle(rows, weight, direction))
