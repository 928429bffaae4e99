"""Writes checkpoints in the forms in which others publish them (8 and 4 bits). It shares no code with the reader: each
packer draws the stored numbers, and says in float64 which weight they are.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases import table

Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by the ending that takes the place of the weight's, and the weight: float64 `[rows, columns]`."""
Packer = Callable[[int, int, np.random.Generator], Packed]

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
GROUP = 16


def words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack unsigned integers along the last dimension into int32, padded with zeros. `order`: the column that each
    field of a word holds."""
    per = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per))).astype(np.uint64)
    out = np.zeros((len(padded), padded.shape[1] // per), dtype=np.uint64)
    for word in range(out.shape[1]):
        for field in range(per):
            column = word * per + (order[field] if order else field)
            out[:, word] |= padded[:, column] << np.uint64(bits * field)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def spread(grid: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(grid, block[0], 0)[:rows], block[1], 1)[:, :columns]


def near_the_ends(low: int, high: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Integers from `low` to `high`, half of them among the two lowest and the two highest."""
    drawn = rng.integers(low, high, size=shape, endpoint=True)
    return np.where(rng.random(shape) < 0.5, rng.choice([low, low + 1, high - 1, high], shape), drawn)


def scales(shape: tuple[int, ...], rng: np.random.Generator, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.exp(rng.normal(size=shape) - 4)).to(dtype)


def floats(ending: str, block: tuple[int, int] | None, dtype: torch.dtype) -> Packer:
    """FP8 with a scale per block; without blocks, per row."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        height, width = block or (1, columns)
        values = torch.from_numpy(rng.normal(size=(rows, columns)) * 40).to(torch.float8_e4m3fn)
        drawn = scales((-(-rows // height), -(-columns // width)), rng, torch.float32) / 8
        if dtype == torch.float8_e8m0fnu:
            drawn = drawn.log2().round().exp2()
        grid = drawn.to(dtype)
        wide = spread(grid.to(torch.float64).numpy(), rows, columns, (height, width))
        return {".weight": values, ending: grid}, values.to(torch.float64) * torch.from_numpy(wide)

    return pack


def integers(
    bits: int, *, group: int | None = GROUP, zeros: bool = False, ordered: bool = False, early: bool = False
) -> Packer:
    """compressed-tensors: int8 as it is (without a group), or packed integers, with zero points or groups of columns in
    any order. Its early versions did not pack zero points. Groups in order are stored as -1."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
        values = near_the_ends(low, high, (rows, columns), rng)
        width = group or columns
        grid = scales((rows, columns // width), rng, torch.bfloat16)
        which = np.arange(columns) // width
        found = {".weight_scale": grid}
        if ordered:
            which = rng.permutation(which)
        if ordered or early:
            found[".weight_g_idx"] = torch.from_numpy(np.full(columns, -1) if early else which).to(torch.int32)
        wide = grid.to(torch.float64).numpy()[:, which]
        zero = np.zeros_like(grid.float().numpy(), dtype=np.int64)
        if zeros:
            zero = near_the_ends(low, high, zero.shape, rng)
        if group is None:
            found[".weight"] = torch.from_numpy(values).to(torch.int8)
            if zeros:
                found[".weight_zero_point"] = torch.from_numpy(zero).to(torch.int8)
        else:
            found[".weight_packed"] = words(values - low, bits)
            found[".weight_shape"] = torch.tensor([rows, columns])
            if early:
                found[".weight_zero_point"] = torch.from_numpy(zero).to(torch.int8)
            elif zeros:
                found[".weight_zero_point"] = words((zero - low).T, bits).T.contiguous()
        return found, torch.from_numpy((values - zero[:, which]) * wide)

    return pack


def gptq(*bits: int, ordered: bool = False, zeros: str = "gptqmodel", second: bool = False) -> Packer:
    """GPTQ, in one of several widths. `zeros`: how zero points are packed in the first format. AutoGPTQ subtracts one
    from each and ORs the results, so that a 0 overwrites what is above it in its word; GPTQModel subtracts one from all
    fields of a packed word at once; `middle` are those of a symmetric checkpoint."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        groups, width = columns // GROUP, int(rng.choice(bits))
        values = near_the_ends(0, (1 << width) - 1, (columns, rows), rng)
        zero = near_the_ends(0, (1 << width) - 1, (groups, rows), rng)
        if zeros == "middle":
            zero[:] = 1 << width - 1
        grid = scales((groups, rows), rng, torch.float16)
        which = np.arange(columns) // GROUP
        if ordered:
            which = rng.permutation(which)
        packed = words(zero, width)
        if zeros == "autogptq":
            fields = (zero - 1).astype(np.uint32).reshape(groups, -1, 32 // width)  # -1 fills a word
            shifts = np.arange(0, 32, width, dtype=np.uint32)
            packed = torch.from_numpy(np.bitwise_or.reduce(fields << shifts, axis=-1).view(np.int32).copy())
        elif not second:
            packed = packed - {4: 0x11111111, 8: 0x01010101}[width]
        found = {
            ".qweight": words(values.T, width).T.contiguous(),
            ".qzeros": packed,
            ".scales": grid,
            ".g_idx": torch.from_numpy(which).to(torch.int32),
        }
        weight = grid.to(torch.float64).numpy()[which] * (values - zero[which])
        return found, torch.from_numpy(weight.T.copy())

    return pack


def awq(rows: int, columns: int, rng: np.random.Generator) -> Packed:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    groups = columns // GROUP
    values = near_the_ends(0, 15, (columns, rows), rng)
    zero = near_the_ends(0, 15, (groups, rows), rng)
    grid = scales((groups, rows), rng, torch.float16)
    which = np.arange(columns) // GROUP
    found = {".qweight": words(values, 4, order), ".qzeros": words(zero, 4, order), ".scales": grid}
    weight = grid.to(torch.float64).numpy()[which] * (values - zero[which])
    return found, torch.from_numpy(weight.T.copy())


NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
BNB_CODES = {
    "nf4": np.array(NF4.split(), dtype=np.float32),
    "fp4": np.array([s * n for s in (1, -1) for n in (0, 0.0625, 8, 12, 4, 6, 2, 3)], dtype=np.float32)
    / np.float32(12),
}


def bitsandbytes(kind: str, *, block: int = 64, nested: bool = False, dtype: str = "bfloat16") -> Packer:
    """NF4 or FP4: two numbers in a byte, the first in the upper bits, and a scale for each block of the flattened
    matrix. Nested scales are codes of 8 bits themselves."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        count = rows * columns
        codes = rng.integers(0, 16, size=count + count % 2)
        absmax = np.exp(rng.normal(size=-(-count // block)) - 3).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": [rows, columns]}
        found = {".weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None]}
        if nested:
            stored = rng.integers(0, 256, size=len(absmax))
            outer = np.exp(rng.normal(size=-(-len(absmax) // 256)) - 4).astype(np.float32)
            table = np.sort(rng.uniform(-1, 1, size=256)).astype(np.float32)
            offset = float(np.float32(0.05))
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = table[stored] * np.repeat(outer, 256)[: len(stored)] + np.float32(offset)
            found[".weight.absmax"] = torch.from_numpy(stored.astype(np.uint8))
            found[".weight.nested_absmax"] = torch.from_numpy(outer)
            found[".weight.nested_quant_map"] = torch.from_numpy(table)
        else:
            found[".weight.absmax"] = torch.from_numpy(absmax)
        found[".weight.quant_map"] = torch.from_numpy(BNB_CODES[kind].copy())
        found[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        product = (BNB_CODES[kind][codes] * np.repeat(absmax, block)[: len(codes)])[:count]
        return found, torch.from_numpy(product).to(getattr(torch, dtype)).double().view(rows, columns)

    return pack


def bitsandbytes_int8(rows: int, columns: int, rng: np.random.Generator) -> Packed:
    values = near_the_ends(-127, 127, (rows, columns), rng).astype(np.int8)
    absmax = np.exp(rng.normal(size=rows) - 2).astype(np.float32)
    weight = values.astype(np.float32) * absmax[:, None] * np.float32(7.874015718698502e-3)
    parts = {".weight": values, ".SCB": absmax, ".weight_format": np.array(0, dtype=np.uint8)}
    return {ending: torch.from_numpy(part) for ending, part in parts.items()}, torch.from_numpy(weight).double()


def in_pairs(codes: np.ndarray) -> Tensor:
    """Two FP4 numbers in a byte, the first in the lower bits."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def pairs(endings: tuple[str, str], width: int) -> Packer:
    """Two FP4 numbers in a byte, and a power of two for `width` of them."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        codes = rng.integers(0, 16, size=(rows, columns))
        exponents = rng.integers(118, 124, size=(rows, columns // width))
        wide = spread(2.0 ** (exponents - 127), rows, columns, (1, width))
        found = {endings[0]: in_pairs(codes), endings[1]: torch.from_numpy(exponents.astype(np.uint8))}
        return found, torch.from_numpy(np.array(FP4)[codes] * wide)

    return pack


def nvfp4(ending: str, of_all: str, *, divides: bool) -> Packer:
    """Two FP4 numbers in a byte, a scale in FP8 for 16 of them, and a float32 that multiplies or divides all scales."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> Packed:
        codes = rng.integers(0, 16, size=(rows, columns))
        grid = torch.from_numpy(rng.uniform(1, 400, size=(rows, columns // 16))).to(torch.float8_e4m3fn)
        number = torch.tensor([5000.0 + rng.random() if divides else 1e-4 * (1 + rng.random())], dtype=torch.float32)
        wide = grid.double() / number.double() if divides else grid.double() * number.double()
        found = {f".weight{ending}": in_pairs(codes), ".weight_scale": grid, f".weight{of_all}": number}
        return found, torch.from_numpy(np.array(FP4)[codes] * spread(wide.numpy(), rows, columns, (1, 16)))

    return pack


def _as_bytes(packed: Packed) -> Packed:
    """Scales that are powers of two as their exponents in uint8."""
    found, weight = packed
    return found | {".weight_scale": found[".weight_scale"].view(torch.uint8)}, weight


FORMS: dict[str, tuple[dict[str, Any], Packer]] = {
    form: (given["entry"], eval(given["pack"])) for form, given in table(__file__, "forms").items()
}
"""The entry of config.json and the packer of each form of a single matrix."""

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}


def publish(source: Path, folder: Path, form: str, *, chosen: str = r"layers\.") -> Path:
    """Write a checkpoint whose matrices are in a form if their names match `chosen`. Beside it, in `<folder>-wide`,
    write the same model without the form, in float32 or, where a weight is not a float32, in float64. Returns that
    folder."""
    if form == "mxfp4":
        return publish_mxfp4(source, folder)
    entry, pack = FORMS[form]
    return _write(source, folder, entry, lambda tensors: _packed(tensors, pack, chosen))


def publish_mxfp4(source: Path, folder: Path) -> Path:
    """As `publish`, with the experts of gpt-oss in MXFP4: groups of 32 columns, and matrices stored transposed."""

    def pack(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        stored, wide = dict(tensors), dict(tensors)
        rng = np.random.default_rng(1)
        for name, tensor in tensors.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, inputs, outputs = tensor.shape
                made = [pairs(("_blocks", "_scales"), 32)(outputs, inputs, rng) for _ in range(experts)]
                blocks = torch.stack([found["_blocks"] for found, _ in made])
                del stored[name]
                stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
                stored[f"{name}_scales"] = torch.stack([found["_scales"] for found, _ in made])
                wide[name] = torch.stack([weight.T for _, weight in made]).contiguous()
        return stored, wide

    return _write(source, folder, MXFP4, pack)


def _packed(tensors: Mapping[str, Tensor], pack: Packer, chosen: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stored, wide = dict(tensors), dict(tensors)
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith(".weight") and re.search(chosen, name):
            found, wide[name] = pack(len(tensor), tensor.shape[1], rng)
            del stored[name]
            stored |= {name.removesuffix(".weight") + ending: part for ending, part in found.items()}
    assert len(stored) > len(tensors)
    return stored, wide


def _write(source: Path, folder: Path, entry: dict[str, Any], pack: Callable[..., Any]) -> Path:
    stored, wide = pack(load_file(source / "model.safetensors"))
    exact = all(torch.equal(tensor.float().double(), tensor.double()) for tensor in wide.values())
    wide_folder = folder.with_name(f"{folder.name}-wide")
    for path, tensors in ((folder, stored), (wide_folder, wide)):
        shutil.copytree(source, path)
        made = {n: t.float() if exact and t.dtype == torch.float64 else t for n, t in tensors.items()}
        save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return wide_folder
