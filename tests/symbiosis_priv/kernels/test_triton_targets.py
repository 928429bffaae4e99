"""Compiles the programs of the kernels for GPUs that are absent: every tile that a chip may get, in both directions. If
another chip has the same tiles and matrix instructions, only the largest one is compiled.

The compiled code uses the chip's matrix instructions, spills at most 16 bytes of registers, and needs no more shared
memory than the choice of tiles assumes (`Tile.memory`).
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from symbiosis_priv.kernels import KERNELS, triton_kernel
from symbiosis_priv.kernels.chip import Chip
from symbiosis_priv.kernels.triton_kernel import Tile, TritonKernel, chunk
from tests.gpu.chips import SHEETS, chosen

PROGRAM = Path(triton_kernel.__file__).with_name("triton_product.py")
CHIPS = {sheet.chip.architecture: sheet.chip for sheet in SHEETS.values()}
BITS = 10
# Compiles each case, and prints facts about the code. It runs without Triton's interpreter, and loads the programs from
# their file, because the package would import torch.
COMPILE = """
import contextlib, importlib.util, io, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

path, cases = sys.argv[1], json.loads(sys.argv[2])
spec = importlib.util.spec_from_file_location("triton_product", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def build(program, architecture, types, constants, warps, stages):
    function = getattr(module, program)
    names = [*types, *constants]
    unknown = {function.arg_names[p.num] for p in function.params if p.do_not_specialize}
    source = ASTSource(fn=function, signature={**types, **dict.fromkeys(constants, "constexpr")},
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if name not in unknown})
    number = architecture.removeprefix("sm_")
    target = GPUTarget("cuda", int(number), 32) if number != architecture else GPUTarget("hip", architecture, 64)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    code = built.asm["ptx"] if number != architecture else built.asm["amdgcn"]
    spills = re.findall(r"(\\d+) bytes spill stores|vgpr_spill_count: +(\\d+)", log.getvalue() + code)
    units = re.findall(r"(wgmma.mma_async|tcgen05.mma|mma.sync|v_mfma)\\S*(s8.s8|f16.f16|kind::f16|_i8)", code)
    spilled = max(int(number) for pair in spills for number in pair if number)
    return {"shared": built.metadata.shared, "spilled": spilled, "units": ["".join(unit) for unit in units],
            "fenced": "acq_rel" in code}

def build_all(cases):
    try:
        return [build(*case) for case in cases]
    except Exception as error:
        if re.search("gpu-name|not a recognized", str(error)):
            return str(error)[:500]
        raise

print(json.dumps([build_all(of_chip) for of_chip in cases]))
"""


class Built(msgspec.Struct):
    """Facts about compiled code."""

    shared: int
    spilled: int
    units: list[str]
    fenced: bool  # an atomic addition waits for other memory


def case(
    kernel: TritonKernel, chip: Chip, tile: Tile, *, forward: bool, bits: int = BITS, limbs: int = 4
) -> list[object]:
    entry = "*fp16" if kernel.floats else "*i8"
    types = {"limbs": entry, "sums": "*i32", "weights": "*i8", "result": "*i32"}
    types |= dict.fromkeys(("count", "width", "columns", "limb_stride", "high", "stride", "share", "blocks"), "i32")
    high = triton_kernel._high_bits(bits)
    constants = {"FORWARD": forward, "HIGH": high, "CHUNK": chunk(bits) if kernel.floats else 0, "LIMBS": limbs}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "TERMS": tile.terms}
    return ["tile", chip.architecture, types, constants, tile.warps, tile.stages]


def splitting(kernel: TritonKernel, chip: Chip) -> list[object]:
    types = {"rows": "*i32", "limbs": "*fp16" if kernel.floats else "*i8", "sums": "*i32"}
    types |= dict.fromkeys(("count", "width", "stride"), "i32")
    return ["split", chip.architecture, types, {"LIMBS": 4, "OFFSET": -384, "LINES": 8, "BLOCK": 1024}, 4, 3]


def unit(kernel: TritonKernel, chip: Chip, tile: Tile) -> str:
    """The matrix instruction that a tile's products should use."""
    if chip.architecture.startswith("gfx"):
        return "v_mfma_i8"
    if tile.rows < 64 or chip.architecture in ("sm_80", "sm_89", "sm_120"):
        return "mma.syncf16.f16" if kernel.floats else "mma.syncs8.s8"
    return "tcgen05.mmakind::f16" if kernel.floats else "wgmma.mma_asyncs8.s8"


def builds(chip: Chip) -> list[tuple[Tile, bool, int, int]]:
    """A tile, whether forward, the bits of weights and the limbs of rows, for all that is compiled for a chip."""
    kernel = chosen(chip)
    candidates = (tile for most in kernel.tiles for tile in kernel.candidates(chip, most, weight_bits=BITS))
    tiles = list(dict.fromkeys(candidates))
    if chip.architecture in ("sm_89", "sm_100", "sm_120"):  # instructions and tiles of sm_80 or sm_103
        tiles = tiles[-1:]  # the largest: it needs the most registers and shared memory
    if chip.architecture == "sm_80":
        tiles = [tile for tile in tiles if tile.rows >= 64]  # smaller ones have the same instructions on sm_90
    found = [(tile, forward, BITS, 4) for tile in tiles for forward in (True, False)]
    if chip.architecture in ("sm_90", "sm_103"):  # other weights, and the ring of 24 bits
        found += [(tiles[-1], False, 8, 3), (tiles[-1], True, 12, 4)]
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Built] | str]:
    """Per architecture, the facts about what `builds` says; or why this version of Triton cannot compile for it."""
    cases = []
    for chip in CHIPS.values():
        kernel = chosen(chip)
        cases.append([case(kernel, chip, tile, forward=f, bits=b, limbs=n) for tile, f, b, n in builds(chip)])
        cases[-1].append(splitting(kernel, chip))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DUMP_PTXAS_LOG": "1"}
    words = [sys.executable, "-c", COMPILE, str(PROGRAM), msgspec.json.encode(cases).decode()]
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = msgspec.json.decode(done.stdout, type=list[list[Built] | str])
    return dict(zip(CHIPS, found, strict=True))


@pytest.mark.skipif(not KERNELS["triton-int8"].supports(torch.device("cpu")), reason="needs Triton")
@pytest.mark.parametrize("architecture", CHIPS)
def test_every_tile_compiles_for_absent_gpus(architecture: str, compiled: dict[str, list[Built] | str]) -> None:
    chip, found = CHIPS[architecture], compiled[architecture]
    if isinstance(found, str):
        pytest.skip(f"Triton has no such target: {found}")
    kernel, split = chosen(chip), found.pop()
    assert not split.spilled
    for (tile, forward, bits, limbs), built in zip(builds(chip), found, strict=True):
        what = tile, forward, bits, limbs
        assert built.spilled <= 16, what
        assert not built.fenced
        high = triton_kernel._high_bits(bits)
        assert built.shared <= tile.memory(entry=1 + kernel.floats, high=high, spare=chip.asynchronous) <= chip.shared
        assert set(built.units) == {unit(kernel, chip, tile)}, what
        products = limbs if kernel.floats or bits <= 8 else 2 * limbs - 1
        assert len(built.units) % products == 0, what
