"""Properties of the Triton kernel only: division of products, range of accumulators, compilation for absent GPUs.

Its exactness is tested together with all other kernels, in test_matrix.py.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.kernels import KERNELS, RingMatrix, triton_kernel
from symbiosis_priv.kernels.choice import passes_self_test, probe_rows
from symbiosis_priv.kernels.triton_kernel import LEAST_MEMORY, MAX_TERMS, TILES, Tile, TritonKernel, plan
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from tests.stacks import expert_product

CPU = torch.device("cpu")
TRITON = KERNELS["triton"]
PROGRAM = Path(triton_kernel.__file__).with_name("triton_product.py")
needs_interpreter = pytest.mark.skipif(not TRITON.supports(CPU), reason="needs Triton's interpreter")

sizes = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 4096, MAX_TERMS, MAX_TERMS + 1, 3 * MAX_TERMS + 5]) | st.integers(
    1, 1 << 20
)


SMALL, LARGE = TILES[16][0], TILES[1 << 62][0]
EVERY_TILE = sorted({tile for tiles in TILES.values() for tile in tiles}, key=repr)


@given(
    tile=st.sampled_from(EVERY_TILE),
    terms=st.sampled_from([Tile.depth // 2, Tile.depth]),
    count=st.integers(1, 5000),
    width=sizes,
    columns=sizes,
    processors=st.integers(1, 200),
)
def test_a_plan_covers_every_term_once(
    tile: Tile, terms: int, count: int, width: int, columns: int, processors: int
) -> None:
    launch = plan(tile, count, width, columns, terms=terms, processors=processors)
    down, across, shares = launch.grid
    assert (down - 1) * tile.rows < count <= down * tile.rows
    assert (across - 1) * tile.columns < columns <= across * tile.columns
    assert (shares - 1) * launch.share < width <= shares * launch.share
    assert launch.share % terms == 0
    assert launch.share <= MAX_TERMS
    assert max(across, shares) <= 65535  # CUDA's limit


@needs_interpreter
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", EVERY_TILE, ids=repr)
def test_every_tile_is_exact(tile: Tile, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both dimensions, several programs per tile, and rows, columns and terms beside the last tile."""
    monkeypatch.setattr(triton_kernel, "TILES", {1 << 62: (tile,)})
    monkeypatch.setattr(triton_kernel, "_LEAST_STEPS", 1)
    for bits in (8, 12):
        columns, width, count = tile.columns + 5, Tile.depth + 9, tile.rows + 1
        shape = (columns, width) if direction == FORWARD else (width, columns)
        weight, rows = probe_rows(*shape) % (1 << bits - 1), probe_rows(count, width)
        weight[0, 0] = -(1 << bits - 1) + 1
        got = torch.empty((count, columns), dtype=torch.int32)
        TRITON.product(TRITON.pack(weight.to(torch.int16), weight_bits=bits), rows, direction, got)
        want = rows.long() @ (weight.t() if direction == FORWARD else weight).long()
        assert torch.equal(got, want.to(torch.int32))


@needs_interpreter
def test_it_passes_the_self_test() -> None:
    assert passes_self_test(TRITON, CPU)


def test_the_fastest_tile_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile is chosen for each class of row counts and each direction; another matrix gets the first candidate."""
    kernel, multiplied, times = TritonKernel(), list[Tile](), itertools.count(0, -1)
    monkeypatch.setattr(triton_kernel, "_multiply", lambda tile, *_: multiplied.append(tile))
    packed, other = (kernel.pack(torch.ones(8 * n, 8, dtype=torch.int16), weight_bits=8) for n in (1, 2))
    kernel.choose(packed, milliseconds=lambda run: next(times))  # the last candidate is the fastest
    for direction, (most, tiles) in itertools.product(DIRECTIONS, TILES.items()):
        rows = torch.empty((min(most, 1000), 1), dtype=torch.int32)
        kernel.product(packed, rows, direction, rows)
        kernel.product(other, rows, direction, rows)
        assert multiplied[-2:] == [tiles[-1], tiles[0]]


@needs_interpreter
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_experts_part_of_a_stack_is_read_where_it_lies(direction: Direction) -> None:
    weight = (torch.arange(24 * 9, dtype=torch.int16).view(24, 9) * 37) % 1023 - 511
    matrix = RingMatrix(weight, weight_bits=10, kernel="triton").as_stack(3, transposed=False)
    counts = (1, 0, 2)
    width, _ = matrix.columns(direction, by_expert=True)
    rows = torch.arange(3 * width, dtype=torch.int32).view(3, width) * 0x7F4A7C1
    got = matrix.product(rows, direction, counts=counts)
    assert torch.equal(got, expert_product(weight, counts, rows, direction, "outputs"))


@pytest.mark.parametrize("bits", range(MIN_WEIGHT_BITS, MAX_WEIGHT_BITS + 1))
def test_accumulators_stay_in_int32(bits: int) -> None:
    """Triton's int8 products saturate on CUDA and wrap in its interpreter, so only this calculation can test it
    here."""
    weight = torch.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), dtype=torch.int16)[None]
    digits = TRITON.pack(weight, weight_bits=bits).data.to(torch.int64)
    limb = 128
    assert MAX_TERMS * limb * int(digits.abs().flatten(1).amax(dim=1).sum()) < 2**31


@needs_interpreter
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_terms_of_one_sign_beyond_one_program(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """All partial sums are largest, and one tile has several programs. (The interpreter takes as long for a step of
    many terms as for a step of few.)"""
    monkeypatch.setattr(Tile, "depth", 2048)
    width = MAX_TERMS + 5
    weight = torch.full((2, width) if direction == FORWARD else (width, 2), 2047, dtype=torch.int16)
    weight[0, 0] -= 1
    rows = torch.full((2, width), -0x7F7F7F80, dtype=torch.int32)
    rows[1] = -(1 << 31)
    assert plan(SMALL, 2, width, 2, terms=Tile.depth // 2, processors=1).grid[2] > 1
    got = RingMatrix(weight, weight_bits=12, kernel="triton").product(rows, direction)
    x, w = rows.numpy().astype(np.int64), weight.numpy().astype(np.int64)
    assert torch.equal(got, torch.from_numpy((x @ (w.T if direction == FORWARD else w)).astype(np.int32)))


def test_without_triton_there_is_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not TRITON.supports(CPU)


def test_it_is_not_chosen_on_a_cpu() -> None:
    assert not TRITON.is_candidate(CPU)


# Loads the program from its file, because the package would import torch.
COMPILE = """
import importlib.util, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

path, cases = sys.argv[1], json.loads(sys.argv[2])
spec = importlib.util.spec_from_file_location("triton_product", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
numbers = ("count", "width", "columns", "row_stride", "plane", "stride", "share")
types = dict(limbs="*i8", digits="*i8", result="*i32", **dict.fromkeys(numbers, "i32"))

def build(capability, warps, stages, constants):
    names = [*types, *constants]
    source = ASTSource(fn=module.tile, signature={**types, **dict.fromkeys(constants, "constexpr")},
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if name != "count"})
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                           options={"num_warps": warps, "num_stages": stages})
    ptx = built.asm["ptx"]
    return {"shared": built.metadata.shared, "waits": len(re.findall("wgmma.wait_group", ptx)),
            "units": len(re.findall(r"(?:wgmma|mma)\\S*s32[.]s8[.]s8", ptx)),
            "waited_loads": len(re.findall("ld.global", ptx)), "bytewise": len(re.findall(r"shared[.][bsu]8", ptx))}

print(json.dumps([build(*case) for case in cases]))
"""


@pytest.mark.skipif(not TRITON.supports(CPU), reason="needs Triton")
def test_it_compiles_for_absent_gpus(tmp_path: Path) -> None:
    """The compiled code uses int8 matrix instructions, and no more shared memory than the choice of tiles assumes.

    On Hopper, each step waits for the matrix units once, and all loads go through the pipeline.
    """
    builds = [(90, LARGE, True, 2), (90, LARGE, False, 2), (90, SMALL, False, 1), (80, SMALL, True, 1)]
    cases = [
        (
            capability,
            tile.warps,
            tile.stages,
            {
                "FORWARD": forward,
                "DIGITS": digits,
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "TERMS": Tile.depth // digits,
            },
        )
        for capability, tile, forward, digits in builds
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(PROGRAM), msgspec.json.encode(cases).decode()],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    for (capability, tile, _, _), found in zip(builds, msgspec.json.decode(done.stdout), strict=True):
        assert found["units"] >= 4, found
        assert found["shared"] <= tile.memory, found
        if capability == 90:
            assert (found["waits"], found["waited_loads"], found["bytewise"]) == (1, 0, 0), found


def test_every_gpu_has_shared_memory_for_a_tile() -> None:
    assert all(min(tile.memory for tile in tiles) <= LEAST_MEMORY for tiles in TILES.values())
