"""Makes the numbers of a weight that is stored in 8 or 4 bits (`forms`).

Nothing is rounded. A stored number less its zero point has at most 9 significant bits. So its product with a scale of
bfloat16, of float16 or of a power of two is a float32, and its product with a scale of float32 is a float64. One form
(NVFP4 of compressed-tensors) divides by a number: the quotient is rounded to a float64. What bitsandbytes
stored is read by a module of its own.
"""

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.checkpoints import bitsandbytes
from symbiosis_priv.checkpoints.forms import Form

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of a word that holds its column 0, 1, ...
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in every field of a word
_AT_ONCE = 1 << 20  # numbers that are widened at the same time
_SCALES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e8m0fnu)


def shape(form: Form, parts: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape of a weight. The tensors may be on the meta device, but for `shape`. Raises what `widen` raises."""
    if form.method == "bitsandbytes":
        return bitsandbytes.shape(form, parts)
    numbers = _numbers(form, parts)[0]
    return tuple((numbers.mT if form.transposed else numbers).shape)


def widen(form: Form, parts: dict[str, Tensor], *, at: int | None = None) -> Tensor:
    """A weight, float32 or float64, from its stored tensors by kind (`forms.Parts`); only the matrix `at` of a stack.
    Raises `ValueError`, or what torch raises: the tensors do not fit together, or the weight holds inf or nan."""
    if at is not None:
        parts = {kind: part[at] for kind, part in parts.items()}
    if form.method == "bitsandbytes":
        return bitsandbytes.widen(form, parts)
    numbers, scales, zeros = _numbers(form, parts)
    *stack, rows, columns = numbers.shape
    scales = _scales_of_all(parts, scales)
    grouped = "groups" in parts and not (form.method == "compressed-tensors" and bool((parts["groups"] == -1).all()))
    grid, scales = _grid(scales, numbers, form, grouped=grouped)
    column = torch.arange(columns, dtype=torch.int64, device="cpu") // grid[1]
    if grouped:
        column = parts["groups"].to(torch.int64)
        if column.shape != (columns,) or not 0 <= int(column.min()) <= int(column.max()) < scales.shape[-1]:
            raise ValueError("a column's group is out of range")
        if len(column.unique()) < scales.shape[-1]:
            raise ValueError("a group with scales has no columns")
    dtype = torch.float64 if scales.dtype in (torch.float32, torch.float64) else torch.float32
    scales = scales.to(dtype).reshape(-1, *scales.shape[-2:])
    if zeros is not None:
        if zeros.numel() != scales.numel() or len(zeros) != scales.shape[1]:
            raise ValueError(f"{list(zeros.shape)} zero points do not fit {list(scales.shape[1:])} scales")
        _check_zeros(form, parts, zeros)
        zeros = zeros.to(dtype).reshape(scales.shape)
    fp4 = torch.tensor(_FP4, dtype=dtype, device="cpu")
    weight = large_tensor((*stack, rows, columns), dtype=dtype)
    numbers, matrices = numbers.reshape(-1, rows, columns), weight.view(-1, rows, columns)

    def spread(entries: Tensor) -> Tensor:
        """Rows of the grid `[n, grid columns]`, with an entry for each column."""
        if grouped or columns % grid[1]:
            return entries[:, column]
        return entries[:, :, None].expand(-1, -1, grid[1]).flatten(1)  # a copy in order is faster

    for index, matrix in enumerate(matrices):
        for start in range(0, rows, step := max(1, _AT_ONCE // columns)):
            out, part = matrix[start : start + step], numbers[index, start : start + step]
            row = torch.arange(start, start + len(part), dtype=torch.int64, device="cpu") // grid[0]
            part = part.to(dtype) if part.dtype != torch.uint8 else fp4[part.int()]
            if zeros is not None:
                part = part - spread(zeros[index, row])
            torch.mul(part, spread(scales[index, row]), out=out)
            if not all(edge.isfinite() for edge in out.aminmax()):
                raise ValueError("it holds inf or nan")
    return weight.mT if form.transposed else weight


def _numbers(form: Form, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The numbers without their scales, `[..., rows, columns]`: integers, FP8, or codes of FP4 in uint8. The scales and
    zero points: grids of fewer rows and columns."""
    values, scales, zeros = parts["values"], parts["scales"], parts.get("zeros")
    if scales.dtype == torch.uint8:  # exponents of two
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dtype not in _SCALES and not (scales.dtype == torch.float8_e4m3fn and values.dtype in _BYTES):
        raise ValueError(f"scales of {scales.dtype} are not read")
    if form.method in ("gptq", "awq"):
        assert zeros is not None
        bits, awq = _bits(form, parts), form.method == "awq"
        numbers = _fields(values, bits, along=1 if awq else 0, order=_AWQ if awq else None)
        words = zeros + _ONES[bits] if form.plus_one else zeros  # a field that borrowed carries into its neighbour
        zeros = _fields(words, bits, along=1, order=_AWQ if awq else None)
        return numbers.t(), scales.t(), zeros[:, : scales.shape[-1]].t()  # the last word may be half empty
    if "shape" in parts:
        rows, columns = map(int, parts["shape"].tolist())
        for bits in form.bits:
            if values.shape == (rows, -(-columns * bits // 32)):
                middle = 1 << bits - 1
                if zeros is not None and zeros.dtype != torch.int8:  # early versions did not pack them
                    zeros = _fields(zeros, bits, along=0)[:rows] - middle
                return _fields(values, bits, along=1)[:, :columns] - middle, scales, zeros
        raise ValueError(f"{list(values.shape)} words do not hold {rows} x {columns} numbers")
    if values.dtype in _FP8 or (values.dtype == torch.int8 and form.method == "compressed-tensors"):
        return values, scales, zeros
    if values.dtype == torch.int32 and form.method == "compressed-tensors":
        raise ValueError("its packed integers lack their shape")
    if values.dtype not in _BYTES or zeros is not None:
        raise ValueError(f"weights of {values.dtype} with these scales are not read")
    values = values.view(torch.uint8)  # two FP4 numbers in a byte, the lower bits first
    return torch.stack([values & 15, values >> 4], dim=-1).flatten(-3 if form.transposed else -2), scales, None


def _bits(form: Form, parts: dict[str, Tensor]) -> int:
    """The bits of GPTQ's and AWQ's integers, which may differ between the weights of a checkpoint (`dynamic`)."""
    zeros, scales, groups = parts["zeros"], parts["scales"], parts.get("groups")
    for bits in form.bits:
        columns = parts["values"].shape[0] * 32 // bits
        if zeros.shape[-1] == -(-scales.shape[-1] * bits // 32) and (groups is None or groups.shape == (columns,)):
            return bits
    raise ValueError(f"{list(zeros.shape)} words do not hold the zero points of {list(scales.shape)} scales")


def _check_zeros(form: Form, parts: dict[str, Tensor], zeros: Tensor) -> None:
    """Refuse zero points that contradict config.json, or that were lost when they were packed."""
    packed = form.method in ("gptq", "awq")
    bits = _bits(form, parts) if packed else 0
    if form.plus_one and not form.whole_words and bool((parts["zeros"] >> 32 - 2 * bits == -1).any()):
        # AutoGPTQ writes a zero point of 0 as -1, whose bits fill all higher fields of the word
        raise ValueError("a zero point of 0 has overwritten its neighbours; quantise it again with GPTQModel")
    middle = 1 << bits - 1 if packed else 0
    if form.symmetric and bool((zeros != middle).any()):
        other = int(zeros[zeros != middle][0])
        hint = '; perhaps its checkpoint_format is "gptq_v2"' if form.plus_one and other == middle + 1 else ""
        raise ValueError(f"config.json says that it is symmetric, but a zero point is {other}, not {middle}{hint}")


def _scales_of_all(parts: dict[str, Tensor], scales: Tensor) -> Tensor:
    """The scales, multiplied or divided by the number for all of them if they have one. Scales of FP8 need one."""
    kind = next((kind for kind in ("factor", "divisor") if kind in parts), None)
    if kind is None:
        if scales.dtype == torch.float8_e4m3fn:
            raise ValueError("it lacks the scale of its scales")
        return scales
    if parts[kind].numel() != 1 or parts[kind].dtype != torch.float32:
        raise ValueError("the scale of its scales is not one float32")
    number = parts[kind].item()
    return scales.double() * number if kind == "factor" else scales.double() / number


def _fields(words: Tensor, bits: int, *, along: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack the integers of `bits` bits in int32 `[a, b]`, lowest bits first, or in an `order`: int16, with `along`
    32/bits times as long."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ValueError(f"{words.dtype} {list(words.shape)} is not a matrix of packed integers")
    fields = [(words >> bits * field & (1 << bits) - 1).to(torch.int16) for field in order or range(32 // bits)]
    return torch.stack(fields, dim=along + 1).flatten(along, along + 1)


def _grid(scales: Tensor, numbers: Tensor, form: Form, *, grouped: bool) -> tuple[tuple[int, int], Tensor]:
    """The rows and columns that share a scale, and the scales as `[..., grid rows, grid columns]`: a grid of blocks,
    the columns in groups, or a scale for each row, or for all. If config.json states the size of a block or of a group,
    the last ones may be smaller."""
    while scales.ndim < numbers.ndim:
        scales = scales[..., None]
    rows, columns = numbers.shape[-2:]
    height, width = scales.shape[-2:]
    block = form.block
    if numbers.numel() and scales.shape[:-2] == numbers.shape[:-2] and scales.numel():
        if block is not None and (height, width) == (-(-rows // block[0]), -(-columns // block[1])):
            return block, scales
        if form.groups and width > 1 and not grouped:
            sizes = [size for size in form.groups if -(-columns // size) == width]
            if height == rows and len(sizes) == 1:
                return (1, sizes[0]), scales
            raise ValueError(f"{width} groups of {columns} columns are not of the sizes in config.json")
        # FP4 has smaller blocks of its own beside the FP8 of a checkpoint (DeepSeek-V4)
        free = block is None or numbers.dtype == torch.uint8 or (height, width) in ((rows, 1), (1, 1))
        if free and rows % height == 0 and (columns % width == 0 or grouped):
            return (rows // height, -(-columns // width)), scales
    raise ValueError(f"{list(scales.shape)} scales do not fit {list(numbers.shape)} numbers")
