"""Properties of the Triton kernel only: division of products, range of accumulators, compilation for absent GPUs.

Its exactness is tested together with all other kernels, in test_matrix.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.kernels import KERNELS, RingMatrix
from symbiosis_priv.kernels.triton_kernel import MAX_TERMS, plan
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from tests.stacks import expert_product

CPU = torch.device("cpu")
TRITON = KERNELS["triton"]
needs_interpreter = pytest.mark.skipif(not TRITON.supports(CPU), reason="needs Triton's interpreter")

sizes = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 4096, MAX_TERMS, MAX_TERMS + 1, 3 * MAX_TERMS + 5]) | st.integers(
    1, 1 << 20
)


@given(count=st.integers(1, 5000), width=sizes, columns=sizes, processors=st.integers(1, 200))
def test_a_plan_covers_every_term_once(count: int, width: int, columns: int, processors: int) -> None:
    launch = plan(count, width, columns, processors=processors)
    down, across, shares = launch.grid
    assert (down - 1) * launch.tile.rows < count <= down * launch.tile.rows
    assert (across - 1) * launch.tile.columns < columns <= across * launch.tile.columns
    assert (shares - 1) * launch.share < width <= shares * launch.share
    assert launch.share % launch.tile.terms == 0
    assert launch.share <= MAX_TERMS
    assert max(across, shares) <= 65535  # CUDA's limit


@needs_interpreter
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_experts_part_of_a_stack_is_read_where_it_lies(direction: Direction) -> None:
    weight = (torch.arange(24 * 9, dtype=torch.int16).view(24, 9) * 37) % 1023 - 511
    matrix = RingMatrix(weight, weight_bits=10, kernel="triton").as_stack(3, turned=False)
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
def test_terms_of_one_sign_beyond_one_program(direction: Direction) -> None:
    """All partial sums are largest, and one tile has several programs."""
    width = MAX_TERMS + 5
    weight = torch.full((2, width) if direction == FORWARD else (width, 2), 2047, dtype=torch.int16)
    weight[0, 0] -= 1
    rows = torch.full((2, width), -0x7F7F7F80, dtype=torch.int32)
    rows[1] = -(1 << 31)
    assert plan(2, width, 2, processors=1).grid[2] > 1
    got = RingMatrix(weight, weight_bits=12, kernel="triton").product(rows, direction)
    x, w = rows.numpy().astype(np.int64), weight.numpy().astype(np.int64)
    assert torch.equal(got, torch.from_numpy((x @ (w.T if direction == FORWARD else w)).astype(np.int32)))


def test_without_triton_there_is_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not TRITON.supports(CPU)


def test_it_is_not_chosen_on_a_cpu() -> None:
    assert not TRITON.is_candidate(CPU)


COMPILE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from symbiosis_priv.kernels.triton_kernel import plan
from symbiosis_priv.kernels.triton_product import tile

def build(capability, count, direction, bits):
    launch = plan(count, 4096, 4096, processors=132)
    along, across = ("term_stride", "column_stride") if direction == "forward" else ("column_stride", "term_stride")
    types = dict(rows="*i32", digits="*i8", result="*i32", count="i32", width="i32", columns="i32", plane="i32",
                 term_stride="i32", column_stride="i32", share="i32", TWO_DIGITS="constexpr", ROWS="constexpr",
                 COLUMNS="constexpr", TERMS="constexpr")
    types[along] = "constexpr"
    values = {along: 1, "TWO_DIGITS": bits > 8, "ROWS": launch.tile.rows, "COLUMNS": launch.tile.columns,
              "TERMS": launch.tile.terms}
    even = ("rows", "digits", "result", "width", "columns", "plane", "share", across)
    place = list(types).index
    source = ASTSource(fn=tile, signature=types, constexprs={(place(n),): v for n, v in values.items()},
                       attrs={(place(n),): [["tt.divisibility", 16]] for n in even})
    options = {"num_warps": launch.tile.warps, "num_stages": launch.tile.stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    units = re.findall(r"(?:wgmma|mma)\\S*s32[.]s8[.]s8", built.asm["ptx"])
    return {"case": [capability, count, direction, bits], "shared": built.metadata.shared, "units": len(units)}

cases = [(capability, count, direction, 10) for capability in (80, 90) for count in (1, 32, 512)
         for direction in ("forward", "backward")]
print(json.dumps([build(*case) for case in [*cases, (90, 1, "forward", 8)]]))
"""


@pytest.mark.skipif(not TRITON.supports(CPU), reason="needs Triton")
def test_it_compiles_for_absent_gpus(tmp_path: Path) -> None:
    """To int8 matrix instructions, and within the shared memory of the smallest GPU that has them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    builds = msgspec.json.decode(done.stdout)
    assert len(builds) == 13
    for found in builds:
        assert found["units"] >= (4 if found["case"][-1] <= 8 else 7), found
        assert found["shared"] <= 99 << 10, found
