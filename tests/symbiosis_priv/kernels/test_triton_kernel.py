"""Properties of the kernels for GPUs only: choice by chip, division of products, range of accumulators, far offsets.

Their exactness is tested together with all other kernels, in test_matrix.py; `test_triton_targets.py` compiles them for
absent GPUs.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import (
    KERNELS,
    Kernel,
    Packed,
    RingMatrix,
    bits_per_weight,
    chip as chips,
    choice,
    choose,
    triton_kernel,
)
from symbiosis_priv.kernels.chip import Chip
from symbiosis_priv.kernels.choice import probe_rows
from symbiosis_priv.kernels.triton_kernel import MAX_TERMS, TILES, Tile, TritonKernel, chunk, plan
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, RingBits
from tests.builds import only
from tests.gpu.chips import ROWS, SHEETS, Sheet, best, chosen, scheme
from tests.stacks import expert_product

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRITON = {kernel.name: kernel for kernel in KERNELS.values() if isinstance(kernel, TritonKernel)}
needs_interpreter = pytest.mark.skipif(not TRITON["triton-int8"].supports(CPU), reason="needs Triton's interpreter")
by_kernel = pytest.mark.parametrize("kernel", TRITON.values(), ids=TRITON)
by_direction = pytest.mark.parametrize("direction", DIRECTIONS)

# Which chip gets what


def names_of(kernels: Iterable[Kernel]) -> set[str]:
    return {kernel.name for kernel in kernels}


def use(monkeypatch: pytest.MonkeyPatch, chip: Chip | None) -> None:
    """Let every CUDA device be this chip, on which every kernel is exact."""
    monkeypatch.setattr(chips, "chip_of", lambda device: chip if device.type == "cuda" else None)
    monkeypatch.setattr(choice, "passes_self_test", lambda kernel, device, weight_bits: True)


def test_the_facts_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's and AMD's, by index. A card that is not there has none: its number is the operator's."""
    facts = {"multi_processor_count": 132, "total_memory": 1 << 30, "warp_size": 32, "shared_memory_per_block": 1 << 16}
    nvidia = SimpleNamespace(**facts, name="H100", major=9, minor=0, shared_memory_per_block_optin=227 << 10)
    amd = SimpleNamespace(**facts | {"warp_size": 64}, name="MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    cards = {None: nvidia, 0: nvidia, 1: amd}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    read = chips.chip_of.__wrapped__
    assert read(CUDA) == read(torch.device("cuda:0")) == Chip("H100", "sm_90", 132, 1 << 30, 227 << 10)
    assert read(CPU) is read(torch.device("cuda:2")) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert read(torch.device("cuda:1")) == Chip("MI300X", "gfx942", 132, 1 << 30, 1 << 16, lanes=64)


@pytest.mark.parametrize("height", [0, 1536, 100])
@pytest.mark.parametrize("name", SHEETS)
def test_every_chip_gets_its_kernel_for_every_number_of_rows(
    name: str, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for experts of any height. Every layout can be sharded."""
    use(monkeypatch, SHEETS[name].chip)
    kernel = "triton-fp16" if name in ("B200", "B300") else "triton-int8"
    for weight_bits in (8, 10, 12):
        assert names_of(choose(weight_bits=weight_bits, device=CUDA, height=height)) == {kernel}
        assert bits_per_weight(weight_bits, "cuda") == weight_bits
    assert KERNELS[kernel].granule == 1


@pytest.mark.parametrize("weight_bits", [8, 10])
@pytest.mark.parametrize("rows", [*ROWS, 17, 33, 64, 65])
@pytest.mark.parametrize("sheet", SHEETS.values(), ids=SHEETS)
def test_the_chosen_kernel_is_near_the_best_exact_scheme(sheet: Sheet, rows: int, weight_bits: int) -> None:
    kernel = chosen(sheet.chip)
    assert all(kernel.candidates(sheet.chip, rows, weight_bits=bits) for bits in (weight_bits, 12))
    seconds = scheme(sheet, kernel, weight_bits, rows).seconds(sheet, rows)
    assert seconds <= 1.4 * best(sheet, weight_bits, rows) or rows in (17, 33, 65)  # beside a tile's size


@pytest.mark.parametrize("architecture", ["sm_75", "gfx1030", "gfx90a", "gfx1100", "sm_121"])
def test_chips_without_matrix_units_multiply_in_float64(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 10.3 is what ROCm says of gfx1030; it says nothing."""
    use(monkeypatch, Chip("another", architecture, 60, 1 << 33, 64 << 10))
    kernel = "plain" if architecture in ("sm_75", "gfx1030") else "triton-int8"
    assert names_of(choose(weight_bits=10, device=CUDA)) == {kernel}


def test_without_a_device_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr(choice, "passes_self_test", lambda kernel, device, weight_bits: False)
    with pytest.raises(ConfigError, match="device = 'cpu'"):
        choose(weight_bits=10, device=CUDA)


# Tiles

EVERY_TILE = [
    pytest.param(kernel, tile, id=f"{kernel.name}-{tile.rows}x{tile.columns}")
    for kernel in TRITON.values()
    for tile in sorted({tile for tiles in kernel.tiles.values() for tile in tiles}, key=repr)
]
sizes = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 4096, MAX_TERMS, MAX_TERMS + 1, 3 * MAX_TERMS + 5]) | st.integers(
    1, 1 << 20
)


@given(
    tile=st.sampled_from([parameter.values[1] for parameter in EVERY_TILE]),
    count=st.integers(1, 5000),
    width=sizes,
    columns=sizes,
    processors=st.integers(1, 400),
)
def test_a_plan_covers_every_term_once(tile: Tile, count: int, width: int, columns: int, processors: int) -> None:
    (down, across, shares), share = plan(tile, count, width, columns, processors=processors)
    assert (down - 1) * tile.rows < count <= down * tile.rows
    assert (across - 1) * tile.columns < columns <= across * tile.columns
    assert (shares - 1) * share * tile.terms < width <= shares * share * tile.terms
    assert share * tile.terms <= MAX_TERMS
    assert max(across, shares) <= 65535  # CUDA's limit


@by_kernel
def test_the_fastest_tile_multiplies_and_is_timed_once(
    kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For each class of row counts and each direction; in this process, and in later ones of this machine. Another
    shape gets the first candidate."""
    results, timed = tmp_path / "tiles.json", list[int]()
    packed, other = (kernel.pack(torch.ones(8 * n, 8, dtype=torch.int16), weight_bits=8) for n in (1, 2))

    def milliseconds(run: object) -> float:  # the last candidate is the fastest
        timed.append(len(timed))
        return float(-len(timed))

    def fastest(kernel: TritonKernel, packed: Packed, place: int) -> None:
        for direction, (most, tiles) in itertools.product(DIRECTIONS, kernel.tiles.items()):
            assert kernel.tile(packed, direction, min(most, 1000)) == tiles[place]

    for content in (None, b"", b"{", b'{"a": 1}', b"\xff", b"[" * 10_000):
        fresh, again = (TritonKernel(floats=kernel.floats) for _ in range(2))
        if content is not None:
            results.write_bytes(content)
        timed.clear()
        for one in (fresh, fresh, again):
            one.choose(packed, results, milliseconds=milliseconds)
            fastest(one, packed, -1)
            fastest(one, other, 0)
        assert len(timed) == 2 * sum(map(len, kernel.tiles.values()))
    results.write_bytes(results.read_bytes().replace(b'"terms":', b'"terms":1'))  # tiles of another release
    TritonKernel(floats=kernel.floats).choose(packed, results, milliseconds=milliseconds)
    assert len(timed) == 4 * sum(map(len, kernel.tiles.values()))


@by_kernel
def test_a_card_without_memory_for_timing_keeps_the_first_tiles(kernel: TritonKernel, tmp_path: Path) -> None:
    fresh, results = TritonKernel(floats=kernel.floats), tmp_path / "tiles.json"
    packed = kernel.pack(torch.ones(8, 8, dtype=torch.int16), weight_bits=8)

    def milliseconds(run: object) -> float:
        raise torch.OutOfMemoryError("out of memory")

    fresh.choose(packed, results, milliseconds=milliseconds)
    assert all(fresh.tile(packed, FORWARD, min(most, 1000)) == tiles[0] for most, tiles in kernel.tiles.items())
    assert not results.exists()


def test_a_tile_that_fails_on_a_chip_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chip keeps it. If no tile is left for some rows, Triton's other kernel multiplies, or float64."""
    found, failing = [SHEETS["B200"].chip, SHEETS["B300"].chip], list[Tile]()

    def self_test(program: Kernel, device: torch.device, weight_bits: int) -> bool:
        if device.index and isinstance(program, TritonKernel) and program.tiles[1 << 62][0] in failing:
            raise RuntimeError("PTXAS error: internal error of the compiler")
        return True

    def names(weight_bits: int, card: int) -> set[str]:
        return names_of(choose(weight_bits=weight_bits, device=torch.device("cuda", card)))

    fresh = {name: TritonKernel(floats=kernel.floats) for name, kernel in TRITON.items()}
    monkeypatch.setattr(choice, "KERNELS", {**fresh, "plain": KERNELS["plain"]})
    monkeypatch.setattr(chips, "chip_of", lambda device: found[device.index])
    monkeypatch.setattr(choice, "self_test", self_test)
    few, many = (TILES[True][most] for most in (16, 1 << 62))
    failing += few[0], many[0]
    assert names(10, 0) == names(10, 1) == {"triton-fp16"}
    for most, tiles in ((1, few), (1000, many)):
        lists = [fresh["triton-fp16"].candidates(chip, most, weight_bits=10) for chip in found]
        assert lists == [list(tiles), list(tiles[1:])]
    failing += few[1:]
    assert (names(8, 0), names(8, 1)) == ({"triton-fp16"}, {"triton-int8"})
    failing += TILES[False][16]
    assert (names(12, 0), names(12, 1)) == ({"triton-fp16"}, {"plain"})


@by_kernel
def test_the_self_test_starts_every_program(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is compiled while a tenant waits: of every tile, in both rings. `split` has one for up to 16 rows."""
    started = set[tuple[object, ...]]()

    def pack(self: TritonKernel, weight: Tensor, *, weight_bits: int) -> Packed:
        return Packed(self.layout, len(weight), weight.shape[1], weight_bits, weight)

    def multiply(
        self: TritonKernel, tile: Tile, packed: Packed, rows: Tensor, out: Tensor, way: Direction, ring: int = 32
    ) -> None:
        started.add((tile, way, ring, len(rows) > 16))
        out.copy_(product(rows, packed.data, way))

    monkeypatch.setattr(TritonKernel, "pack", pack)
    monkeypatch.setattr(TritonKernel, "_multiply", multiply)
    assert TritonKernel(floats=kernel.floats).admit(lambda program: SELF_TEST(program, CPU, 10), CPU, 10)
    tiles = itertools.chain(*kernel.tiles.values())
    assert started == set(itertools.product(tiles, DIRECTIONS, get_args(RingBits), (False, True)))


@needs_interpreter
@by_direction
@pytest.mark.parametrize(("kernel", "tile"), EVERY_TILE)
def test_every_tile_is_exact(
    kernel: TritonKernel, tile: Tile, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles in both dimensions, several programs per tile, and rows, columns and terms beside the last tile."""
    monkeypatch.setattr(kernel, "tiles", {1 << 62: (tile,)})
    monkeypatch.setattr(triton_kernel, "_LEAST_STEPS", 1)
    cases: list[tuple[int, RingBits]] = [(8, 32), (10, 32), (10, 24), (12, 24)]
    for bits, ring_bits in cases:
        columns, width, count = tile.columns + 5, tile.terms + 9, tile.rows + 1
        shape = (columns, width) if direction == FORWARD else (width, columns)
        weight, rows = probe_rows(*shape) % (1 << bits - 1), probe_rows(count, width)
        weight[0, 0] = -(1 << bits - 1) + 1
        got = torch.empty((count, columns), dtype=torch.int32)
        packed = kernel.pack(weight.to(torch.int16), weight_bits=bits)
        kernel.product(packed, rows, direction, got, ring_bits=ring_bits)
        assert torch.equal(got << 32 - ring_bits, product(rows, weight, direction) << 32 - ring_bits)


@pytest.mark.parametrize("bits", [4, 8, 10, 12])
def test_the_self_test_notices_a_unit_that_drops_a_bit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 sums need as many bits as the largest one has."""
    kernel, needed = TRITON["triton-fp16"], (chunk(bits) * 127 * ((1 << bits - 1) - 1)).bit_length()

    def pack(weight: Tensor, *, weight_bits: int) -> Packed:
        return Packed(kernel.layout, len(weight), weight.shape[1], weight_bits, weight)

    def multiply(kept: int, packed: Packed, rows: Tensor, way: Direction, out: Tensor, **_: object) -> None:
        weight, total = (packed.data.t() if way == FORWARD else packed.data).long(), torch.zeros(1, dtype=torch.int64)
        share = plan(kernel.tile(packed, way, 1), len(rows), len(weight), out.shape[1], processors=132)[1]
        for place in range(4):
            limb = ((rows - 0x7F7F7F80) ^ -0x7F7F7F80) >> 8 * place
            digits, sums = limb.to(torch.int8).long(), torch.zeros(1, dtype=torch.int64)
            for first in range(0, len(weight), 16):
                if first % (share * 64) % chunk(bits) == 0:
                    total, sums = total + (sums << 8 * place), torch.zeros(1, dtype=torch.int64)
                sums = sums + digits[:, first : first + 16] @ weight[first : first + 16]
                dropped = (torch.frexp(sums.double()).exponent - kept).clamp(min=0)
                sums = (sums.abs() >> dropped << dropped) * sums.sign()
            total = total + (sums << 8 * place)
        out.copy_(total.to(torch.int32))

    monkeypatch.setattr(kernel, "pack", pack)
    for kept in (needed, needed - 1):
        monkeypatch.setattr(kernel, "product", partial(multiply, kept))
        assert SELF_TEST(kernel, CPU, bits) is (kept == needed)


@needs_interpreter
@by_kernel
def test_it_passes_the_self_test(kernel: TritonKernel) -> None:
    """With the real self-test, which other tests of this folder skip for kernels of Triton."""
    assert SELF_TEST(kernel, CPU, 10)


SELF_TEST = choice.self_test


# Exactness beyond what other kernels are tested for


def product(rows: Tensor, weight: Tensor, direction: Direction) -> Tensor:
    return expert_product(weight, (len(rows),), rows, direction, "outputs")


@needs_interpreter
@by_kernel
@by_direction
def test_an_experts_part_of_a_stack_is_read_where_it_lies(kernel: TritonKernel, direction: Direction) -> None:
    """An expert may begin at any output."""
    weight = (torch.arange(15 * 9, dtype=torch.int16).view(15, 9) * 37) % 1023 - 511
    with only(kernel.name):
        matrix = RingMatrix(weight, weight_bits=10).as_stack(3, transposed=False)
    counts = (1, 0, 2)
    width, _ = matrix.columns(direction, by_expert=True)
    rows = torch.arange(3 * width, dtype=torch.int32).view(3, width) * 0x7F4A7C1
    got = matrix.product(rows, direction, counts=counts)
    assert torch.equal(got, expert_product(weight, counts, rows, direction, "outputs"))


@pytest.mark.parametrize("bits", range(MIN_WEIGHT_BITS, MAX_WEIGHT_BITS + 1))
def test_accumulators_stay_exact(bits: int) -> None:
    """Triton's int8 products saturate on CUDA and wrap in its interpreter, and float32 sums are rounded differently on
    every unit, so only this calculation can test them here."""
    limb, top = 128, (1 << bits - 1) - 1
    high = 0 if bits <= 8 else 15 if bits > 10 else 3
    assert MAX_TERMS * limb * (128 + high) < 2**31
    assert chunk(bits) * limb * top <= 2**24
    assert top <= 2**11  # an integer that float16 holds
    for tile in itertools.chain(*TILES[True].values()):
        assert chunk(bits) % tile.terms == 0
        assert chunk(bits) <= tile.terms * triton_kernel._LEAST_STEPS


@needs_interpreter
@by_kernel
@by_direction
def test_terms_of_one_sign_beyond_one_program(
    kernel: TritonKernel, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All partial sums are largest, and one tile has several programs: the limit is lowered to a tenth."""
    monkeypatch.setattr(triton_kernel, "MAX_TERMS", 1 << 11)
    width = (1 << 12) + 5
    weight = torch.full((2, width) if direction == FORWARD else (width, 2), 2047, dtype=torch.int16)
    weight[0, 0] -= 1
    rows = torch.full((3, width), 0x7F7F7F80, dtype=torch.int32)  # all limbs are -128
    rows[1], rows[2] = -(1 << 31), -0x7F7F7F80
    packed = kernel.pack(weight, weight_bits=12)
    assert plan(kernel.tile(packed, direction, 3), 3, width, 2, processors=1)[0][2] > 1
    got = torch.empty((3, 2), dtype=torch.int32)
    kernel.product(packed, rows, direction, got)
    assert torch.equal(got, product(rows, weight, direction))


@needs_interpreter
@by_direction
@by_kernel
@pytest.mark.parametrize("bits", [8, 10])
def test_weights_beyond_the_range_of_int32(
    bits: int, kernel: TritonKernel, direction: Direction, tmp_path: Path
) -> None:
    """Offsets of more than 2^31 entries, in a sparse file: the lines lie far apart."""
    outputs, inputs, stride = 300, 70, 1 << 23
    weight = (probe_rows(outputs, inputs) % (1 << bits - 1)).to(torch.int16)
    packed = kernel.pack(weight, weight_bits=bits)
    file = np.memmap(tmp_path / "sparse", dtype=np.int8, mode="w+", shape=outputs * stride * packed.data.itemsize)
    far = torch.from_numpy(file).view(packed.data.dtype).view(outputs, stride)
    far[:, : packed.data.shape[1]] = packed.data
    width, columns = packed.columns(direction)
    rows, got = probe_rows(1, width), torch.empty((1, columns), dtype=torch.int32)
    kernel.product(Packed(packed.layout, outputs, inputs, bits, far), rows, direction, got)
    assert torch.equal(got, product(rows, weight, direction))


@needs_interpreter
def test_rows_beyond_the_range_of_int32(tmp_path: Path) -> None:
    """As in a product of many wide rows. Rows are the first dimension of a grid, which has room for 2^31 programs."""
    from symbiosis_priv.kernels import triton_product

    count, width, stride = 34, 100, 1 << 24
    weight, rows = (probe_rows(9, width) % 128).to(torch.int16), probe_rows(count, width)
    near, sums, got = (torch.empty(size, dtype=torch.int32) for size in ((count, 4, 128), (count, 1), (count, 9)))
    near = near.to(torch.int8)
    triton_product.split[(17, 1)](rows, near, sums, count, width, 128, LIMBS=4, OFFSET=0, LINES=2, BLOCK=128)
    file = np.memmap(tmp_path / "sparse", dtype=np.int8, mode="w+", shape=count * 4 * stride)
    far = torch.from_numpy(file).view(count, 4, stride)
    far[..., :128] = near
    data, numbers = KERNELS["triton-int8"].pack(weight, weight_bits=8).data, (count, width, 9, stride, 0, 128, 2, 1)
    sizes = {"FORWARD": True, "HIGH": 0, "CHUNK": 0, "LIMBS": 4, "ROWS": 16, "COLUMNS": 16, "TERMS": 64}
    triton_product.tile[(3, 1, 1)](far, sums, data, got, *numbers, **sizes)
    assert torch.equal(got, product(rows, weight, FORWARD))
